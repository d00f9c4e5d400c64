"""The hub: one actor per run where both services meet. It owns the run directory and decides nothing by itself.

Decisions are the ledger's (shared.ledger), durability is the store's (shared.store): every change is on disk before
the call that made it returns. What is not on disk is learned again: a hub that was killed comes back from the run
directory, workers and learner call again, and every call may be repeated. Waiting is long polling: a call that has no
answer yet returns empty after `poll_s` and is made again; leases are checked at every call. All state is touched on the
actor's event loop only; database calls are synchronous and short, the Parquet file of a step is written on a thread.
Any failure, of a side or of the hub's own disk, stops both sides.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from shared.config import Config
from shared.errors import ConfigError, HubError, RunFailed
from shared.hub_core import HubCore
from shared.hub_state import HubStatus, LearnerOrders, Taken
from shared.identity import check_same
from shared.records import (
    EvalReport,
    Group,
    Identity,
    MismatchReport,
    ProbeReport,
    Publication,
    RecordedStep,
    Report,
    ResumePoint,
    SamplingReport,
    Span,
    StepPlan,
    SyncReport,
    Ticket,
    Work,
)
from shared.run_files import read_recorded_step
from shared.schema import decode_group
from shared.spans import now_s
from shared.store import Store, write_trajectories

POLL_S = 3.0

MetricRow = Mapping[str, float | int | str | Sequence[float | None] | None]


class Hub:
    """Implements GroupSource and VersionFeed, and the server side of GroupSink (`take` is one long poll)."""

    def __init__(self, config: Config, run_directory: Path, poll_s: float = POLL_S, store: Store | None = None) -> None:
        self._core = HubCore(config, run_directory, poll_s, store)

    # ---- for rollout workers: GroupSource and VersionFeed

    async def check(self, identity: Identity) -> str:
        """Whether a worker of this identity may join: "" if so, or what it would wait for. ConfigError if not."""
        if self._core.identity is None:
            return "this run's learner, which has not come yet"
        check_same(identity, self._core.identity)
        if self._core.seat.holder is None and (self._core.failure or self._core.stopping):
            return "a learner that resumes this run, which was stopped or failed"
        return ""

    async def join(self, worker_id: str, identity: Identity) -> str:
        """A worker whose engine is up: "" once it is in, or after one long poll what it waits for.

        It gets no work before it holds the weights that are current now. ConfigError as in `check`.
        """
        try:
            await self._core.poll(lambda: self._core.seat.holder)
            if waiting_for := await self.check(identity):
                return waiting_for
        except ConfigError as error:
            self._core.note("refused", worker_id, str(error))
            raise
        if worker_id not in self._core.workers:
            self._core.workers.join(worker_id, self._core.ledger.published_version, time.monotonic())
            self._core.note("joined", worker_id)
        return ""

    async def heartbeat(self, worker_id: str) -> None:
        """Renew the worker's lease."""
        self._core.seen(worker_id)

    async def leave(self, worker_id: str, why: str = "") -> None:
        """The worker is gone, by its own will or (so says who watches it) not: what it held goes to others."""
        if worker_id in self._core.workers:
            self._core.workers.leave(worker_id)
            self._core.note("left", worker_id, why)
        self._core.give_back(worker_id)

    async def next_work(self, worker_id: str, active_version: int, holds: Sequence[Ticket], max_groups: int) -> Work:
        """An evaluation, or up to `max_groups` tickets, or stop; empty after one long poll, with the reason.

        `holds`: the tickets the worker has and has not handed in; others that it should have never reached it and are
        taken back. A worker whose `active_version` is negative (no verified weights yet) gets nothing. HubError on bad
        arguments.
        """
        if not worker_id or max_groups < 1:
            raise HubError(f"next_work({worker_id=}, {max_groups=}): a worker has a name and asks for 1 group or more")
        self._core.seen(worker_id, active_version)
        self._core.give_back(worker_id, holds)
        work = await self._core.poll(lambda: self._work_for(worker_id, max_groups))
        return work or Work(waiting_for=self._why_no_work(worker_id))

    async def submit(self, worker_id: str, ticket: Ticket, payload: bytes) -> bool:
        """A finished group; durable when this returns. False: refused as late.

        SchemaError when the bytes do not follow the data contract; HubError when they are not this ticket's group, hold
        tokens of a version that may not be trained, or the ticket was issued to another worker.
        """
        self._core.seen(worker_id)
        group = decode_group(payload)
        self._check_group(worker_id, ticket, group)
        oldest = min((r.oldest_version for r in group.rollouts if r.num_tokens), default=None)
        verdict = self._core.ledger.submit(worker_id, ticket, oldest)
        if verdict == "accepted":
            with self._core.durable():
                self._core.store.save_ready(self._core.ledger.row(ticket.group), payload)
            self._core.groups_made.count(time.monotonic())
            self._core.notify()
        return verdict != "late"

    async def give_up(self, worker_id: str, ticket: Ticket, reason: str, detail: str) -> None:
        """Drop the group; its number goes to a replacement. RunFailed when too many replacements failed as well."""
        self._core.seen(worker_id)
        try:
            dropped = self._core.ledger.give_up(worker_id, ticket, reason, detail)
        except RunFailed as error:
            self._core.fail("rollout", str(error))
            raise
        if dropped:
            self._core.save([ticket])

    async def report(self, reports: Sequence[Report]) -> None:
        """Append each to the file of its kind. A second result of one evaluation is left out.

        A worker that reports a sync is served at its new version at once, also in a poll that it began at the old one.
        Weights that it refused are an event.
        """
        with self._core.durable():
            self._core.files["spans"].append(asdict(r) for r in reports if isinstance(r, Span))
            self._core.files["syncs"].append(asdict(r) for r in reports if isinstance(r, SyncReport))
            self._core.files["probes"].append(asdict(r) for r in reports if isinstance(r, ProbeReport))
            self._core.files["mismatch"].append(asdict(r) for r in reports if isinstance(r, MismatchReport))
            self._core.files["checks"].append(asdict(r) for r in reports if isinstance(r, SamplingReport))
        for sync in (r for r in reports if isinstance(r, SyncReport)):
            self._core.seen(sync.worker_id, sync.version)
        for probe in (r for r in reports if isinstance(r, ProbeReport)):
            self._core.note_probe(probe)
        for result in (r for r in reports if isinstance(r, EvalReport)):
            if self._core.evaluations.finish(result.version):
                with self._core.durable():
                    self._core.files["evaluations"].append([asdict(result)])
        self._core.notify()

    async def newer_version(self, than: int, incarnation: int = 0) -> Publication | None:
        """The current publication, with buckets, once it is newer than this; None after one long poll."""
        return await self._core.poll(lambda: self._core.publication.newer(than, incarnation))

    # ---- for the learner: GroupSink and its seat

    async def sit_down(self, learner_id: str, identity: Identity) -> ResumePoint:
        """The learner's first call: where to go on. Clears a failure and a stop of its predecessor's life.

        HubError while another learner is alive; ConfigError when it starts from another model than the run did.
        """
        self._core.check_start(identity)
        self._core.seat.take(learner_id, time.monotonic())
        if self._core.is_ahead_of_disk:
            self._core.load_ledger()
        self._core.identity, self._core.failure, self._core.stopping = identity, None, False
        self._core.publication.forget()
        self._core.note("learner_came", learner_id, f"goes on at version {self._core.ledger.version}")
        self._core.notify()
        return ResumePoint(self._core.ledger.version, self._core.ledger.begun_plan(), self._core.ledger.incarnation)

    async def learner_alive(self, learner_id: str, identity: Identity) -> LearnerOrders:
        """The learner's sign of life, and what it is to do."""
        self._require(learner_id)
        self._core.look_for_the_lost()
        if self._core.identity is None:  # a hub that was restarted does not know it, and workers may wait for it
            self._core.identity = identity
            self._core.notify()
        lost = self._core.publication.is_lost and self._core.ledger.published_version == self._core.ledger.version > 0
        return LearnerOrders(self._core.stopping, self._core.failure, lost)

    async def get_up(self, learner_id: str) -> None:
        """The learner leaves; with its process the weights it published go."""
        if self._core.seat.holder == learner_id:
            self._core.seat.leave(learner_id)
            self._core.publication.forget()
            self._core.note("learner_left", learner_id)

    async def recorded_step(self, learner_id: str, step: int) -> RecordedStep:
        """A committed step, to be trained again. HubError when it was not committed."""
        self._require(learner_id)
        row = self._core.ledger.step_row(step)
        if row.weights_digest is None:
            raise HubError(f"step {step} was not committed; the newest trained version is {self._core.ledger.version}")
        return await asyncio.to_thread(read_recorded_step, self._core.run_directory, row)

    async def replace_weights(self, learner_id: str, weights_digest: str) -> int:
        """Training the recorded steps again gave other weights for the current version; returns the new incarnation."""
        self._require(learner_id)
        row = self._core.ledger.replace_weights(weights_digest)
        with self._core.durable():
            self._core.store.save_published([row])
        self._core.note("new_incarnation", learner_id, f"{row.incarnation} from version {self._core.ledger.version}")
        return row.incarnation

    async def take(self, learner_id: str, step: int) -> Taken:
        """The step's groups in order, or after one long poll what it waits for. RunFailed when a side failed."""
        self._require(learner_id)
        self._core.look_for_the_lost()
        groups = await self._core.poll(lambda: self._take_now(step))
        return Taken(groups) if groups is not None else Taken(None, self._core.waiting_for(step))

    async def probes(self, learner_id: str, since_version: int) -> list[ProbeReport]:
        """The workers' verdicts on `since_version` and later ones, refusals too, by version (`RecentProbes`).

        A hub that was killed knows none of those before.
        """
        self._require(learner_id)
        return self._core.probes.since(since_version)

    async def begin_step(self, learner_id: str, plan: StepPlan) -> None:
        self._require(learner_id)
        self._core.ledger.begin_step(plan)
        self._core.save_step(plan.step)

    async def commit_step(self, learner_id: str, step: int, weights_digest: str) -> None:
        """As in GroupSink; the step's Parquet file is in place when this returns."""
        self._require(learner_id)
        if self._core.ledger.version == step + 1:
            self._core.ledger.commit_step(step, weights_digest)  # again; refused unless it is the same
            return
        self._core.ledger.commit_step(step, weights_digest)
        self._core.save_step(step)
        groups = self._core.ledger.step_row(step).plan.groups
        with self._core.durable():
            payloads = self._core.store.payloads(groups)
            await asyncio.to_thread(write_trajectories, self._core.store.trajectory_path(step), payloads, step)
            self._core.store.clear_payloads(groups)
        self._core.steps_made.count(time.monotonic())

    async def publish(self, learner_id: str, publication: Publication) -> None:
        """As in GroupSink. HubError when new weights come without buckets, or for another than the current version."""
        self._require(learner_id)
        complete = self._core.publication.complete(publication)
        settled = self._core.ledger.publish(publication.manifest.version)
        with self._core.durable():
            self._core.store.save_published(settled)
        self._core.publication.set(complete)
        self._core.notify()

    async def publish_again(self, learner_id: str, publication: Publication) -> None:
        """Give a hub that was restarted the current publication back; one that is not current any more is left out."""
        self._require(learner_id)
        if self._core.publication.is_lost and publication.manifest.version == self._core.ledger.published_version:
            self._core.publication.set(publication)
            self._core.notify()

    async def log_metrics(self, learner_id: str, row: MetricRow) -> None:
        """Append a learner step to metrics.jsonl; a step that is there already, because it was redone, is left out.

        HubError on NaN or infinity: a value that does not exist is None.
        """
        self._require(learner_id)
        step = int(str(row["step"]))
        if step <= self._core.last_metrics_step:
            return
        try:
            self._core.files["metrics"].append([row])
        except ValueError as error:
            raise HubError(f"metrics {dict(row)}: {error}; use None for a value that does not exist") from error
        self._core.last_metrics_step = step

    # ---- for whoever watches the services

    async def fail(self, side: str, traceback_text: str) -> None:
        """One side cannot go on: `take` raises this text, workers are told to stop. The first failure is kept.

        A rollout service that fails while workers of other services are alive is only noted.
        """
        self._core.look_for_the_lost()
        if side == "rollout" and len(self._core.workers):
            self._core.note("failed", side, traceback_text)
        else:
            self._core.fail(side, traceback_text)

    async def request_stop(self) -> None:
        """Learner and workers finish what they hold and end; the learner writes a checkpoint."""
        self._core.stopping = True
        self._core.note("stop_requested", "hub")
        self._core.notify()

    async def config(self) -> tuple[str, Config]:
        """Which run this hub serves (`read_run_id`), and what it was started with."""
        return self._core.run_id, self._core.config

    async def status(self) -> HubStatus:
        return self._core.status()

    def close(self) -> None:
        """Close the files; for a hub that is not an actor."""
        self._core.close()

    # ---- inside

    def _work_for(self, worker_id: str, max_groups: int) -> Work | None:
        if self._core.failure or self._core.is_finished():
            return Work(stop="now", waiting_for=self._core.failure or "")
        if self._core.stopping:
            return Work(stop="drain")
        lease = self._core.workers.get(worker_id)  # a sync may have been reported meanwhile
        if lease is None:  # it left, or was lost, while it waited here: nobody would make what it is given
            return Work()
        if lease.active_version < lease.floor:
            return None
        version = self._core.evaluations.hand_out(worker_id, lease.active_version)
        if version is not None:
            return Work(evaluate_version=version)
        num_groups = min(max_groups, self._fair_share(worker_id, lease.active_version))
        tickets = self._core.ledger.issue(worker_id, lease.active_version, num_groups, now_s())
        if not tickets:
            return None
        self._core.save(tickets)
        return Work(tickets)

    def _fair_share(self, worker_id: str, active_version: int) -> int:
        """Groups this worker may have more of, so that all workers hold about the same number of those there are.

        Else the first one to load a new version would take all of its groups. Example: 8 may start, 2 workers: 4 for
        the first, also when it asks again at once, and 4 for the second, which comes a second later.
        """
        held = self._core.ledger.num_held()
        there_are = sum(held.values()) + self._core.ledger.num_startable(active_version)
        at_work = sum(lease.active_version >= lease.floor for _, lease in self._core.workers.items())
        return math.ceil(there_are / at_work) - held.get(worker_id, 0)

    def _why_no_work(self, worker_id: str) -> str:
        lease, newest = self._core.workers.get(worker_id), self._core.ledger.published_version
        if lease is None:
            return ""
        if max(lease.floor, newest) > lease.active_version:
            lost = "; the learner that held it is gone, the next one sends it" if self._core.publication.is_lost else ""
            return f"version {newest} on this worker, which has {lease.active_version}{lost}"
        learner = self._core.seat.holder or "none"
        return f"the learner ({learner}) to publish version {newest + 1}: the groups that may start now are shared out"

    def _check_group(self, worker_id: str, ticket: Ticket, group: Group) -> None:
        if (group.group, group.attempt, group.worker_id) != (ticket.group, ticket.attempt, worker_id):
            raise HubError(
                f"worker {worker_id!r} submits attempt {ticket.attempt} of group {ticket.group}, but the bytes say "
                f"attempt {group.attempt} of group {group.group} by {group.worker_id!r}"
            )
        oldest, newest = self._core.ledger.oldest_version_allowed(group.group), self._core.ledger.published_version
        versions = {segment.policy_version for rollout in group.rollouts for segment in rollout.segments}
        strange = sorted(version for version in versions if not oldest <= version <= newest)
        if strange:
            raise HubError(
                f"group {group.group} of worker {worker_id!r} has tokens of versions {strange}; versions {oldest} "
                f"(sync.max_staleness) to {newest} (newest published) may be trained"
            )

    def _require(self, learner_id: str) -> None:
        """HubError unless this learner holds the seat."""
        self._core.seat.require(learner_id, time.monotonic())

    def _take_now(self, step: int) -> list[bytes] | None:
        if self._core.failure:
            raise RunFailed(self._core.failure)
        groups = self._core.ledger.take(step)
        return None if groups is None else self._core.store.payloads(groups)
