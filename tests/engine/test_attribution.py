"""The parts of a log-ratio against what the retained old weights really give, on a bfloat16 engine."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learner.attribution import ScoredRollout, attribute, measured_mismatch
from learner.policy import Policy
from learner.sampling_check import score_groups
from shared.config import Config
from shared.records import Group, GroupId, Rollout, Segment

pytestmark = pytest.mark.engine

VERSION, TOKENS, NUM = 3, 16, 64


def groups_of(served: Any, first: int) -> list[Group]:
    """NUM rollouts of one group each, sampled under VERSION."""
    prompts = [[40 + (first + n) % 60, 60, 61 + n % 7, 70, 55] for n in range(NUM)]
    groups = []
    for number, (prompt, c) in enumerate(zip(prompts, served.sample(prompts, TOKENS), strict=True)):
        segments = (Segment(VERSION, 0, len(c.token_ids), float(c.logprobs.sum(dtype=np.float64))),)
        rollout = Rollout(c.token_ids, c.logprobs, segments, c.finish_reason, 1.0)
        groups.append(Group(GroupId(number), 0, "w", "p", np.array(prompt, np.int32), 1.0, (rollout,)))
    return groups


def test_mismatch_and_lag_are_estimated_within_their_stated_error(dense_bf16: Any) -> None:
    """Mismatch known from an earlier batch; this batch is one update behind. The old weights tell the truth.

    What the update did is told in float32: the learner's own rounding is part of the mismatch, not of the lag.
    """
    dense_bf16.load(None)
    config, exact = (config_of(dense_bf16, precision) for precision in ("bfloat16", "float32"))
    policy, exact_policy = Policy.load(config), Policy.load(exact)
    earlier, batch = groups_of(dense_bf16, 0), groups_of(dense_bf16, NUM)
    known = measured_mismatch(score_groups(policy, earlier, config), VERSION)
    assert known is not None
    under_old = score_groups(policy, batch, config)
    before_S = log_ratios(score_groups(exact_policy, batch, exact))
    for moved in (policy, exact_policy):
        move(moved, 3e-3)
    under_new = score_groups(policy, batch, config)
    mismatch_S, lag_S = log_ratios(under_old), log_ratios(score_groups(exact_policy, batch, exact)) - before_S
    parts = attribute(under_new, known)
    assert parts is not None
    lengths = np.array([s.rollout.num_tokens for s in under_new])
    error = 3 * known.spread * np.sqrt(np.mean(1 / lengths) / len(lengths))
    print(
        f"mean: mismatch {parts.mean_mismatch:.4f}, really {mismatch_S.mean():.4f}; lag {parts.mean_lag:.4f}, really "
        f"{lag_S.mean():.4f} (stated error {error:.4f}); variance: mismatch {parts.variance_mismatch:.2e}, really "
        f"{mismatch_S.var():.2e}; lag {parts.variance_lag:.2e}, really {lag_S.var():.2e}"
    )
    assert abs(lag_S.mean()) + lag_S.std() > 2 * error, "the move must be large enough to be told from nothing"
    assert abs(parts.mean_mismatch - mismatch_S.mean()) <= error
    assert abs(parts.mean_lag - lag_S.mean()) <= error
    allowed = 3 * np.sqrt(2 / len(lengths)) + 0.2
    assert abs(parts.variance_mismatch / mismatch_S.var() - 1) <= allowed
    assert abs(parts.variance_lag - lag_S.var()) <= allowed * mismatch_S.var()
    assert measured_mismatch(under_new, VERSION + 1) is None
    again = measured_mismatch([replace(s) for s in under_old], VERSION)
    assert again is not None
    assert again.spread == pytest.approx(known.spread, rel=0.3)


def config_of(served: Any, precision: str) -> Config:
    values = {"model": {"path": str(served.path), "precision": precision}, "sampling": {"max_tokens": TOKENS}}
    return Config.model_validate(values)


def log_ratios(scored: list[ScoredRollout]) -> np.ndarray:
    return np.array([s.log_ratio for s in scored])


@torch.no_grad()
def move(policy: Policy, scale: float) -> None:
    """A small move of all matrices, as an update makes it."""
    generator = torch.Generator().manual_seed(5)
    for parameter in policy.model.parameters():
        if parameter.ndim > 1:
            parameter.add_(scale * parameter.std() * torch.randn(parameter.shape, generator=generator))
