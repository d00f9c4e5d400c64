"""Advisory locks: one process at a time may be a run's learner, its hub, the head of its cluster, or hold a slot.

Owns `FileLock`. The kernel holds the lock (`flock`), not the file's content, so it is free again at once when its
holder ends, however that ends; no stale lock has to be recognized. What the holder wrote into the file only serves to
name it. The file is never deleted: two processes could then lock two files of one name.
"""

import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import psutil

from shared.errors import LockHeld

_POLL_S = 0.01


@dataclass(frozen=True)
class Holder:
    """Who holds a lock. `started_at_s`: Unix seconds at which that process started."""

    host: str
    pid: int
    started_at_s: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started_at_s))
        return f"process {self.pid} on host {self.host}, started {since}"


class FileLock:
    """An exclusive lock on `path`, held from `acquire` to `release` or to the end of this process.

    Programs that this process starts do not inherit it (close-on-exec); a bare `os.fork` does. Several locks on one
    path exclude each other within a process too. `wait_s`: how long `with` and `acquire` wait for it, in seconds.
    """

    def __init__(self, path: Path, wait_s: float = 0.0) -> None:
        self.path, self._wait_s = path, wait_s
        self._descriptor: int | None = None

    def acquire(self, wait_s: float | None = None) -> None:
        """Take the lock. LockHeld, naming the holder, when another one has it all the time."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline_s = time.monotonic() + (self._wait_s if wait_s is None else wait_s)
        try:
            while not _try_lock(descriptor, fcntl.LOCK_EX):
                if time.monotonic() >= deadline_s and _is_held(descriptor):
                    raise LockHeld(f"{self.path} is held by {_read_holder(self.path)}. End that process first.")
                time.sleep(_POLL_S)
            process = psutil.Process()
            text = json.dumps(asdict(Holder(socket.gethostname(), process.pid, process.create_time())))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go; nothing happens when the lock is not held."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough once a fork has a copy
            os.close(self._descriptor)
            self._descriptor = None

    def holder(self) -> Holder | None:
        """Who holds the lock now, this process or another; None when nobody does."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return _read_holder(self.path) if _is_held(descriptor) else None
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _try_lock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_held(descriptor: int) -> bool:
    """Whether another one has the exclusive lock. Those who ask this share the lock meanwhile: they are no holders."""
    if not _try_lock(descriptor, fcntl.LOCK_SH):
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _read_holder(path: Path) -> Holder:
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):  # it has the lock and has not signed yet
        return Holder("(unknown)", 0, time.time())
