"""Advisory locks between real processes."""

import fcntl
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.errors import ConfigError, LockHeld
from shared.locks import FileLock

HOLD = """
import subprocess, sys, time
from pathlib import Path
from shared.locks import FileLock
lock = FileLock(Path(sys.argv[1]))
lock.acquire()
child = subprocess.Popen(["sleep", "60"], close_fds=False)  # inherits whatever is inheritable
print(child.pid, flush=True)
time.sleep(60)
"""


@contextmanager
def another_holder(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds the lock and has a child; both are ended afterwards."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        subprocess.run(["kill", "-9", str(child)], check=False)


def test_a_lock_of_another_process_is_refused_by_name_and_free_after_kill_9(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "learner.lock")
    assert lock.holder() is None
    with another_holder(lock.path) as process:
        with pytest.raises(
            LockHeld, match=rf"learner\.lock is held by process {process.pid} on host .+, started 20\d\d-"
        ):
            lock.acquire()
        holder = lock.holder()
        assert holder is not None and holder.pid == process.pid
        assert time.time() - 60 < holder.started_at_s <= time.time()
        process.kill()
        process.wait()
        lock.acquire()  # although a child of the holder still runs
    assert json.loads(lock.path.read_text())["pid"] != process.pid


def test_a_refusal_is_a_config_error() -> None:
    assert issubclass(LockHeld, ConfigError)


def test_two_locks_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    with first:
        with pytest.raises(LockHeld):
            second.acquire()
        assert second.holder() == first.holder() is not None
    assert first.holder() is None
    with second:
        pass


def test_waiting_ends_when_the_lock_is_released(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    first.acquire()
    timer = threading.Timer(0.3, first.release)
    timer.start()
    second.acquire(wait_s=10.0)
    timer.join()
    second.release()
    second.release()  # nothing to let go of


def test_whoever_looks_at_the_holder_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    lock.path.touch()
    with lock.path.open("rb") as looker:  # caught in the middle of `holder`, for much longer than that takes
        fcntl.flock(looker, fcntl.LOCK_SH)
        assert lock.holder() is None
        timer = threading.Timer(0.2, fcntl.flock, (looker, fcntl.LOCK_UN))
        timer.start()
        lock.acquire()
        timer.join()
    lock.release()


def test_a_holder_that_has_not_signed_yet_is_a_holder(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    with lock:
        lock.path.write_text("")
        holder = lock.holder()
    assert holder is not None and holder.host == "(unknown)"
