"""One rollout worker: asks the hub for groups, generates them, follows the learner's versions.

Owns one engine and its active version, which is 0 (the weights on disk) until the first publication is loaded. Gate:
the hub hands out a group only to a worker whose active version is new enough for it.
"""

import asyncio
import contextlib
import logging
from typing import Protocol

import numpy as np

from rollout.evaluate import evaluate
from rollout.generate import GroupGenerator
from rollout.prompts import PromptSource
from rollout.receive import Staged, Staging
from shared.config import Config
from shared.errors import RewardError, RolloutRejected
from shared.protocols import Engine, GroupSource, VersionFeed
from shared.records import Manifest, ProbeReport, Publication, SyncReport, Ticket
from shared.schema import encode_group
from shared.spans import Recorder, Timing

_LOG = logging.getLogger(__name__)


class Hub(GroupSource, VersionFeed, Protocol):
    """Both seams of the hub that a worker uses."""


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
        self._active_version = 0
        self._active_weights_version = 0
        self._groups_in_flight: set[asyncio.Task[None]] = set()
        self._max_groups = max(1, config.rollout.max_num_seqs // config.sampling.group_size)

    async def run(self) -> None:
        """Work until the hub says stop. Any error ends the worker with that error."""
        follower = asyncio.create_task(self._follow_versions())
        worker = asyncio.create_task(self._work())
        try:
            done, _ = await asyncio.wait({follower, worker}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            tasks = {follower, worker, *self._groups_in_flight}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._hub.report(self._recorder.take())

    async def _work(self) -> None:
        while True:
            free = self._max_groups - len(self._groups_in_flight)
            if free <= 0:
                await self._wait_for_a_group()
                continue
            work = await self._hub.next_work(self._recorder.lane, self._active_version, free)
            if work.stop:
                return
            if work.evaluate_version is not None:
                await self._evaluate(work.evaluate_version)
            for ticket in work.tickets:
                self._groups_in_flight.add(asyncio.create_task(self._generate(ticket)))
            self._collect_finished()
            await self._hub.report(self._recorder.take())

    async def _wait_for_a_group(self) -> None:
        await asyncio.wait(self._groups_in_flight, return_when=asyncio.FIRST_COMPLETED)
        self._collect_finished()

    def _collect_finished(self) -> None:
        finished = {task for task in self._groups_in_flight if task.done()}
        self._groups_in_flight -= finished
        for task in finished:
            task.result()

    async def _generate(self, ticket: Ticket) -> None:
        prompt = self._prompts.training_prompt(ticket.group)
        try:
            group = await self._generator.generate(ticket, prompt, self._active_version)
        except RolloutRejected as error:
            await self._hub.give_up(self._recorder.lane, ticket, "untrusted_logprobs", str(error))
        except RewardError as error:
            await self._hub.give_up(self._recorder.lane, ticket, "reward_error", str(error))
        else:
            await self._hub.submit(self._recorder.lane, ticket, encode_group(group))

    async def _evaluate(self, version: int) -> None:
        async with self._weights_lock:
            if self._active_version != version:  # a newer one came first; its numbers would bear the wrong label
                _LOG.warning("version %d was not evaluated: %d is active", version, self._active_version)
                return
            with self._recorder.span("evaluate", version):
                report = await evaluate(self._config, self._engine, self._generator, self._prompts.held_out, version)
        await self._hub.report([report])

    async def _follow_versions(self) -> None:
        while True:
            await self._activate_newer(await self._hub.newer_version(than=self._active_version))

    async def _activate_newer(self, publication: Publication | None) -> None:
        if publication is None or publication.manifest.version <= self._active_version:
            return
        manifest = publication.manifest
        version = manifest.version
        changed = manifest.weights_version != self._active_weights_version
        with contextlib.ExitStack() as until_loaded:
            fetched, staged = (
                await self._receive(publication, until_loaded) if changed else (Timing(), Staged((), 0, 0))
            )
            del publication  # lets the object store release the version
            async with self._weights_lock:
                with self._recorder.span("load", version):
                    parts = await self._engine.load(manifest, staged.files)
                self._active_version, self._active_weights_version = version, manifest.weights_version
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
        )
        await self._hub.report([report])
        if manifest.probe:
            await self._probe(manifest)

    async def _receive(self, publication: Publication, until_loaded: contextlib.ExitStack) -> tuple[Timing, Staged]:
        """Fetch the buckets from the object store, check them and stage them as files until the load is done."""
        version = publication.manifest.version
        with self._recorder.span("fetch", version) as fetched:
            buckets = list(await asyncio.gather(*publication.buckets))
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
