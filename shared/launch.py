"""`seqrelay train`: a private Ray cluster, the hub, and both services as processes of their own.

Owns their lifetime: when one fails the other is ended, and services and cluster end with this process, however it ends.
What the services print goes to `logs/` in the run directory; this process shows progress from the files that the hub
writes.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shared.config import Config
from shared.errors import ConfigError, RunFailed
from shared.progress import Progress

_POLL_S = 0.2
_GRACE_S = 20.0
_HUB_ANSWERS_S = 5.0


def train(config: Config, run_directory: Path, json_lines: bool = False) -> int:
    """Run to the end; returns 0.

    ConfigError when the run directory cannot be made; RunFailed with what the failing side told the hub, or else with
    its last log lines; KeyboardInterrupt also for SIGTERM and SIGHUP.
    """
    try:
        (run_directory / "logs").mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"run.directory: {run_directory} cannot be made: {error.strerror}. Choose another."
        ) from error
    resolved = run_directory / "config.json"
    resolved.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    progress = Progress(config, run_directory, json_lines)
    try:
        with _private_cluster(config, run_directory) as (hub, address), _services(resolved, address) as services:
            try:
                _wait(services, hub, run_directory, progress)
            finally:
                progress.update()
    finally:
        progress.close()
    progress.finish()
    return 0


@contextmanager
def _private_cluster(config: Config, run_directory: Path) -> Iterator[tuple[Any, str]]:
    """The run's hub in a Ray cluster on this host's loopback, and its address. Only holders of its token are heard."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # inherited by our children, never written down
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Read on Linux too, despite its name: otherwise Ray listens on all interfaces, whatever address it is given.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would starve the engines beside the learner
    import ray

    from shared.hub import start_hub

    context = ray.init(
        address="local",
        namespace=config.run.name,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
    )
    _interrupt_at(signal.SIGTERM, signal.SIGHUP)  # after `init`, whose own handler aborts and ends nothing
    try:
        yield start_hub(config, run_directory), context.address_info["gcs_address"]
    finally:
        ray.shutdown()


def _interrupt_at(*signals: signal.Signals) -> None:
    """Treat these like Ctrl-C, but for those that are ignored, as SIGHUP is under nohup."""
    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def _services(resolved: Path, address: str) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Both services, each in a process of its own; whatever still runs at the end is ended."""
    services: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for side in ("rollout", "learner"):
            log = resolved.parent / "logs" / f"{side}.log"
            command = [sys.executable, "-m", f"{side}.main", "--config", str(resolved), "--address", address]
            command += ["--parent", str(os.getpid())]
            with log.open("wb") as output:
                services[side] = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
                )
        yield services
    finally:
        _end(services.values())


def _wait(services: dict[str, subprocess.Popen[bytes]], hub: Any, run_directory: Path, progress: Progress) -> None:
    running = dict(services)
    while running:
        progress.update()
        for side, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[side]
            if process.returncode != 0:
                log = run_directory / "logs" / f"{side}.log"
                ended = f"the {side} service ended with code {process.returncode}. {log}:\n{_tail(log)}"
                raise RunFailed(_told(hub) or ended)
        time.sleep(_POLL_S)


def _told(hub: Any) -> str | None:
    """The first failure that a side reported to the hub; None without any, or without a hub."""
    import ray

    try:
        return ray.get(hub.status.remote(), timeout=_HUB_ANSWERS_S).failure
    except ray.exceptions.RayError:
        return None


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Ask those that still run to end, then make them; both services are leaders of their own process group."""
    running = [p for p in processes if p.poll() is None]
    for process in running:
        process.terminate()
    deadline_s = time.monotonic() + _GRACE_S
    try:
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
    finally:  # also when a second Ctrl-C ends the wait
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _tail(log: Path, num_lines: int = 30) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
