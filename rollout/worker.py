"""One rollout worker: joins the run, asks the hub for groups, generates them, follows the learner's versions.

Owns one engine and its active version, which is 0 (the weights on disk) until the first publication is loaded. Gate:
the hub hands out a group only to a worker whose active version is new enough for it, and to one that joined late only
once it holds the learner's version. What it holds outlives neither its lease nor itself: the hub issues it again.
"""

import asyncio
import contextlib
import logging
import time
from typing import Protocol

import numpy as np

from rollout.evaluate import evaluate
from rollout.generate import GroupGenerator
from rollout.prompts import PromptSource
from rollout.receive import Staged, Staging, fetch_buckets
from shared.config import Config
from shared.errors import GroupTimeout, RewardError, RolloutRejected, RunFailed, SeqrelayError, WeightsLost
from shared.protocols import Engine, GroupSource, Membership, VersionFeed
from shared.records import Identity, Manifest, ProbeReport, Publication, SyncReport, Ticket
from shared.schema import encode_group
from shared.spans import Recorder, Timing

_LOG = logging.getLogger(__name__)
_TELL_EVERY_S = 30.0
_HEARTBEATS_PER_LEASE = 6
_LOOK_AGAIN_S = 1.0

# Why a group is given up, by the error that says so.
_DROP_REASONS: dict[type[SeqrelayError], str] = {
    RolloutRejected: "untrusted_logprobs",
    RewardError: "reward_error",
    GroupTimeout: "timeout",
}


class Hub(GroupSource, Membership, VersionFeed, Protocol):
    """The seams of the hub that a worker uses."""


