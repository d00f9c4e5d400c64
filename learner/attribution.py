"""What the log-ratios of a step are made of: engine mismatch, stale cache, policy lag. Pure NumPy.

Looks at a step's first mini-batch only, whose forward pass saw the step's starting weights: the step's own updates are
not in it. A token's d = log pi_learner,now - log pi_behavior then is the sum of up to three causes:

- mismatch: engine against learner at the weights that sampled it, bias -k3 and spread as measured (shared.mismatch);
- policy lag: the learner's own move from those weights to the weights of now;
- stale cache: what an attention cache of older weights changed (segments with `kv` "kept").

Mismatch is measured on tokens of the present version, or known from before; the other two are what is left: of the
tokens with a fresh cache it is lag, and what kept tokens have beyond that is the cache. Limits: docs/gspo.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.mismatch import measure, measure_sequences
from shared.records import Float32Array, Mismatch, Rollout


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout, who sampled it, its advantage, and the learner's log-probabilities: float32 [T], nats."""

    worker_id: str
    rollout: Rollout
    advantage: float
    logprobs_T: Float32Array

    @property
    def difference(self) -> float:
        """Sum over tokens of d, nats."""
        return float(self.logprobs_T.sum(dtype=np.float64)) - self.rollout.seq_loglik

    @property
    def log_ratio(self) -> float:
        """log s of GSPO's equation 7 (arXiv 2507.18071)."""
        return self.difference / self.rollout.num_tokens

    @property
    def is_fresh(self) -> bool:
        return all(segment.kv == "fresh" for segment in self.rollout.segments)


@dataclass(frozen=True)
class LogRatioParts:
    """Mean and variance of log s over sequences, and the part of each cause.

    `mean` = `mean_mismatch` + `mean_stale_cache` + `mean_lag`, likewise the variances. Single parts of a variance can
    come out below 0 where they are small: they are differences of estimates. Without a measured mismatch, or without
    kept tokens, that part is None and counts as 0.
    """

    mean: float
    mean_mismatch: float | None
    mean_stale_cache: float | None
    mean_lag: float
    variance: float
    variance_mismatch: float | None
    variance_stale_cache: float | None
    variance_lag: float


def zero_lag(scored: Sequence[ScoredRollout], version: int) -> list[ScoredRollout]:
    """Those whose every token was sampled under `version` with a cache of its own."""
    return [s for s in scored if s.is_fresh and {segment.policy_version for segment in s.rollout.segments} == {version}]


def measured_mismatch(scored: Sequence[ScoredRollout], version: int) -> Mismatch | None:
    """Engine against learner on the rollouts sampled under exactly the weights they were `scored` with; None of none.

    From tokens, or from whole sequences where the run sends only those.
    """
    fresh = zero_lag(scored, version)
    differences = [
        s.logprobs_T.astype(np.float64) - s.rollout.behavior_logprobs
        for s in fresh
        if s.rollout.behavior_logprobs is not None
    ]
    if differences:
        return measure(np.concatenate(differences))
    if len(fresh) < 2:
        return None
    return measure_sequences([s.difference for s in fresh], [s.rollout.num_tokens for s in fresh])


def measured_by_worker(scored: Sequence[ScoredRollout], version: int) -> dict[str, Mismatch]:
    """`measured_mismatch` of each worker that has such rollouts."""
    by_worker = {
        worker_id: measured_mismatch([s for s in scored if s.worker_id == worker_id], version)
        for worker_id in sorted({s.worker_id for s in scored})
    }
    return {worker_id: mismatch for worker_id, mismatch in by_worker.items() if mismatch is not None}


def attribute(scored: Sequence[ScoredRollout], mismatch: Mismatch | None) -> LogRatioParts | None:
    """The parts of the log-ratios, given the mismatch as it is estimated for these versions; None without a rollout.

    A sequence of T tokens has mismatch of mean -k3 and variance spread^2 / T: the errors of tokens are nearly
    independent.
    """
    if not scored:
        return None
    log_ratio_S = np.array([s.log_ratio for s in scored])
    mean, variance = float(log_ratio_S.mean()), float(log_ratio_S.var())
    mean_mismatch = variance_mismatch = None
    if mismatch is not None:
        inverse_lengths = float(np.mean([1.0 / s.rollout.num_tokens for s in scored]))
        mean_mismatch, variance_mismatch = -mismatch.k3, mismatch.variance * inverse_lengths
    mean_cache, variance_cache = _stale_cache(scored, log_ratio_S)
    return LogRatioParts(
        mean,
        mean_mismatch,
        mean_cache,
        mean - (mean_mismatch or 0.0) - (mean_cache or 0.0),
        variance,
        variance_mismatch,
        variance_cache,
        variance - (variance_mismatch or 0.0) - (variance_cache or 0.0),
    )


def _stale_cache(scored: Sequence[ScoredRollout], log_ratio_S: np.ndarray) -> tuple[float | None, float | None]:
    """What sequences with kept tokens have in mean and variance beyond fresh ones, spread over all sequences."""
    fresh = np.array([s.is_fresh for s in scored])
    if fresh.all() or not fresh.any():
        return None, None
    kept_S, fresh_S = log_ratio_S[~fresh], log_ratio_S[fresh]
    share = len(kept_S) / len(log_ratio_S)
    excess_mean = float(kept_S.mean() - fresh_S.mean())
    # The variance over all sequences holds that within each kind and that between their means.
    within = share * float(kept_S.var() - fresh_S.var())
    return share * excess_mean, within + share * (1 - share) * excess_mean**2
