"""From one ticket to one finished group: sample, check, decode, score.

A completion whose log-probabilities cannot be trusted is sampled again with a new seed, never repaired; after
`rollout.max_attempts` the group is given up with its reason. So is a group that takes longer than
`rollout.group_timeout_s`: its requests are canceled, which ends them in the engine, and its reward function, which
cannot be ended, is left behind in a thread of its own that nobody waits for.

Gate: every token of a group was sampled under weights that were released (rollout.verify). Where they were refused, a
completion is cut before its first token under them; another request, with a new seed, continues what is left of it
within the same token budget.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import numpy as np

from rollout.completions import NOTHING, cut, joined
from rollout.dispatch import rollout_request, token_budget
from rollout.prompts import Prompt
from rollout.rewards import RewardFunction, Sample, score
from rollout.segments import build_segments
from rollout.verify import Verdicts
from shared.config import Config
from shared.errors import GroupTimeout, RolloutRejected
from shared.protocols import Completion, Engine
from shared.records import Group, Rollout, Ticket
from shared.spans import Recorder

# A completion, and how many were rejected before it.
Sampled = tuple[Completion, int]
T = TypeVar("T")


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class GroupGenerator:
    """Generates groups on one engine, on whose loads there are `verdicts`."""

    def __init__(
        self, config: Config, engine: Engine, decoder: Decoder, reward: RewardFunction, recorder: Recorder
    ) -> None:
        self._config = config
        self._engine = engine
        self._decoder = decoder
        self._reward = reward
        self._recorder = recorder
        self.verdicts = Verdicts()

    async def generate(self, ticket: Ticket, prompt: Prompt, active_version: int) -> Group:
        """Sample and score the group of `ticket`.

        RolloutRejected when one member stays untrustworthy; RewardError when the reward function misbehaves;
        GroupTimeout when both together take longer than `rollout.group_timeout_s`.
        """
        finished: list[int] = []
        try:
            async with asyncio.timeout(self._config.rollout.group_timeout_s) as limit:
                return await self._generate(ticket, prompt, active_version, finished)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise GroupTimeout(self._timeout_text(ticket, len(finished))) from error

    async def _generate(self, ticket: Ticket, prompt: Prompt, active_version: int, finished: list[int]) -> Group:
        """The group; `finished` gets each member that has been sampled, while this runs."""

        async def sample(member: int) -> Sampled:
            sampled = await self._sample(ticket, member, prompt)
            finished.append(member)
            return sampled

        with self._recorder.span("generate", active_version, str(ticket.group)) as generated:
            sampled = await _all_or_first_error([sample(m) for m in range(self._config.sampling.group_size)])
        with self._recorder.span("reward", active_version, str(ticket.group)) as rewarded:
            rewards = await self.score([completion for completion, _ in sampled], prompt)
        return Group(
            group=ticket.group,
            attempt=ticket.attempt,
            worker_id=self._recorder.lane,
            prompt_id=prompt.problem.prompt_id,
            prompt_ids=np.asarray(prompt.token_ids, dtype=np.int32),
            temperature=self._config.sampling.temperature,
            rollouts=tuple(self._rollout(c, reward) for (c, _), reward in zip(sampled, rewards, strict=True)),
            num_rejected=sum(num_rejected for _, num_rejected in sampled),
            started_at_s=generated.start_s,
            generate_s=generated.duration_s,
            reward_s=rewarded.duration_s,
        )

    async def score(self, completions: Sequence[Completion], prompt: Prompt) -> list[float | None]:
        """Rewards in order. The function runs in a thread: a slow one must not hold up the engine's event loop."""
        samples = [
            Sample(self._decoder.decode(c.token_ids.tolist(), skip_special_tokens=True), c.finish_reason == "stop")
            for c in completions
        ]
        return await _in_own_thread(lambda: score(self._reward, samples, prompt.problem.answer))

    async def _sample(self, ticket: Ticket, member: int, prompt: Prompt) -> Sampled:
        kept, num_rejected, num_cuts = NOTHING, 0, 0
        budget = token_budget(self._config, len(prompt.token_ids))
        while kept.finish_reason == "abort" and len(kept.token_ids) < budget:
            try:
                completion = await self._request(ticket, member, num_rejected + num_cuts, prompt, kept)
            except RolloutRejected:
                num_rejected += 1
                if num_rejected >= self._config.rollout.max_attempts:
                    raise
                continue
            kept, num_cuts = joined(kept, completion), num_cuts + 1
        return kept, num_rejected

    async def _request(self, ticket: Ticket, member: int, count: int, prompt: Prompt, kept: Completion) -> Completion:
        """One request that continues `kept`, as far as it was sampled under released weights. RolloutRejected."""
        begun = await self.verdicts.begin()
        kept_ids = kept.token_ids.tolist()
        request = rollout_request(
            self._config, ticket, member, count, prompt.token_ids, begun.version, kept_ids=kept_ids
        )
        try:
            completion = await self._engine.generate(request)
        except RolloutRejected:
            if await self.verdicts.all_released(begun):
                raise
            return NOTHING  # wrong weights may give anything; that is no fault of this rollout
        return cut(completion, await self.verdicts.num_released(begun, completion.version_spans))

    def _timeout_text(self, ticket: Ticket, num_finished: int) -> str:
        limit_s, num_members = self._config.rollout.group_timeout_s, self._config.sampling.group_size
        text = f"group {ticket.group} took longer than rollout.group_timeout_s = {limit_s:g}: "
        if num_finished < num_members:
            return text + f"{num_finished} of {num_members} completions were finished. Raise it if they need longer."
        return text + (
            f"{num_members} of {num_members} completions were finished, their rewards were not. "
            f"Look at reward.function = {self._config.reward.function}."
        )

    def _rollout(self, completion: Completion, reward: float | None) -> Rollout:
        return Rollout(
            completion_ids=completion.token_ids,
            behavior_logprobs=completion.logprobs if self._config.rollout.payload == "token" else None,
            segments=build_segments(completion.version_spans, completion.logprobs),
            finish_reason="stop" if completion.finish_reason == "stop" else "length",
            reward=reward,
            reward_parts={} if reward is None else {self._config.reward.function: reward},
        )


async def _all_or_first_error(coroutines: Sequence[Coroutine[Any, Any, Sampled]]) -> list[Sampled]:
    """Results in order; on the first error the others are cancelled before it is raised."""
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _in_own_thread(function: Callable[[], T]) -> T:
    """Run a function that may never return: a pool would run out of threads, and the process wait for them to end."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return await asyncio.wrap_future(result)
