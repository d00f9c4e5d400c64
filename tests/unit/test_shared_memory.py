"""An engine's shared memory goes when its worker was killed with everything that would have cleaned up."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.shared_memory import SHARED_MEMORY, clear_shared_memory

# A worker with one child, as an engine is: the child makes queue and semaphore, its resource tracker would remove them.
WORKER = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
from rollout.shared_memory import shared_memory_noted
from rollout.slots import HostSlot

def engine(pipe):
    memory, lock = SharedMemory(create=True, size=4096), multiprocessing.get_context("spawn").Lock()
    pipe.send([memory.name.lstrip("/"), "sem." + lock._semlock.name.lstrip("/")])
    time.sleep(60)

if __name__ == "__main__":
    slot = HostSlot.claim()
    here, there = multiprocessing.Pipe()
    with shared_memory_noted(slot):
        multiprocessing.get_context("spawn").Process(target=engine, args=(there,)).start()
        names = here.recv()
        if sys.argv[1] == "starting":
            time.sleep(2)
            print(*names, flush=True)
            time.sleep(60)
    print(*names, flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["starting", "up"])
def worker(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator["subprocess.Popen[str]"]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr("tempfile.tempdir", None)
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, str(script), request.param]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_memory_of_a_killed_worker_goes_and_that_of_a_live_one_stays(worker: "subprocess.Popen[str]") -> None:
    assert worker.stdout is not None
    files = [SHARED_MEMORY / name for name in worker.stdout.readline().split()]
    assert [file.name.split("-")[0] for file in files[1:]] == ["sem.mp"]
    clear_shared_memory()
    assert all(file.exists() for file in files)
    os.killpg(worker.pid, signal.SIGKILL)  # the tracker too
    worker.wait()
    assert all(file.exists() for file in files)
    clear_shared_memory()
    assert not any(file.exists() for file in files)
