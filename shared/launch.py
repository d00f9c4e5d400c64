"""The processes of a run: `seqrelay train` has both services and a private Ray cluster, `learner` and `rollout` one
service each, on the run's detached cluster or on one that the user keeps; `doctor` is a `train` with the examination in
the learner's place.

Owns the services' lifetime: when one fails the other is ended, and they end with this process, however it ends. The
first Ctrl-C (or SIGTERM, or SIGHUP) lets them finish what they hold, the second ends them at once. What they print goes
to `logs/` in the run directory; this process shows progress from the files that the hub writes.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from shared.cluster import ensure_cluster, private_cluster
from shared.cluster_environment import join_environment
from shared.config import Config
from shared.errors import ConfigError, RunFailed
from shared.stopping import STOPPED

_POLL_S = 0.2
_GRACE_S = 20.0
_CONFIG_AT_FAULT = 2
_ENDED_AT_ITS_START = (-signal.SIGTERM, signal.SIGTERM)  # asked to end before it could listen


class View(Protocol):
    """What a person sees meanwhile."""

    def update(self) -> None: ...
    def say(self, line: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How the services ended: all steps trained, or not; `interrupted`: because this process was asked to end."""

    finished: bool
    interrupted: bool


def train(config: Config, run_directory: Path, view: View) -> Outcome:
    """Both services on a private cluster. RunFailed, or ConfigError, with what the failing side said."""
    return _run_alone(("rollout.main", "learner.main"), config, run_directory, view)


def examine(config: Config, run_directory: Path, view: View) -> Outcome:
    """The rollout service and the doctor's examination, as `train`."""
    return _run_alone(("rollout.main", "learner.examine"), config, run_directory, view)


def _run_alone(modules: Sequence[str], config: Config, run_directory: Path, view: View) -> Outcome:
    with private_cluster(run_directory, config.run.name, Path(config.model.path)) as cluster:
        from shared.hub_start import start_hub

        interrupt_at_signals()  # after the cluster's start, which puts in a handler that ends nothing
        start_hub(config, run_directory)
        return run_services(modules, config, run_directory, cluster.address, view)


def serve(side: str, config: Config, run_directory: Path, address: str | None, view: View) -> Outcome:
    """One service, on the cluster at `address` or, without one, the run's own. Errors as in `train`."""
    interrupt_at_signals()
    target = address or ensure_cluster(run_directory, Path(config.model.path))
    return run_services((f"{side}.main",), config, run_directory, join_environment(target), view)


def run_services(modules: Sequence[str], config: Config, run_directory: Path, address: str, view: View) -> Outcome:
    """Start these services as processes of their own, `python -m <side>.<module>`, and wait until all have ended."""
    try:
        with _services(modules, config, run_directory, address) as services:
            return _wait(services, run_directory, view)
    finally:
        view.update()
        view.close()


def interrupt_at_signals() -> None:
    """Treat SIGTERM and SIGHUP like Ctrl-C, but for those that are ignored, as SIGHUP is under nohup."""
    for number, handler in ((signal.SIGTERM, signal.default_int_handler), (signal.SIGHUP, _hang_up)):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _hang_up(number: int, frame: FrameType | None) -> None:
    """The terminal is gone: writing to it would raise, and cut the services' end short."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    raise KeyboardInterrupt


@contextmanager
def _services(
    modules: Sequence[str], config: Config, run_directory: Path, address: str
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Each in a process of its own, by its side; whatever still runs at the end is ended."""
    services: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for module in modules:
            side = module.partition(".")[0]
            resolved = run_directory / "logs" / f"{side}-{os.getpid()}.json"
            resolved.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
            command = [sys.executable, "-m", module, "--config", str(resolved), "--address", address]
            command += ["--run-directory", str(run_directory), "--parent", str(os.getpid())]
            resolved.with_suffix(".error").unlink(missing_ok=True)  # in a container every process may be number 1
            with log_path(run_directory, side).open("ab") as output:
                services[side] = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
                )
        yield services
    finally:
        _end(list(services.values()))


def log_path(run_directory: Path, side: str) -> Path:
    """Where a service started by this process prints to."""
    return run_directory / "logs" / f"{side}-{os.getpid()}.log"


def _wait(services: Mapping[str, subprocess.Popen[bytes]], run_directory: Path, view: View) -> Outcome:
    running, codes, interrupted = dict(services), [], False
    while running:
        try:
            view.update()
            for side, process in list(running.items()):
                if process.poll() is not None:
                    del running[side]
                    codes.append(process.returncode)
                    if not (interrupted and process.returncode in _ENDED_AT_ITS_START):
                        _raise_if_failed(side, process.returncode, log_path(run_directory, side))
            time.sleep(_POLL_S)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            for process in running.values():
                process.terminate()
            view.say("stopping: finishing what was begun; Ctrl-C again leaves at once, which loses nothing either")
    return Outcome(all(code == 0 for code in codes), interrupted)


def _raise_if_failed(side: str, code: int, log: Path) -> None:
    if code in (0, STOPPED):
        return
    said = log.with_suffix(".error")
    text = said.read_text(encoding="utf-8").strip() if said.exists() else f"{log}:\n{_tail(log)}"
    if code == _CONFIG_AT_FAULT:
        raise ConfigError(text)
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    raise RunFailed(f"the {side} service {how}. {text}")


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask those that still run to end, then make them; each is the leader of its own process group."""
    running = [p for p in processes if p.poll() is None]
    for process in running:
        process.terminate()
    deadline_s = time.monotonic() + _GRACE_S
    try:
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
    finally:  # also when another Ctrl-C ends the wait
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _tail(log: Path, num_lines: int = 30) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
