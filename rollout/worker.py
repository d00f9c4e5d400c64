"""One rollout worker: joins the run, asks the hub for groups, generates them, while its weights follow the learner's.

Owns one engine, whose active version is 0 (the weights on disk) until the first publication is loaded. Gates: the hub
hands out a group only to a worker whose active version is new enough for it, and to one that joined late only once it
holds the learner's version; a group is handed in, and an evaluation made, only under weights that were verified
(rollout.follow). What a worker holds outlives neither its lease nor itself: the hub issues it again.
"""

import asyncio
import logging
import time
from typing import Protocol

from rollout.evaluate import evaluate
from rollout.follow import WeightFollower
from rollout.generate import GroupGenerator
from rollout.prompts import PromptSource
from rollout.receive import Staging
from shared.config import Config
from shared.errors import GroupTimeout, RewardError, RolloutRejected, RunFailed, SeqrelayError
from shared.protocols import Engine, GroupSource, Membership, VersionFeed
from shared.records import Identity, Ticket
from shared.schema import encode_group
from shared.spans import Recorder

_LOG = logging.getLogger(__name__)
_TELL_EVERY_S = 30.0
_HEARTBEATS_PER_LEASE = 6

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
        self._prompts, self._generator, self._recorder = prompts, generator, recorder
        self._weights = WeightFollower(config, hub, engine, staging, recorder, generator.verdicts)
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
        beside = {asyncio.create_task(self._weights.run()), asyncio.create_task(self._stay_alive())}
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
            work = await self._hub.next_work(self._recorder.lane, self._weights.active_version, holds, free)
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
            group = await self._generator.generate(ticket, prompt, self._weights.active_version)
        except tuple(_DROP_REASONS) as error:
            reason = next(reason for kind, reason in _DROP_REASONS.items() if isinstance(error, kind))
            _LOG.warning("group %s is dropped (%s): %s", ticket.group, reason, error)
            await self._hub.give_up(self._recorder.lane, ticket, reason, str(error))
        else:
            await self._hub.submit(self._recorder.lane, ticket, encode_group(group))

    async def _evaluate(self, version: int) -> None:
        async with self._weights.steady() as active_version:
            if active_version != version:  # a newer one came first; its numbers would bear the wrong label
                _LOG.warning("version %d was not evaluated: %d is active", version, active_version)
                return
            with self._recorder.span("evaluate", version):
                report = await evaluate(self._config, self._engine, self._generator, self._prompts.held_out, version)
        await self._hub.report([report])

    def _tell(self, waiting_for: str) -> None:
        """Nobody waits in silence: what for, now and then."""
        if time.monotonic() - self._told_s >= _TELL_EVERY_S:
            self._told_s = time.monotonic()
            _LOG.info("waiting for %s", waiting_for)
