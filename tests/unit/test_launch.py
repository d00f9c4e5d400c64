"""Lifetimes and failures of `seqrelay train` and its services, without Ray and without models."""

import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import shared.hub_client
import shared.launch
import shared.progress
from shared.config import Config
from shared.errors import ConfigError, HubError
from shared.launch import _end, _interrupt_at, train
from shared.service import run_service

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
ORPHAN = """
import os, sys, threading, time
from shared.service import _end_with
threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(60)"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_service_ends_with_a_parent_that_was_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, ORPHAN], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(1.5)  # longer than the service looks away
    assert is_alive(child)
    parent.kill()
    parent.wait()
    deadline_s = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not is_alive(child)


def stubborn() -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_service_that_does_not_end_when_asked_is_made_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.launch, "_GRACE_S", 0.2)
    process = stubborn()
    _end([process])
    assert process.returncode == -signal.SIGKILL


def test_a_second_interrupt_ends_the_services_at_once() -> None:
    process = stubborn()
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            _end([process])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert process.returncode == -signal.SIGKILL


def test_sigterm_and_hangup_interrupt_unless_ignored() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _interrupt_at(signal.SIGTERM, signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_run_directory_that_cannot_be_made_is_a_config_error(make_config: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"run\.directory: .*/file/run cannot be made: Not a directory"):
        train(make_config(), tmp_path / "file" / "run")


def test_a_run_that_fails_gives_the_terminal_its_cursor_back(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_cluster(config: Config, run_directory: Path) -> None:
        raise HubError("no room on this disk")

    screen = StringIO()
    monkeypatch.setattr(shared.progress, "Console", lambda **options: Console(file=screen, force_terminal=True))
    monkeypatch.setattr(shared.launch, "_private_cluster", no_cluster)
    with pytest.raises(HubError):
        train(make_config(), tmp_path / "run")
    hides, shows = (screen.getvalue().rfind(code) for code in ("\x1b[?25l", "\x1b[?25h"))
    assert 0 <= hides < shows


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the hub is told by services that run in this process, without a cluster."""
    texts: list[str] = []
    monkeypatch.setattr("ray.init", lambda **options: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(shared.hub_client, "connect", lambda name: None)
    monkeypatch.setattr(shared.hub_client, "report_failure", lambda handle, side, text: texts.append(text))
    return texts


def serve(body: Any, config: Config, folder: Path) -> int:
    (folder / "config.json").write_text(config.model_dump_json())
    return run_service("rollout", body, ["--config", str(folder / "config.json"), "--address", "somewhere"])


def test_the_hub_is_told_of_a_bad_config_in_one_line_and_of_a_bug_with_its_traceback(
    told: list[str], make_config: Any, tmp_path: Path
) -> None:
    from ray.exceptions import RayTaskError

    def bad_config(config: Config, folder: Path) -> None:
        raise ConfigError("reward.function = 'no:where': no module")

    def bad_config_of_an_actor(config: Config, folder: Path) -> None:
        raise RayTaskError("run", "a long traceback", ConfigError("no chat template")).as_instanceof_cause()

    def bug(config: Config, folder: Path) -> None:
        raise KeyError("oops")

    for body in (bad_config, bad_config_of_an_actor, bug):
        assert serve(body, make_config(), tmp_path) == 1
    assert told[:2] == ["reward.function = 'no:where': no module", "no chat template"]
    assert told[2].startswith("Traceback")
    assert "KeyError: 'oops'" in told[2]


def test_a_failure_that_no_hub_hears_is_logged(
    told: list[str], make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*arguments: object) -> None:
        raise HubError("the hub is gone")

    def bug(config: Config, folder: Path) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(shared.hub_client, "report_failure", gone)
    assert serve(bug, make_config(), tmp_path) == 1
    assert "KeyError: 'oops'" in caplog.text
    assert "nobody was told of this: the hub is gone" in caplog.text
