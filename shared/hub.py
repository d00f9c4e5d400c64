"""The hub: one actor per run where both services meet. It owns the run directory and decides nothing by itself.

Decisions are the ledger's (shared.ledger), durability is the store's (shared.store): every change is on disk before
the call that made it returns. Waiting is long polling: a call that has no answer yet returns empty after `poll_s` and
is made again. All state is touched on the actor's event loop only; database calls are synchronous and short, the
Parquet file of a step is written on a thread. Any failure, of a side or of the hub's own disk, stops both sides.
"""

import asyncio
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shared.config import Config
from shared.errors import HubError, RunFailed
from shared.hub_state import CurrentPublication, Evaluations, HubStatus, Taken, WorkerStatus
from shared.jsonl import JsonLines
from shared.ledger import GroupRow, Ledger, LedgerRules
from shared.records import EvalReport, Group, ProbeReport, Publication, Report, Span, StepPlan, SyncReport, Ticket, Work
from shared.schema import decode_group
from shared.spans import now_s
from shared.store import Store, write_trajectories

HUB_NAME = "hub"
POLL_S = 3.0
_MAX_CONCURRENCY = 1000  # calls that may wait at once: two long polls a worker
_START_TIMEOUT_S = 60.0
_WAITING_NAMED = 4

Answer = TypeVar("Answer")
MetricRow = Mapping[str, float | int | str | Sequence[float | None] | None]


