"""A run's services as processes of their own, on a detached cluster, with a deterministic engine: to be watched and
killed. Nothing here imports Ray: its settings belong to the cluster, and other tests of this process have others.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import tiny_moe
from shared.cluster import ensure_cluster, stop_cluster
from shared.cluster_environment import own_environment
from shared.cluster_processes import is_alive
from shared.cluster_record import ClusterRecord
from shared.config import Config
from shared.config_file import parse_config
from shared.errors import SchemaError
from shared.ledger import Ledger
from shared.ledger_rows import GroupRow, LedgerRules, StepRow
from shared.locks import FileLock
from shared.run_files import read_ledger, read_rows

ROOT = Path(__file__).parents[2]
STOPPED = 3
SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.05
_END_S = 150.0

Service = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Site:
    """A detached cluster for the runs of a test module, and a folder in memory where weights are staged."""

    folder: Path
    model: Path
    staging: Path
    record: ClusterRecord
    environment: dict[str, str] = field(repr=False)

    def processes(self, title: str) -> list[psutil.Process]:
        """Live Ray workers of this cluster whose title begins so, such as "ray::RolloutWorker"."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.record.pid and (process.cmdline() or [""])[0].startswith(title):
                    found.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return [process for process in found if is_alive(process)]


@contextmanager
def open_site(folder: Path, model: Path | None = None) -> Iterator[Site]:
    """When it closes, nothing of the cluster is left: no process, nothing in shared memory, no staged weights.

    Without a `model` a random one is made.
    """
    staging, own = folder / "staging", folder / "site"
    if model is None:
        model = folder / "model"
        torch.manual_seed(0)
        tiny_moe.make_model().save_pretrained(model)
        tiny_moe.make_tokenizer().save_pretrained(model)
    staging.mkdir()
    own.mkdir()
    in_memory = set(SHARED_MEMORY.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "fakes", ROOT / "scripts"))))
        patch.setenv("SEQRELAY_STAGING", str(staging))
        patch.setenv("OMP_NUM_THREADS", "1")
        record = ensure_cluster(own, model)
        environment = dict(os.environ)
    own_environment(Path(record.token_path), environment)
    head = psutil.Process(record.pid)
    try:
        yield Site(folder, model, staging, record, environment)
    finally:
        everything = [head, *head.children(recursive=True)]
        stop_cluster(own, 10.0)
    assert [p for p in everything if is_alive(p)] == []
    assert list(staging.iterdir()) == []
    wait_for(lambda: not set(SHARED_MEMORY.iterdir()) - in_memory - in_use(), 15.0, "shared memory to be as before")


