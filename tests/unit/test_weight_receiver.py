"""The plugin stays out of other people's engines, and an orphan ends itself."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from rollout import weight_receiver


def test_without_our_variable_the_plugin_does_nothing() -> None:
    code = (
        "import sys, threading; from rollout.weight_receiver import register; register();"
        "assert 'vllm' not in sys.modules and threading.active_count() == 1"
    )
    environment = {name: value for name, value in os.environ.items() if name != weight_receiver.ENGINE_VARIABLE}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment | {"PYTHONPATH": ":".join(sys.path)})


def orphan_to_be(pids: multiprocessing.SimpleQueue) -> None:  # type: ignore[type-arg]
    parent = multiprocessing.parent_process()
    threading.Thread(target=weight_receiver._die_with, args=(parent,), daemon=True).start()
    pids.put(os.getpid())
    time.sleep(60)


def parent_to_be_killed(pids: multiprocessing.SimpleQueue) -> None:  # type: ignore[type-arg]
    spawn = multiprocessing.get_context("spawn")
    spawn.Process(target=orphan_to_be, args=(pids,)).start()
    time.sleep(60)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_ends_when_its_parent_is_killed() -> None:
    spawn = multiprocessing.get_context("spawn")
    pids = spawn.SimpleQueue()
    parent = spawn.Process(target=parent_to_be_killed, args=(pids,))
    parent.start()
    child_pid = pids.get()
    time.sleep(0.3)
    assert alive(child_pid)
    os.kill(parent.pid or 0, signal.SIGKILL)
    parent.join()
    deadline_s = time.monotonic() + 5
    while alive(child_pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not alive(child_pid)
