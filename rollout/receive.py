"""Weights on their way in: fetched from the object store, verified, and staged as files that the engine can map.

The engine's workers are its own child processes and see no Ray objects, so the bytes pass through a folder in shared
memory: `<root>/seqrelay-<uid>-<run>-slot<slot>/v<version>/bucket-<i>.safetensors`. The root is /dev/shm, or what the
environment variable SEQRELAY_STAGING says, while it has room for all bytes plus a margin (a container has 64 MB by
default), else the user's folder among temporary files. Set the variable where the rollout service starts; it passes it
on to its workers. Containers that share one /dev/shm, but not their temporary files, need different roots.

Everything is verified before the first file is written; files live from `stage` to the end of the `with` block.
What a killed worker left is removed by the next one in its slot, and by `clear_abandoned`.
"""

import asyncio
import contextlib
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError

from rollout.slots import HostSlot, claims_paused, private_folder
from shared.errors import ConfigError, WeightsLost, WeightSyncError
from shared.records import Manifest, Publication
from shared.weights import Blob, check_manifest, verify_bucket

ROOT_VARIABLE = "SEQRELAY_STAGING"
PREFIX = f"seqrelay-{os.getuid()}-"
SHARED_MEMORY = Path("/dev/shm")
MARGIN_BYTES = 64 << 20  # left free for other users of the folder, torch's own shared memory among them


@dataclass(frozen=True)
class Staged:
    """The files of one version, one per bucket, and the seconds it took to check and to write them."""

    files: tuple[Path, ...]
    digest_s: float
    stage_s: float


async def fetch_buckets(publication: Publication) -> list[Blob]:
    """The publication's buckets in order, awaited from the object store; plain arrays are taken as they are.

    WeightsLost when the process that put them there is gone: Ray notices about a second later.
    """
    try:
        return list(await asyncio.gather(*map(_fetch, publication.buckets)))
    except (ObjectLostError, RayActorError, GetTimeoutError) as error:
        raise WeightsLost(
            f"the weights of version {publication.manifest.version} cannot be fetched any more: the learner that "
            f"published them is gone ({type(error).__name__}). The next publication brings them again."
        ) from error


async def _fetch(bucket: Any) -> Blob:
    return bucket if isinstance(bucket, np.ndarray) else await bucket


def staging_root() -> Path:
    """Where weights are staged on this node while there is room. ConfigError when the variable names no folder."""
    root = Path(os.environ.get(ROOT_VARIABLE) or SHARED_MEMORY)
    if ROOT_VARIABLE in os.environ and not (root.is_dir() and os.access(root, os.W_OK)):
        raise ConfigError(f"{ROOT_VARIABLE} = {root} is no folder that can be written. Set it to one in memory.")
    return root


class Staging:
    """The staging folder of one worker. `name` is unique among live workers of the node, e.g. "run1-slot0"."""

    def __init__(
        self,
        name: str,
        fallback: Path | None = None,
        shared_memory: Path | None = None,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        roots = (shared_memory or staging_root(), fallback or private_folder())
        self._folders = tuple(root / f"{PREFIX}{name}" for root in roots)
        self._free_bytes = free_bytes

    @classmethod
    def of(cls, run_directory: Path, slot: HostSlot) -> "Staging":
        """That of the worker in this slot: the same for every life of a worker there, and another for every run."""
        run = f"{run_directory.name}-{zlib.crc32(str(run_directory).encode()):08x}"
        return cls(f"{run}-slot{slot.index}")

    @contextlib.contextmanager
    def stage(self, manifest: Manifest, buckets: Sequence[Blob]) -> Iterator[Staged]:
        """Verify the buckets, write them as files, remove the files on exit. WeightSyncError on a mismatch or no room.

        `buckets[i]` is bucket i of the manifest, uint8, read-only views included.
        """
        start_s = time.monotonic()
        self._verify(manifest, buckets)
        digest_s = time.monotonic() - start_s
        self.clear()
        try:
            files = self._write(manifest.version, buckets)
            yield Staged(files, digest_s, time.monotonic() - start_s - digest_s)
        finally:
            self.clear()

    def clear(self) -> None:
        """Remove every file staged under this name, whoever left it."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _verify(self, manifest: Manifest, buckets: Sequence[Blob]) -> None:
        check_manifest(manifest)
        num_buckets = len({entry.bucket for entry in manifest.tensors})
        if len(buckets) != num_buckets:
            raise WeightSyncError(
                f"version {manifest.version}: {len(buckets)} buckets arrived, the manifest has {num_buckets}."
            )
        for number, blob in enumerate(buckets):
            verify_bucket(blob, [entry for entry in manifest.tensors if entry.bucket == number])

    def _write(self, version: int, buckets: Sequence[Blob]) -> tuple[Path, ...]:
        folder = self._choose(sum(blob.nbytes for blob in buckets)) / f"v{version}"
        try:
            folder.parent.mkdir(mode=0o700)  # fails where somebody else has made it
            folder.mkdir()
            files = []
            for number, blob in enumerate(buckets):
                file = folder / f"bucket-{number}.safetensors"
                file.write_bytes(blob.data)
                files.append(file)
        except OSError as error:
            raise WeightSyncError(
                f"version {version} cannot be staged in {folder}: {error}. Free some space, or set {ROOT_VARIABLE}."
            ) from error
        return tuple(files)

    def _choose(self, num_bytes: int) -> Path:
        for folder in self._folders:
            root = folder.parent
            if root.is_dir() and self._free_bytes(root) >= num_bytes + MARGIN_BYTES:
                return folder
        roots = " and ".join(str(folder.parent) for folder in self._folders)
        raise WeightSyncError(
            f"{num_bytes + MARGIN_BYTES} bytes are needed to stage the weights; {roots} have less. Free some space, or "
            f"set {ROOT_VARIABLE} to a folder with more."
        )


def clear_abandoned() -> None:
    """Remove what this user's workers left on this host in slots that no live process holds, of whichever run."""
    with claims_paused() as is_held:
        for root in (staging_root(), private_folder()):
            for folder in root.glob(f"{PREFIX}*-slot*"):
                slot = re.search(r"-slot(\d+)$", folder.name)
                if slot and not is_held(int(slot[1])):
                    shutil.rmtree(folder, ignore_errors=True)
