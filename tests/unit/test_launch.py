"""Lifetimes and failures of `seqrelay train` and its services, without Ray and without models."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shared.hub_client
import shared.launch
import shared.service
from shared.config import Config
from shared.errors import ConfigError, HubError, RunFailed
from shared.launch import Outcome, _end, _services, _wait, interrupt_at_signals
from shared.service import run_service
from shared.stopping import STOPPED, StopRequest

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
ORPHAN = """
import os, sys, threading, time
from shared.service import _end_with
threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
print(os.getpid(), flush=True)
time.sleep(60)
"""
POPEN = subprocess.Popen
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


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """A Ctrl-C after so many seconds."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


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
    with alarm(0.3), pytest.raises(KeyboardInterrupt):
        _end([process])
    assert process.returncode == -signal.SIGKILL


def test_sigterm_and_hangup_interrupt_unless_ignored() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        interrupt_at_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


HANGS_UP = """
import os, signal, time
from shared.launch import interrupt_at_signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
interrupt_at_signals()
try:
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(1)
except KeyboardInterrupt:
    os.write(1, b"to nobody")
    os._exit(7)
"""


def test_a_hangup_interrupts_and_what_is_said_then_goes_nowhere() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS_UP], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (7, "")


class Screen:
    """What a person is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self) -> None:
        pass

    def say(self, line: str) -> None:
        self.lines.append(line)

    def close(self) -> None:
        pass


def service(code: str, folder: Path) -> "subprocess.Popen[bytes]":
    """A stand-in for a service that ends with `code`, after it has said why where a service does."""
    (folder / "logs").mkdir(exist_ok=True)
    log = shared.launch.log_path(folder, "learner")
    log.write_text("the last line of its log")
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


@pytest.mark.parametrize(("codes", "finished"), [((0, 0), True), ((0, STOPPED), False), ((STOPPED, STOPPED), False)])
def test_a_run_is_finished_when_every_service_says_so(codes: tuple[int, ...], finished: bool, tmp_path: Path) -> None:
    processes = {str(i): service(f"raise SystemExit({code})", tmp_path) for i, code in enumerate(codes)}
    assert _wait(processes, tmp_path, Screen()) == Outcome(finished, interrupted=False)


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        ("raise SystemExit(1)", RunFailed, "the learner service ended with code 1.*the last line of its log"),
        ("import os; os.kill(os.getpid(), 9)", RunFailed, "was ended by signal 9"),
        ("raise SystemExit(2)", ConfigError, "the last line of its log"),
    ],
)
def test_a_service_that_fails_is_named_with_what_it_said(
    code: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=f"(?s){said}"):
        _wait({"learner": service(code, tmp_path)}, tmp_path, Screen())
    shared.launch.log_path(tmp_path, "learner").with_suffix(".error").write_text("its own words")
    with pytest.raises(error, match="its own words"):
        _wait({"learner": service(code, tmp_path)}, tmp_path, Screen())


def test_the_first_interrupt_asks_the_services_to_end_and_waits_for_them(tmp_path: Path) -> None:
    obedient = (
        "import signal, sys, time; signal.signal(15, lambda n, f: sys.exit(3)); print(flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", obedient], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    screen = Screen()
    with alarm(0.3):
        assert _wait({"learner": process}, tmp_path, screen) == Outcome(finished=False, interrupted=True)
    assert "Ctrl-C again" in screen.lines[0]


def test_services_that_are_not_done_end_with_the_block(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        assert "--run-directory" in command
        started.append(POPEN([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True))
        return started[-1]

    monkeypatch.setattr(shared.launch.subprocess, "Popen", start)
    (tmp_path / "logs").mkdir()
    with pytest.raises(HubError), _services(("rollout.main", "learner.main"), make_config(), tmp_path, "somewhere"):
        raise HubError("no room on this disk")
    assert [process.poll() for process in started] == [-signal.SIGTERM] * 2


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the hub is told by services that run in this process, without a cluster."""
    texts: list[str] = []
    monkeypatch.setattr(shared.service, "join", lambda address, namespace: None)
    monkeypatch.setattr(shared.service, "leave", lambda: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(shared.hub_client, "report_failure", lambda name, side, text: texts.append(text))
    return texts


def serve(body: Any, config: Config, folder: Path) -> int:
    (folder / "rollout-1.json").write_text(config.model_dump_json())
    arguments = ["--config", str(folder / "rollout-1.json"), "--address", "somewhere", "--run-directory", str(folder)]
    return run_service("rollout", body, arguments)


def test_a_service_ends_with_0_if_the_run_is_finished_and_else_as_stopped(
    told: list[str], make_config: Any, tmp_path: Path
) -> None:
    assert serve(lambda config, folder, stop: True, make_config(), tmp_path) == 0
    assert serve(lambda config, folder, stop: False, make_config(), tmp_path) == STOPPED
    assert told == []


def test_a_failure_is_told_to_the_hub_and_left_for_the_parent(
    told: list[str], make_config: Any, tmp_path: Path
) -> None:
    from ray.exceptions import RayTaskError

    def bad_config(config: Config, folder: Path, stop: StopRequest) -> bool:
        raise ConfigError("reward.function = 'no:where': no module")

    def bad_config_of_an_actor(config: Config, folder: Path, stop: StopRequest) -> bool:
        raise RayTaskError("run", "a long traceback", ConfigError("no chat template")).as_instanceof_cause()

    def bug(config: Config, folder: Path, stop: StopRequest) -> bool:
        raise KeyError("oops")

    codes, left = [], []
    for body in (bad_config, bad_config_of_an_actor, bug):
        codes.append(serve(body, make_config(), tmp_path))
        left.append((tmp_path / "rollout-1.error").read_text().strip())
    assert codes == [2, 2, 1]
    assert left[:2] == ["reward.function = 'no:where': no module", "no chat template"]
    assert left[2].startswith("Traceback")
    assert "KeyError: 'oops'" in left[2]
    assert [text.strip() for text in told] == left[2:]  # a refused service is its own affair: others may go on


def test_a_failure_that_came_from_the_hub_is_not_sent_back(told: list[str], make_config: Any, tmp_path: Path) -> None:
    def other_side(config: Config, folder: Path, stop: StopRequest) -> bool:
        raise RunFailed("the rollout side of the run failed: ...")

    assert serve(other_side, make_config(), tmp_path) == 1
    assert told == []
    assert "rollout side" in (tmp_path / "rollout-1.error").read_text()


def test_a_failure_that_no_hub_hears_is_logged(
    told: list[str], make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*arguments: object) -> None:
        raise HubError("the hub is gone")

    def bug(config: Config, folder: Path, stop: StopRequest) -> bool:
        raise KeyError("oops")

    monkeypatch.setattr(shared.hub_client, "report_failure", gone)
    assert serve(bug, make_config(), tmp_path) == 1
    assert "KeyError: 'oops'" in caplog.text
    assert "nobody was told of this: the hub is gone" in caplog.text
