"""Factories that several test folders use."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from shared.config import Config
from shared.config_file import parse_config
from shared.records import Group, Rollout, Segment, Ticket

pytest.register_assert_rewrite("engine_contract")  # show what differs when an assertion of the shared suite fails


def _make_rollout(seed: int, spans: Sequence[tuple[int, int]], with_logprobs: bool, reward: float | None) -> Rollout:
    """One completion; `spans` are (policy version, tokens) in order."""
    generator = np.random.default_rng(seed)
    num_tokens = sum(tokens for _, tokens in spans)
    logprobs = -generator.exponential(1.0, num_tokens).astype(np.float32)
    segments, start = [], 0
    for version, tokens in spans:
        loglik = float(logprobs[start : start + tokens].sum(dtype=np.float64))
        segments.append(Segment(version, start, start + tokens, loglik))
        start += tokens
    return Rollout(
        completion_ids=generator.integers(0, 49152, num_tokens).astype(np.int32),
        behavior_logprobs=logprobs if with_logprobs else None,
        segments=tuple(segments),
        finish_reason="stop",
        reward=reward,
        reward_parts={} if reward is None else {"correct": reward, "format": 1.0},
    )


def _make_group(
    ticket: Ticket,
    worker_id: str = "worker-0",
    *,
    spans: Sequence[tuple[int, int]] = ((0, 5),),
    num_rollouts: int = 2,
    num_prompt_tokens: int = 7,
    with_logprobs: bool = True,
    reward: float | None = 1.0,
    prompt_id: str = "3+4",
) -> Group:
    return Group(
        group=ticket.group,
        attempt=ticket.attempt,
        worker_id=worker_id,
        prompt_id=prompt_id,
        prompt_ids=np.arange(num_prompt_tokens, dtype=np.int32),
        temperature=1.0,
        rollouts=tuple(
            _make_rollout(1000 * ticket.group.number + member, spans, with_logprobs, reward)
            for member in range(num_rollouts)
        ),
        num_rejected=0,
        started_at_s=1.7e9,
        generate_s=1.5,
        reward_s=0.25,
    )


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    """A valid group for a ticket, different for every group number."""
    return _make_group


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Config]:
    """A small run, 3 steps of 2 groups with staleness 1; sections given as keyword arguments override its values."""

    def make(**sections: dict[str, Any]) -> Config:
        values: dict[str, dict[str, Any]] = {
            "model": {"path": "unused"},
            "learner": {"steps": 3, "prompts_per_step": 2, "minibatches": 1},
            "sync": {"max_staleness": 1},
            "evaluation": {"samples": 0},
        }
        for section, given in sections.items():
            values[section] = values.get(section, {}) | given
        return parse_config(values)

    return make
