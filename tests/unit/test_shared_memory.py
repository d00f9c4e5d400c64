"""An engine's shared memory goes when its worker was killed with everything that would have cleaned up."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.shared_memory import SHARED_MEMORY, clear_shared_memory

# A worker with one child, as an engine is: the child makes the memory, and its resource tracker would remove it.
WORKER = """
import subprocess, sys, time
from rollout.shared_memory import shared_memory_noted
from rollout.slots import HostSlot
slot = HostSlot.claim()
with shared_memory_noted(slot):
    engine = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
    name = engine.stdout.readline().strip()
    if sys.argv[2] == "starting":
        time.sleep(2)
        print(name, flush=True)
        time.sleep(60)
print(name, flush=True)
time.sleep(60)
"""
ENGINE = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
print(memory.name.lstrip("/"), flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["starting", "up"])
def worker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "subprocess.Popen[str]":
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    command = [sys.executable, "-c", WORKER, ENGINE, request.param]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_memory_of_a_killed_worker_goes_and_that_of_a_live_one_stays(worker: "subprocess.Popen[str]") -> None:
    assert worker.stdout is not None
    memory = SHARED_MEMORY / worker.stdout.readline().strip()
    clear_shared_memory()
    assert memory.exists()
    os.killpg(worker.pid, signal.SIGKILL)  # the tracker too
    worker.wait()
    assert memory.exists()
    clear_shared_memory()
    assert not memory.exists()
