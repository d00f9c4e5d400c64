"""`seqrelay train`: a private Ray cluster, the hub, and both services as processes of their own.

Owns their lifetime: when one fails the other is ended, and the cluster ends with this process. What the services print
goes to `logs/` in the run directory; this process shows progress from the files that the hub writes.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.config import Config
from shared.errors import RunFailed
from shared.progress import Progress

_POLL_S = 0.2
_GRACE_S = 20.0


def train(config: Config, run_directory: Path, json_lines: bool = False) -> int:
    """Run to the end; returns 0. RunFailed carries the failing side's last log lines."""
    (run_directory / "logs").mkdir(parents=True)
    resolved = run_directory / "config.json"
    resolved.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    progress = Progress(config, run_directory, json_lines)
    with _private_cluster(config, run_directory) as address, _services(resolved, address) as services:
        try:
            _wait(services, run_directory, progress)
        finally:
            progress.update()
    progress.finish()
    return 0


@contextmanager
def _private_cluster(config: Config, run_directory: Path) -> Iterator[str]:
    """A local Ray cluster that only processes holding its token can talk to, with the run's hub in it."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # inherited by our children, never written down
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would starve the engines beside the learner
    import ray

    from shared.hub import start_hub

    context = ray.init(
        address="local",
        namespace=config.run.name,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
        _node_ip_address="127.0.0.1",
    )
    hub = None
    try:
        hub = start_hub(config, run_directory)
        yield context.address_info["gcs_address"]
    finally:
        del hub
        ray.shutdown()


@contextmanager
def _services(resolved: Path, address: str) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Both services, each in a process of its own; whatever still runs at the end is ended."""
    services: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for side in ("rollout", "learner"):
            log = resolved.parent / "logs" / f"{side}.log"
            command = [sys.executable, "-m", f"{side}.main", "--config", str(resolved), "--address", address]
            with log.open("wb") as output:
                services[side] = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
                )
        yield services
    finally:
        _end(services.values())


def _wait(services: dict[str, subprocess.Popen[bytes]], run_directory: Path, progress: Progress) -> None:
    running = dict(services)
    while running:
        progress.update()
        for side, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[side]
            if process.returncode != 0:
                log = run_directory / "logs" / f"{side}.log"
                raise RunFailed(f"the {side} service ended with code {process.returncode}. {log}:\n{_tail(log)}")
        time.sleep(_POLL_S)


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Ask those that still run to end, then make them; both services are leaders of their own process group."""
    running = [p for p in processes if p.poll() is None]
    for process in running:
        process.terminate()
    deadline_s = time.monotonic() + _GRACE_S
    for process in running:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tail(log: Path, num_lines: int = 30) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
