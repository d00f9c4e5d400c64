"""What the hub's calls have in common: its state, durability, leases, failure and waiting. No Ray.

Owns ledger, store, publication, leases and the files of the run directory. Whoever changes something goes through here,
so that it is on disk before it is acknowledged, and wakes up those who wait.
"""

import asyncio
import json
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from shared.config import Config
from shared.errors import ConfigError, RunFailed
from shared.hub_state import (
    CurrentPublication,
    Evaluations,
    HubStatus,
    Rate,
    RecentProbes,
    WorkerStatus,
    ledger_status,
)
from shared.jsonl import JsonLines
from shared.leases import LearnerSeat, Leases
from shared.ledger import Ledger
from shared.ledger_rows import GroupRow, LedgerRules
from shared.records import Event, EventName, Identity, ProbeReport, Ticket
from shared.run_files import read_evaluations, read_metrics, read_run_id
from shared.spans import now_s
from shared.store import Store

_WAITING_NAMED = 4

Answer = TypeVar("Answer")


class HubCore:
    """State of one run. Touched on one event loop only."""

    def __init__(self, config: Config, run_directory: Path, poll_s: float, store: Store | None) -> None:
        self.config, self.run_directory, self.run_id = config, run_directory, read_run_id(run_directory)
        self.store = store or Store(run_directory)
        self.identity: Identity | None = None  # the learner's
        self.seat = LearnerSeat(config.rollout.lease_s)
        self.workers = Leases(config.rollout.lease_s)
        self.load_ledger()
        self.publication = CurrentPublication()
        self.probes = RecentProbes()
        evaluated = [report.version for report in read_evaluations(run_directory)]
        self.evaluations = Evaluations((0, config.learner.steps) if config.evaluation.samples else (), evaluated)
        self.files = {
            kind: JsonLines(run_directory / f"{kind}.jsonl")
            for kind in ("metrics", "spans", "syncs", "probes", "checks", "mismatch", "evaluations", "events")
        }
        self.last_metrics_step = max((row["step"] for row in read_metrics(run_directory)), default=-1)
        self.poll_s = poll_s
        self.failure: str | None = None
        self.stopping = False
        self.changed = asyncio.Event()  # set and replaced at every change
        now = time.monotonic()
        self.groups_made, self.steps_made = Rate(now), Rate(now)
        self.note("hub_started", "hub", f"version {self.ledger.version}, {self.ledger.balance()}")

    def load_ledger(self) -> None:
        """Take the ledger from disk; whoever holds a group there has a lease from now on."""
        for step in self.store.unexported_steps():
            self.store.export_step(step.plan)
        learner, max_staleness = self.config.learner, self.config.sync.max_staleness
        max_attempts = self.config.rollout.max_attempts
        rules = LedgerRules(learner.prompts_per_step, max_staleness, learner.steps, max_attempts)
        self.ledger = Ledger.from_rows(rules, *self.store.load())
        self.is_ahead_of_disk = False
        for worker_id in self.ledger.num_held():
            self.workers.seen(worker_id, time.monotonic())

    def status(self) -> HubStatus:
        self.look_for_the_lost()
        ledger, now, held = self.ledger, time.monotonic(), self.ledger.num_held()
        return replace(
            ledger_status(ledger, self.is_finished()),
            workers={
                name: WorkerStatus(lease.active_version, now - lease.seen_s, now - lease.joined_s, held.get(name, 0))
                for name, lease in self.workers.items()
            },
            failure=self.failure,
            stopping=self.stopping,
            learner=self.seat.holder,
            learner_age_s=None if self.seat.holder is None else now - self.seat.seen_s,
            groups_per_min=self.groups_made.per_min(now),
            steps_per_min=self.steps_made.per_min(now),
            waiting_for="" if self.is_finished() else self.waiting_for(ledger.version),
        )

    def check_start(self, identity: Identity) -> None:
        """A run goes on from the model, tokenizer and schema it started with: ConfigError naming one that differs."""
        path = self.run_directory / "identity.json"
        start = {"model": identity.model, "tokenizer": identity.tokenizer, "schema": identity.schema}
        if not path.exists():
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(start), encoding="utf-8")
            temporary.replace(path)
        recorded = json.loads(path.read_text(encoding="utf-8"))
        for name, value in start.items():
            if recorded[name] != value:
                raise ConfigError(
                    f"{name}: this learner has {value}, the run was started with {recorded[name]}; give model.path the "
                    f"model that it started from, or start another run (run.name=...)."
                )

    def close(self) -> None:
        """Close the files; for a hub that is not an actor."""
        self.store.close()
        for file in self.files.values():
            file.close()

    def is_finished(self) -> bool:
        return self.ledger.finished and self.evaluations.is_done(self.ledger.rules.steps)

    def waiting_for(self, step: int) -> str:
        """For a person: the first groups that keep the step from starting, and who is there to make them."""
        seen = ", ".join(f"{name} {time.monotonic() - lease.seen_s:.0f} s ago" for name, lease in self.workers.items())
        if step == self.ledger.rules.steps:
            return f"version {step} waits for a worker that loads and evaluates it; workers seen: {seen or 'none'}"
        missing = []
        for number, row in self.ledger.step_groups(step).items():
            if row is None:
                missing.append(f"{number} (not issued)")
            elif row.state in ("generating", "waiting"):
                missing.append(f"{row.group} ({row.state}, {row.worker_id}, {now_s() - row.issued_at_s:.0f} s)")
        if not missing:
            return f"step {step} has all its groups"
        more = f" and {len(missing) - _WAITING_NAMED} more" if len(missing) > _WAITING_NAMED else ""
        return (
            f"step {step} waits for group {', '.join(missing[:_WAITING_NAMED])}{more}; workers seen: {seen or 'none'}"
        )

    def seen(self, worker_id: str, active_version: int | None = None) -> None:
        """A sign of life of this worker; also the moment to look for others that give none."""
        self.workers.seen(worker_id, time.monotonic(), active_version)
        self.look_for_the_lost()

    def look_for_the_lost(self) -> None:
        for worker_id in self.workers.lapsed(time.monotonic()):
            self.note("lost", worker_id, f"not heard of for {self.config.rollout.lease_s:g} s")
            self.give_back(worker_id)

    def give_back(self, worker_id: str, holds: Collection[Ticket] = ()) -> None:
        """Issue again what this worker does not hold: its groups under the next attempt, its evaluation."""
        self.evaluations.worker_lost(worker_id)
        try:
            rows = self.ledger.worker_lost(worker_id, holds)
        except RunFailed as error:
            self.fail("rollout", str(error))
            return
        if rows:
            self.save_rows(rows)

    def note_probe(self, report: ProbeReport) -> None:
        """A worker's verdict on its weights: kept for the learner; a refusal is an event."""
        self.probes.add(report)
        if not report.released:
            found, mismatch = "the probe could not be measured", report.mismatch
            if mismatch.num_tokens:
                found = f"rms {mismatch.rms:.3g} nats over {mismatch.num_tokens:g} tokens"
            self.note("weights_refused", report.worker_id, f"version {report.version} by the load check: {found}")

    def note(self, name: EventName, who: str, detail: str = "") -> None:
        with suppress(OSError):  # a full disk: what it led to is told by the failure, and must be dealt with
            self.files["events"].append([asdict(Event(now_s(), name, who, detail))])

    def save(self, tickets: Sequence[Ticket]) -> None:
        self.save_rows([self.ledger.row(ticket.group) for ticket in tickets])

    def save_rows(self, rows: Sequence[GroupRow]) -> None:
        with self.durable():
            self.store.save_groups(rows)
        self.notify()

    def save_step(self, step: int) -> None:
        row = self.ledger.step_row(step)
        with self.durable():
            self.store.save_step(row, [self.ledger.row(group) for group in row.plan.groups])

    @contextmanager
    def durable(self) -> Iterator[None]:
        """A write that fails leaves memory ahead of the disk: the run stops, nothing more is acknowledged.

        The next learner starts from what is on disk.
        """
        try:
            yield
        except Exception:
            self.is_ahead_of_disk = True
            self.fail("hub", traceback.format_exc())
            raise

    def fail(self, side: str, text: str) -> None:
        self.failure = self.failure or f"the {side} side of the run failed:\n{text}"
        self.notify()
        self.note("failed", side, text)

    def notify(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def poll(self, answer: Callable[[], Answer | None]) -> Answer | None:
        """The first answer that is not None, asked for now and after every change; None after `poll_s` seconds."""
        deadline_s = asyncio.get_running_loop().time() + self.poll_s
        while (value := answer()) is None:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self.changed.wait()
            except TimeoutError:
                return None
        return value
