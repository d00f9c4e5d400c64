"""Slots of a host: lowest free number, held to the end of the process and not a moment longer."""

import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollout.slots import HostSlot, claims_paused, private_folder
from shared.errors import ConfigError

# Claims a slot, starts two children as vLLM does (spawned, and by exec), and tells their process ids.
WORKER = """
import multiprocessing, os, subprocess, sys, time
from rollout.slots import HostSlot

if __name__ == "__main__":
    index = HostSlot.claim().index
    spawned = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    spawned.start()
    executed = subprocess.Popen(["sleep", "60"], close_fds=False)
    print(index, spawned.pid, executed.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "slot_worker.py"  # spawn needs a file to start from
    path.write_text(WORKER)
    return path


def start(script: Path) -> tuple[subprocess.Popen[str], int, list[int]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    worker = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    assert worker.stdout is not None
    index, *children = map(int, worker.stdout.readline().split())
    return worker, index, children


def test_a_killed_worker_frees_its_slot_although_its_children_live(script: Path) -> None:
    workers = [start(script), start(script)]
    try:
        assert [index for _, index, _ in workers] == [0, 1]
        assert HostSlot.claim().index == 2
        process, _, children = workers[0]
        process.kill()
        process.wait()
        assert all(psutil.pid_exists(child) for child in children)
        with claims_paused() as is_held:
            assert [is_held(index) for index in range(4)] == [False, True, True, False]
        assert [HostSlot.claim().index for _ in range(2)] == [0, 3]
    finally:
        for process, _, children in workers:
            process.kill()
            process.wait()
            for child in children:
                psutil.Process(child).kill()


def test_a_slot_is_held_although_nobody_keeps_it() -> None:
    HostSlot.claim()
    gc.collect()
    assert HostSlot.claim().index == 1


def test_nobody_claims_while_claims_are_paused() -> None:
    claimed: list[HostSlot] = []
    thread = threading.Thread(target=lambda: claimed.append(HostSlot.claim()))
    with claims_paused():
        thread.start()
        time.sleep(0.3)
        assert claimed == []
    thread.join(10)
    assert claimed == [HostSlot(0)]


def test_the_folder_is_for_this_user_alone(own_temporary_folder: Path) -> None:
    folder = private_folder()
    assert folder == own_temporary_folder / f"seqrelay-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert private_folder().stat().st_mode & 0o777 == 0o700


def test_a_folder_of_somebody_else_is_refused(own_temporary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = own_temporary_folder / "elsewhere"
    elsewhere.mkdir()
    link = own_temporary_folder / f"seqrelay-{os.getuid()}"
    link.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=f"{link} is not a folder of user .* set TMPDIR"):
        HostSlot.claim()
    link.unlink()
    link.write_text("a file")
    with pytest.raises(ConfigError, match="cannot be trusted"):
        HostSlot.claim()
    link.unlink()
    private_folder()
    monkeypatch.setattr(Path, "lstat", lambda self: os.stat_result((0o40700, 0, 0, 1, os.getuid() + 1, *[0] * 5)))
    with pytest.raises(ConfigError, match="cannot be trusted"):
        HostSlot.claim()
    assert list(elsewhere.iterdir()) == []