class Worker:
    """The loop around one engine."""

    def __init__(
        self,
        config: Config,
        hub: Hub,
        engine: Engine,
        prompts: PromptSource,
        generator: GroupGenerator,
        recorder: Recorder,
        staging: Staging,
    ) -> None:
        self._config, self._hub, self._engine = config, hub, engine
        self._prompts, self._generator, self._recorder, self._staging = prompts, generator, recorder, staging
        self._weights_lock = asyncio.Lock()  # an evaluation and a weight swap exclude each other
        self._active = (0, 0)  # version, incarnation
        self._active_weights = (0, 0)  # version at which they last changed, incarnation
        self._groups_in_flight: dict[Ticket, asyncio.Task[None]] = {}
        self._max_groups = max(1, config.rollout.max_num_seqs // config.sampling.group_size)
        self._draining = False
        self._told_s = 0.0

    def drain(self) -> None:
        """Ask for no more work; `run` returns once everything held is handed in."""
        self._draining = True

    async def run(self, identity: Identity) -> bool:
        """Work until the hub says stop (True: the run is finished) or `drain` (False). RunFailed when the run failed.

        Any other error ends the worker with that error. Its lease goes on until it leaves or lapses.
        """
        return await self._join(identity) and await self._live()

    async def _join(self, identity: Identity) -> bool:
        while not self._draining:
            waiting_for = await self._hub.join(self._recorder.lane, identity)
            if not waiting_for:
                _LOG.info("%s has joined run %s", self._recorder.lane, self._config.run.name)
                self._told_s = time.monotonic()
                return True
            self._tell(waiting_for)
        return False

    async def _live(self) -> bool:
        beside = {asyncio.create_task(self._follow_versions()), asyncio.create_task(self._stay_alive())}
        working = asyncio.create_task(self._work())
        try:
            done, _ = await asyncio.wait({*beside, working}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {working}:
                task.result()
            return await working
        finally:
            tasks = {*beside, working, *self._groups_in_flight.values()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._hub.report(self._recorder.take())

    async def _stay_alive(self) -> None:
        while True:
            await asyncio.sleep(self._config.rollout.lease_s / _HEARTBEATS_PER_LEASE)
            await self._hub.heartbeat(self._recorder.lane)

    async def _work(self) -> bool:
        """True: the run is finished; False: stopped before that, with nothing held."""
        while not self._draining:
            free = self._max_groups - len(self._groups_in_flight)
            if free <= 0:
                await self._wait_for_a_group()
                continue
            holds = tuple(self._groups_in_flight)
            work = await self._hub.next_work(self._recorder.lane, self._active[0], holds, free)
            if work.stop == "now":
                if work.waiting_for:
                    raise RunFailed(work.waiting_for)
                return True
            self._draining = self._draining or work.stop == "drain"
            for ticket in work.tickets:
                self._groups_in_flight[ticket] = asyncio.create_task(self._generate(ticket))
            if work.evaluate_version is not None:
                await self._evaluate(work.evaluate_version)
            if work.waiting_for and not self._groups_in_flight:
                self._tell(work.waiting_for)
            else:
                self._told_s = time.monotonic()  # short waits are nothing to tell
            self._collect_finished()
            await self._hub.report(self._recorder.take())
        while self._groups_in_flight:
            await self._wait_for_a_group()
        return False

    async def _wait_for_a_group(self) -> None:
        await asyncio.wait(self._groups_in_flight.values(), return_when=asyncio.FIRST_COMPLETED)
        self._collect_finished()

    def _collect_finished(self) -> None:
        finished = {ticket: task for ticket, task in self._groups_in_flight.items() if task.done()}
        for ticket, task in finished.items():
            del self._groups_in_flight[ticket]
            task.result()

    async def _generate(self, ticket: Ticket) -> None:
        prompt = self._prompts.training_prompt(ticket.group)
        try:
            group = await self._generator.generate(ticket, prompt, self._active[0])
        except tuple(_DROP_REASONS) as error:
            reason = next(reason for kind, reason in _DROP_REASONS.items() if isinstance(error, kind))
            _LOG.warning("group %s is dropped (%s): %s", ticket.group, reason, error)
            await self._hub.give_up(self._recorder.lane, ticket, reason, str(error))
        else:
            await self._hub.submit(self._recorder.lane, ticket, encode_group(group))

    async def _evaluate(self, version: int) -> None:
        async with self._weights_lock:
            if self._active[0] != version:  # a newer one came first; its numbers would bear the wrong label
                _LOG.warning("version %d was not evaluated: %d is active", version, self._active[0])
                return
            with self._recorder.span("evaluate", version):
                report = await evaluate(self._config, self._engine, self._generator, self._prompts.held_out, version)
        await self._hub.report([report])

    async def _follow_versions(self) -> None:
        while True:
            publication = await self._hub.newer_version(*self._active)
            if publication is None:
                continue
            try:
                await self._activate(publication)
            except WeightsLost as error:
                _LOG.warning("version %d cannot be fetched: %s", publication.manifest.version, error)
                await asyncio.sleep(_LOOK_AGAIN_S)

    async def _activate(self, publication: Publication) -> None:
        manifest = publication.manifest
        version = manifest.version
        changed = (manifest.weights_version, manifest.incarnation) != self._active_weights
        with contextlib.ExitStack() as until_loaded:
            fetched, staged = (
                await self._receive(publication, until_loaded) if changed else (Timing(), Staged((), 0, 0))
            )
            del publication  # lets the object store release the version
            async with self._weights_lock:
                with self._recorder.span("load", version):
                    parts = await self._engine.load(manifest, staged.files)
                self._active = (version, manifest.incarnation)
                self._active_weights = (manifest.weights_version, manifest.incarnation)
        report = SyncReport(
            worker_id=self._recorder.lane,
            version=version,
            num_bytes=manifest.num_bytes if changed else 0,
            fetch_s=fetched.duration_s,
            digest_s=staged.digest_s,
            stage_s=staged.stage_s,
            pause_s=parts["pause_s"],
            load_s=parts["load_s"],
            resume_s=parts["resume_s"],
            incarnation=manifest.incarnation,
        )
        await self._hub.report([report])
        if manifest.probe:
            await self._probe(manifest)

    async def _receive(self, publication: Publication, until_loaded: contextlib.ExitStack) -> tuple[Timing, Staged]:
        """Fetch the buckets from the object store, check them and stage them as files until the load is done."""
        version = publication.manifest.version
        with self._recorder.span("fetch", version) as fetched:
            buckets = await fetch_buckets(publication)
        with self._recorder.span("stage", version):
            staging = self._staging.stage(publication.manifest, buckets)
            staged = await asyncio.to_thread(until_loaded.enter_context, staging)
        return fetched, staged

    async def _probe(self, manifest: Manifest) -> None:
        """Score the probe's sequences and report the largest difference from the learner's log-probabilities."""
        with self._recorder.span("probe", manifest.version) as probed:
            scores = await asyncio.gather(*[self._engine.score(p.token_ids.tolist(), p.first) for p in manifest.probe])
        differences = [np.abs(s - p.logprobs) for s, p in zip(scores, manifest.probe, strict=True)]
        max_abs, num_tokens = float(np.max(np.concatenate(differences))), sum(map(len, differences))
        worker_id, version = self._recorder.lane, manifest.version
        await self._hub.report([ProbeReport(worker_id, version, num_tokens, max_abs, probed.duration_s)])

    def _tell(self, waiting_for: str) -> None:
        """Nobody waits in silence: what for, now and then."""
        if time.monotonic() - self._told_s >= _TELL_EVERY_S:
            self._told_s = time.monotonic()
            _LOG.info("waiting for %s", waiting_for)