def in_use() -> set[Path]:
    """Files in shared memory that a live process has mapped or open: other programs' then, when ours have ended."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended
            maps = (process / "maps").read_text(errors="replace").split()
            found |= {Path(word) for word in maps if word.startswith(str(SHARED_MEMORY))}
            found |= {file.readlink() for file in (process / "fd").iterdir()}
    return found


class Run:
    """One run at a site. Every start, kill and end is written down; `story` tells it when a test fails."""

    def __init__(self, site: Site, name: str, **sections: Any) -> None:
        self.site, self.directory = site, site.folder / name
        self._values: dict[str, Any] = {
            "run": {"name": name, "directory": str(site.folder)},
            "model": {"path": str(site.model), "precision": "float32"},
            "prompts": {"style": "plain", "digits": 2, "num_held_out": 4},
            "reward": {"function": "example_rewards:even_length"},
            "sampling": {"group_size": 4, "max_tokens": 8},
            "clip": {"calibration": "none"},
            "rollout": {"max_model_len": 32, "workers": 1, "lease_s": 3.0, "max_attempts": 1000},
            "learner": {
                "steps": 8, "prompts_per_step": 4, "minibatches": 2, "lr": 1e-3, "checkpoint_steps": 2,
            },
            "sync": {"max_staleness": 0, "max_mismatch": 1e9},  # fake engine and model know nothing of each other
            "evaluation": {"samples": 0},
        }  # fmt: skip
        (self.directory / "logs").mkdir(parents=True)
        self._lines: list[str] = []
        self._start_s = time.monotonic()
        self._num_started = 0
        self.services: list[Service] = []
        self._errors: dict[int, Path] = {}
        self.configure(**sections)

    @property
    def rules(self) -> LedgerRules:
        learner = self.config.learner
        staleness, attempts = self.config.sync.max_staleness, self.config.rollout.max_attempts
        return LedgerRules(learner.prompts_per_step, staleness, learner.steps, attempts)

    def configure(self, **sections: Any) -> Config:
        """Change the config that services get from now on."""
        for section, given in sections.items():
            self._values[section] = self._values.get(section, {}) | given
        self.config = parse_config(self._values)
        (self.directory / "config.json").write_text(self.config.model_dump_json(indent=2))
        return self.config

    def start_learner(self, *module: str) -> Service:
        return self._start("learner", *(module or ("learner.main",)))

    def start_rollout(self, engine: str = "steady") -> Service:
        """`engine`: one of `service_engines`, or "vllm"."""
        return self._start("rollout", *(("rollout.main",) if engine == "vllm" else ("service_engines", engine)))

    def kill(self, service: Service) -> None:
        """SIGKILL, proved by what its parent is told."""
        service.kill()
        assert service.wait(10) == -signal.SIGKILL, self.story()
        self.note(f"killed service {service.pid}")

    def kill_process(self, process: psutil.Process, what: str) -> None:
        process.kill()
        wait_for(lambda: not is_alive(process), 10.0, f"{what} {process.pid} to be gone")
        self.note(f"killed {what} {process.pid}")

    def end(self, service: Service, *codes: int, timeout_s: float = _END_S) -> int:
        """Wait for its end by itself; the test fails with the story on any other exit code than these (0)."""
        try:
            code = service.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"process {service.pid} did not end\n{self.story()}")
        self.note(f"service {service.pid} ended with {code}")
        assert code in (codes or (0,)), self.story()
        return code

    def said(self, service: Service) -> str:
        """The error that the service left for who started it."""
        path = self._errors[service.pid]
        return path.read_text() if path.exists() else ""

    def hub(self) -> psutil.Process | None:
        """The hub's process, by the lock that it holds."""
        holder = FileLock(self.directory / "hub.lock").holder()
        try:
            return psutil.Process(holder.pid) if holder and holder.pid else None
        except psutil.NoSuchProcess:
            return None

    def ledger(self) -> Ledger:
        """As on disk, all its invariants checked."""
        return Ledger.from_rows(self.rules, *self.rows())

    def rows(self) -> tuple[list[GroupRow], list[StepRow]]:
        while True:
            try:
                return read_ledger(self.directory)
            except SchemaError:  # a hub that was killed in the middle of a change; the next one makes it whole
                time.sleep(POLL_S)

    def version(self) -> int:
        return sum(row.weights_digest is not None for row in self.rows()[1])

    def wait_for_version(self, version: int, timeout_s: float = _END_S) -> None:
        wait_for(lambda: self.version() >= version, timeout_s, f"version {version}", self.story)

    def note(self, line: str) -> None:
        self._lines.append(f"{time.monotonic() - self._start_s:7.2f} s  {line}")

    def story(self) -> str:
        """What happened when, what the hub noted, and the end of each log."""
        events = [f"{row['at_s']:.2f} {row['name']} {row['who']} {row['detail'][:200]}" for row in self.events()]
        logs = sorted((self.directory / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)
        tails = [f"{log.name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-8:]) for log in logs[-6:]]
        return "\n".join([*self._lines, "-- events", *events[-30:], "-- logs", *tails])

    def events(self) -> list[dict[str, Any]]:
        return read_rows(self.directory / "events.jsonl")

    def close(self) -> None:
        """End what the test left running."""
        for service in self.services:
            if service.poll() is None:
                service.kill()
                service.wait()

    def _start(self, side: str, module: str, *arguments: str) -> Service:
        self._num_started += 1
        config = self.directory / "logs" / f"{self._num_started:03d}-{side}.json"
        config.write_text(self.config.model_dump_json(indent=2))
        command = [sys.executable, "-m", module, *arguments, "--config", str(config)]
        command += ["--run-directory", str(self.directory), "--address", self.site.record.address]
        with config.with_suffix(".log").open("ab") as log:
            service = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=self.site.environment, cwd=self.site.folder
            )
        self.services.append(service)
        self._errors[service.pid] = config.with_suffix(".error")
        self.note(f"started {module} {' '.join(arguments)} as {service.pid}")
        return service


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str, story: Callable[[], str] = lambda: "") -> Any:
    """The condition's first true value. The test fails after `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            pytest.fail(f"waited {timeout_s:g} s for {what}\n{story()}")
        time.sleep(POLL_S)
    return value


def pause(rng: random.Random, least_s: float, most_s: float) -> None:
    time.sleep(rng.uniform(least_s, most_s))
