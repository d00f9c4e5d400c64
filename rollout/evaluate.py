"""Held-out prompts, sampled and scored exactly as in training, at one policy version."""

import asyncio
import logging
from collections.abc import Sequence

from rollout.dispatch import evaluation_request
from rollout.generate import GroupGenerator
from rollout.prompts import Prompt
from shared.config import Config
from shared.errors import RewardError, RolloutRejected
from shared.protocols import Engine
from shared.records import EvalReport

_LOG = logging.getLogger(__name__)


async def evaluate(
    config: Config, engine: Engine, generator: GroupGenerator, prompts: Sequence[Prompt], version: int
) -> EvalReport:
    """`evaluation.samples` completions of every held-out prompt; a sample passes with a reward of 1 or more.

    What cannot be sampled or scored within `rollout.group_timeout_s` is counted as unscored; it never stops a run.
    """

    async def rewards_of(index: int, prompt: Prompt) -> list[float | None]:
        requests = [
            evaluation_request(config, version, index, sample, prompt.token_ids)
            for sample in range(config.evaluation.samples)
        ]
        try:
            async with asyncio.timeout(config.rollout.group_timeout_s):
                completions = await asyncio.gather(*[engine.generate(request) for request in requests])
                return await generator.score(completions, prompt)
        except (RolloutRejected, RewardError, TimeoutError) as error:
            _LOG.warning("evaluation of %s at version %d: %s", prompt.problem.prompt_id, version, error)
            return [None] * len(requests)

    rewards = [r for rs in await asyncio.gather(*[rewards_of(i, p) for i, p in enumerate(prompts)]) for r in rs]
    return EvalReport(
        version=version,
        num_samples=len(rewards),
        num_passed=sum(r is not None and r >= 1.0 for r in rewards),
        num_unscored=sum(r is None for r in rewards),
    )