class Hub:
    """Implements GroupSource and VersionFeed, and the server side of GroupSink (`take` is one long poll)."""

    def __init__(self, config: Config, run_directory: Path, poll_s: float = POLL_S) -> None:
        self._store = Store(run_directory)
        for step in self._store.unexported_steps():
            self._store.export_step(step.plan)
        learner = config.learner
        rules = LedgerRules(
            learner.prompts_per_step, config.sync.max_staleness, learner.steps, config.rollout.max_attempts
        )
        self._ledger = Ledger.from_rows(rules, *self._store.load())
        self._publication = CurrentPublication()
        self._evaluations = Evaluations((0, learner.steps) if config.evaluation.samples else ())
        self._files = {
            kind: JsonLines(run_directory / f"{kind}.jsonl")
            for kind in ("metrics", "spans", "syncs", "probes", "evaluations")
        }
        self._poll_s = poll_s
        self._failure: str | None = None
        self._workers: dict[str, tuple[float, int]] = {}  # last seen (monotonic seconds), active version
        self._changed = asyncio.Event()  # set and replaced at every change

    # ---- for rollout workers: GroupSource and VersionFeed

    async def next_work(self, worker_id: str, active_version: int, max_groups: int) -> Work:
        """An evaluation, or up to `max_groups` tickets, or stop; empty after one long poll.

        A worker whose `active_version` is negative (no verified weights yet) gets nothing. HubError on bad arguments.
        """
        if not worker_id or max_groups < 1:
            raise HubError(f"next_work({worker_id=}, {max_groups=}): a worker has a name and asks for 1 group or more")
        self._seen(worker_id, active_version)
        return await self._poll(lambda: self._work_for(worker_id, active_version, max_groups)) or Work()

    async def submit(self, worker_id: str, ticket: Ticket, payload: bytes) -> bool:
        """A finished group; durable when this returns. False: refused as late.

        SchemaError when the bytes do not follow the data contract; HubError when they are not this ticket's group, hold
        tokens of a version that may not be trained, or the ticket was issued to another worker.
        """
        self._seen(worker_id)
        self._check_group(worker_id, ticket, decode_group(payload))
        verdict = self._ledger.submit(worker_id, ticket)
        if verdict == "accepted":
            with self._durable():
                self._store.save_ready(self._ledger.row(ticket.group), payload)
            self._notify()
        return verdict != "late"

    async def give_up(self, worker_id: str, ticket: Ticket, reason: str, detail: str) -> None:
        """Drop the group; its number goes to a replacement. RunFailed when too many replacements failed as well."""
        self._seen(worker_id)
        with self._fatal_if_failed():
            dropped = self._ledger.give_up(worker_id, ticket, reason, detail)
        if dropped:
            self._save([ticket])

    async def report(self, reports: Sequence[Report]) -> None:
        """Append to spans, syncs, probes and evaluations.jsonl. A second result of one evaluation is left out.

        A worker that reports a sync is served at its new version at once, also in a poll that it began at the old one.
        """
        with self._durable():
            self._files["spans"].append(asdict(r) for r in reports if isinstance(r, Span))
            self._files["syncs"].append(asdict(r) for r in reports if isinstance(r, SyncReport))
            self._files["probes"].append(asdict(r) for r in reports if isinstance(r, ProbeReport))
        for sync in (r for r in reports if isinstance(r, SyncReport)):
            self._seen(sync.worker_id, sync.version)
        for result in (r for r in reports if isinstance(r, EvalReport)):
            if self._evaluations.finish(result.version):
                with self._durable():
                    self._files["evaluations"].append([asdict(result)])
        self._notify()

    async def newer_version(self, than: int) -> Publication | None:
        """The current publication, with buckets, once its version exceeds `than`; None after one long poll."""
        return await self._poll(lambda: self._publication.newer(than))

    # ---- for the learner: GroupSink

    async def take(self, step: int) -> Taken:
        """The step's groups in order, or after one long poll what it waits for. RunFailed when a side failed."""
        groups = await self._poll(lambda: self._take_now(step))
        return Taken(groups) if groups is not None else Taken(None, self._waiting_for(step))

    async def begin_step(self, plan: StepPlan) -> None:
        self._ledger.begin_step(plan)
        self._save_step(plan.step)

    async def commit_step(self, step: int, weights_digest: str) -> None:
        """As in GroupSink; the step's Parquet file is in place when this returns."""
        self._ledger.commit_step(step, weights_digest)
        self._save_step(step)
        groups = self._ledger.step_row(step).plan.groups
        with self._durable():
            payloads = self._store.payloads(groups)
            await asyncio.to_thread(write_trajectories, self._store.trajectory_path(step), payloads, step)
            self._store.clear_payloads(groups)

    async def publish(self, publication: Publication) -> None:
        """As in GroupSink. HubError when new weights come without buckets, or for another than the current version."""
        complete = self._publication.complete(publication)
        settled = self._ledger.publish(publication.manifest.version)
        with self._durable():
            self._store.save_published(settled)
        self._publication.set(complete)
        self._notify()

    async def log_metrics(self, row: MetricRow) -> None:
        """Append a learner step to metrics.jsonl. HubError on NaN or infinity: a value that does not exist is None."""
        try:
            self._files["metrics"].append([row])
        except ValueError as error:
            raise HubError(f"metrics {dict(row)}: {error}; use None for a value that does not exist") from error

    # ---- for whoever watches the services

    async def fail(self, side: str, traceback_text: str) -> None:
        """One side cannot go on: `take` raises this text, workers are told to stop. The first failure is kept."""
        self._fail(side, traceback_text)

    async def worker_lost(self, worker_id: str) -> None:
        """Issue again what this worker held: its groups under the next attempt, its evaluation."""
        self._workers.pop(worker_id, None)
        self._evaluations.worker_lost(worker_id)
        with self._fatal_if_failed():
            rows = self._ledger.worker_lost(worker_id)
        self._save_rows(rows)

    async def status(self) -> HubStatus:
        balance, now = self._ledger.balance(), time.monotonic()
        return HubStatus(
            issued=balance.issued,
            trained=balance.trained,
            dropped=dict(balance.dropped),
            pending=balance.pending,
            version=self._ledger.version,
            published_version=self._ledger.published_version,
            workers={name: WorkerStatus(active, now - seen) for name, (seen, active) in self._workers.items()},
            finished=self._finished(),
            failure=self._failure,
        )

    def close(self) -> None:
        """Close the files; for a hub that is not an actor."""
        self._store.close()
        for file in self._files.values():
            file.close()

    # ---- inside

    def _work_for(self, worker_id: str, active_version: int, max_groups: int) -> Work | None:
        if self._failure or self._finished():
            return Work(stop=True)
        active_version = max(active_version, self._active_version(worker_id))
        version = self._evaluations.hand_out(worker_id, active_version)
        if version is not None:
            return Work(evaluate_version=version)
        tickets = self._ledger.issue(worker_id, active_version, max_groups, now_s())
        if not tickets:
            return None
        self._save(tickets)
        return Work(tickets)

    def _check_group(self, worker_id: str, ticket: Ticket, group: Group) -> None:
        if (group.group, group.attempt, group.worker_id) != (ticket.group, ticket.attempt, worker_id):
            raise HubError(
                f"worker {worker_id!r} submits attempt {ticket.attempt} of group {ticket.group}, but the bytes say "
                f"attempt {group.attempt} of group {group.group} by {group.worker_id!r}"
            )
        oldest, newest = self._ledger.oldest_version_allowed(group.group), self._ledger.published_version
        versions = {segment.policy_version for rollout in group.rollouts for segment in rollout.segments}
        strange = sorted(version for version in versions if not oldest <= version <= newest)
        if strange:
            raise HubError(
                f"group {group.group} of worker {worker_id!r} has tokens of versions {strange}; versions {oldest} "
                f"(sync.max_staleness) to {newest} (newest published) may be trained"
            )

    def _take_now(self, step: int) -> list[bytes] | None:
        if self._failure:
            raise RunFailed(self._failure)
        groups = self._ledger.take(step)
        return None if groups is None else self._store.payloads(groups)

    def _waiting_for(self, step: int) -> str:
        """For a person: the first groups that keep the step from starting, and who is there to make them."""
        missing = []
        for number, row in self._ledger.step_groups(step).items():
            if row is None:
                missing.append(f"{number} (not issued)")
            elif row.state in ("generating", "waiting"):
                missing.append(f"{row.group} ({row.state}, {row.worker_id}, {now_s() - row.issued_at_s:.0f} s)")
        now = time.monotonic()
        seen = ", ".join(f"{name} {now - last:.0f} s ago" for name, (last, _) in self._workers.items())
        more = f" and {len(missing) - _WAITING_NAMED} more" if len(missing) > _WAITING_NAMED else ""
        return (
            f"step {step} waits for group {', '.join(missing[:_WAITING_NAMED])}{more}; workers seen: {seen or 'none'}"
        )

    def _finished(self) -> bool:
        return self._ledger.finished and self._evaluations.is_done(self._ledger.rules.steps)

    def _seen(self, worker_id: str, active_version: int | None = None) -> None:
        _, last_active = self._workers.get(worker_id, (0.0, -1))
        self._workers[worker_id] = (time.monotonic(), last_active if active_version is None else active_version)

    def _active_version(self, worker_id: str) -> int:
        return self._workers[worker_id][1]

    def _save(self, tickets: Sequence[Ticket]) -> None:
        self._save_rows([self._ledger.row(ticket.group) for ticket in tickets])

    def _save_rows(self, rows: Sequence[GroupRow]) -> None:
        with self._durable():
            self._store.save_groups(rows)
        self._notify()

    def _save_step(self, step: int) -> None:
        row = self._ledger.step_row(step)
        with self._durable():
            self._store.save_step(row, [self._ledger.row(group) for group in row.plan.groups])

    @contextmanager
    def _durable(self) -> Iterator[None]:
        """A write that fails leaves memory ahead of the disk: the run stops, nothing more is acknowledged."""
        try:
            yield
        except Exception:
            self._fail("hub", traceback.format_exc())
            raise

    @contextmanager
    def _fatal_if_failed(self) -> Iterator[None]:
        try:
            yield
        except RunFailed as error:
            self._fail("rollout", str(error))
            raise

    def _fail(self, side: str, text: str) -> None:
        self._failure = self._failure or f"the {side} side of the run failed:\n{text}"
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _poll(self, answer: Callable[[], Answer | None]) -> Answer | None:
        """The first answer that is not None, asked for now and after every change; None after `poll_s` seconds."""
        deadline_s = asyncio.get_running_loop().time() + self._poll_s
        while (value := answer()) is None:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                return None
        return value


def start_hub(config: Config, run_directory: Path, poll_s: float = POLL_S) -> Any:
    """Create the run's hub on this node, which must hold the run directory; it lives as long as the returned handle.

    Namespace is the run's name. Ray must be connected. HubError when it does not start, with the cause.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Hub).options(
        name=HUB_NAME,
        namespace=config.run.name,
        num_cpus=0,
        max_restarts=0,
        max_concurrency=_MAX_CONCURRENCY,
        scheduling_strategy=here,
    )
    try:
        hub = actor.remote(config, run_directory.resolve(), poll_s)
        ray.get(hub.status.remote(), timeout=_START_TIMEOUT_S)
    except (ray.exceptions.RayError, ValueError) as error:
        raise HubError(f"the hub of run {config.run.name!r} did not start in {run_directory}: {error}") from error
    return hub
