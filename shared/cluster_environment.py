"""What a process must have in its environment before it imports Ray, and how large the object store may be.

Ray looks a token up in RAY_AUTH_TOKEN, then in the file RAY_AUTH_TOKEN_PATH, then in ~/.ray/auth_token, and takes the
first it finds; all three only in RAY_AUTH_MODE "token". It reads mode and network settings when it is imported.
"""

import os
import shutil
import sys
from collections.abc import MutableMapping
from pathlib import Path

from shared.cluster_record import ClusterRecord
from shared.errors import ClusterError, ConfigError

_MIB = 1 << 20
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_SHARE = 0.4
_LEAST_STORE_BYTES = 75 * _MIB  # Ray refuses less


def own_environment(token_path: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Settings of a run's own cluster, for its head and whoever joins; Ray's workers inherit the head's.

    ClusterError when this process has imported Ray with other settings: the new ones would be ignored in silence.
    """
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        # Read on Linux too, despite its name: otherwise Ray listens on all interfaces, whatever address it is given.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    as_it_is = all(environment.get(name) == value for name, value in settings.items())
    if environment is os.environ and "ray" in sys.modules and not (as_it_is and "RAY_AUTH_TOKEN" not in environment):
        raise ClusterError("Ray was imported before its settings were known; join or start the cluster first.")
    environment.pop("RAY_AUTH_TOKEN", None)  # of another cluster; it would win over the file
    environment.update(settings)
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environment.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would starve the engines beside the learner


def join_environment(target: ClusterRecord | str, environment: MutableMapping[str, str] = os.environ) -> str:
    """Prepare `environment` for `ray.init(address=...)` and return that address.

    `target`: the run's own cluster, or the address of one that the user keeps. There the token is the user's, and
    without one this raises ConfigError; RAY_AUTH_MODE=disabled in the environment says that there is to be none.
    """
    if isinstance(target, ClusterRecord):
        own_environment(Path(target.token_path), environment)
        return target.address
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environment.setdefault("RAY_AUTH_MODE", "token")
    if environment["RAY_AUTH_MODE"].lower() == "token" and not _has_token(environment):
        raise ConfigError(
            f"--address {target}: there is no token for this cluster. Put it into the environment variable "
            f"RAY_AUTH_TOKEN, or into a file named by RAY_AUTH_TOKEN_PATH, or into ~/.ray/auth_token. If the cluster "
            f"runs without tokens, so that whoever reaches it may run code there, set RAY_AUTH_MODE=disabled."
        )
    return target


def object_store_bytes(model_path: Path) -> int:
    """Size of the object store in bytes: room for two versions of the weights, within what shared memory has free.

    A publication may be twice as large as the checkpoint's files (float32 weights of a bfloat16 checkpoint), and the
    next one is put while workers still fetch the last: four times the files, and 256 MiB for everything else. At most
    40 % of what is free in /dev/shm, because the engines' staged weights go there too; Ray spills what does not fit to
    disk. Never below Ray's own least size; where /dev/shm has not even that, Ray says so and uses a disk file.
    """
    wanted = 4 * sum(file.stat().st_size for file in model_path.glob("*.safetensors")) + 256 * _MIB
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
    return max(_LEAST_STORE_BYTES, min(wanted, int(_SHARED_MEMORY_SHARE * free)))


def _has_token(environment: MutableMapping[str, str]) -> bool:
    """Whether Ray will find one; where Kubernetes provides it, Ray finds it in a place of its own."""
    if environment.get("RAY_AUTH_TOKEN", "").strip() or environment.get("RAY_ENABLE_K8S_TOKEN_AUTH"):
        return True
    home = environment.get("HOME", "")
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path(home) / ".ray" / "auth_token")
    try:
        return bool(path.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return False
