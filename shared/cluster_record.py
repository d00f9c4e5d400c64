"""The files that say where a run's own Ray cluster is: `cluster.json` (the record) and `cluster.token` (its key).

Written by the process at the cluster's head, which holds `cluster.lock` for as long as it lives. A record says nothing
about a process that has ended: `read_cluster` compares the process's start, in clock ticks of one boot, so that
neither a process id used again, nor a reboot, nor a corrected clock makes a dead cluster look alive.
"""

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shared.errors import ConfigError

RECORD = "cluster.json"
TOKEN = "cluster.token"
LOCK = "cluster.lock"


@dataclass(frozen=True)
class ClusterRecord:
    """A Ray cluster that belongs to one run.

    `kind`: "private" ends with the `seqrelay train` that made it, "detached" with `seqrelay stop`. `address`: host and
    port for `ray.init`; it listens on that host's loopback only. `pid` and `process_start` identify the process at its
    head. `session_directory`: Ray's logs and sockets. `token_path`: the file with the token; empty for none.
    """

    kind: Literal["private", "detached"]
    host: str
    address: str
    pid: int
    process_start: str
    session_directory: str
    token_path: str

    @property
    def is_here(self) -> bool:
        """Whether the cluster is on this host, by name."""
        return self.host == socket.gethostname()


def read_cluster(run_directory: Path) -> ClusterRecord | None:
    """The run's cluster; None when there is none or its process has ended.

    A record of another host is returned as it is: whether that cluster lives can only be seen there. ConfigError for a
    file that is no record.
    """
    record = read_record(run_directory)
    if record is not None and record.is_here and process_start(record.pid) != record.process_start:
        return None
    return record


def read_record(run_directory: Path) -> ClusterRecord | None:
    """The record as written, also of a cluster that has ended."""
    path = run_directory / RECORD
    try:
        return ClusterRecord(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no record of a cluster ({error}). If no cluster runs, remove it.") from error


def write_record(run_directory: Path, record: ClusterRecord) -> None:
    """Complete or absent for whoever reads at the same time."""
    temporary = run_directory / f".{RECORD}.tmp"
    temporary.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    temporary.replace(run_directory / RECORD)


def write_token(run_directory: Path) -> Path:
    """A new random token, readable by its owner alone from its first instant. Only for the holder of `cluster.lock`."""
    path = run_directory.resolve() / TOKEN
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    return path


def remove_files(run_directory: Path) -> None:
    """Forget the cluster. Only for the holder of `cluster.lock`."""
    for name in (RECORD, TOKEN):
        (run_directory / name).unlink(missing_ok=True)


def is_dead_of_this_boot(record: ClusterRecord) -> bool:
    """Whether its head ended since this host started and no process has that number now."""
    return record.is_here and record.process_start.startswith(f"{_boot_id()}:") and process_start(record.pid) is None


def process_start(pid: int) -> str | None:
    """What tells this process from every other one of the same number; None when there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, start_ticks = fields[0], fields[19]  # fields 3 and 22 of proc(5)
    return None if state in "ZX" else f"{_boot_id()}:{start_ticks}"


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
