"""How far engine and learner are apart at equal weights: the statistics, and when the two can be trusted. NumPy, pure.

d = log pi_learner - log pi_engine of a token that the engine sampled, in nats. Over such tokens E[exp(d)] = 1, so the
mean of d is -KL(engine || learner), and k3 = exp(d) - 1 - d is an unbiased estimate of that KL whose every value is
>= 0. Tokens that another policy drew have a mean of d near 0; their second moment and k3 still measure the noise.

Heavy tails are cut, not trusted: one token that is off by 20 nats would otherwise be most of a thousand's variance.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.records import Mismatch

# |d| above this quantile of the measurement counts as if it were there: 2 of 1,000 tokens.
TRUSTED_QUANTILE = 0.998
# What is further apart says nothing but "wrong", and exp of a few more is no number.
MAX_NATS = 100.0
# Fewer tokens do not tell a spread: from 256 its standard error is some 10 % with tails like those of bfloat16.
MIN_TOKENS = 256


def measure(differences_T: npt.ArrayLike) -> Mismatch:
    """The mismatch of tokens, d in nats. ValueError without any, or when one is not finite."""
    d_T = np.asarray(differences_T, dtype=np.float64)
    if not len(d_T) or not np.isfinite(d_T).all():
        raise ValueError(f"{len(d_T)} differences, all finite: {bool(np.isfinite(d_T).all())}; give at least one token")
    limit = min(MAX_NATS, np.quantile(np.abs(d_T), TRUSTED_QUANTILE, method="lower"))
    d_T = d_T.clip(-limit, limit)
    return Mismatch(len(d_T), float(d_T.mean()), float(d_T.var()), float((np.expm1(d_T) - d_T).mean()))


def measure_sequences(differences_S: npt.ArrayLike, lengths_S: npt.ArrayLike) -> Mismatch:
    """The same from sums of d over sequences of `lengths_S` tokens, where single tokens are not known.

    The errors of tokens are taken as independent: a sum over T tokens has T times the variance of one. k3 is half the
    second moment, to second order in d. ValueError with fewer than two sequences.
    """
    sums_S, lengths = np.asarray(differences_S, dtype=np.float64), np.asarray(lengths_S, dtype=np.float64)
    if len(sums_S) < 2:
        raise ValueError(f"{len(sums_S)} sequences do not tell a spread; give at least 2")
    mean = float(sums_S.sum() / lengths.sum())
    scaled_S = np.abs(sums_S - mean * lengths) / np.sqrt(lengths)
    limit = np.quantile(scaled_S, TRUSTED_QUANTILE, method="lower")
    variance = float((scaled_S.clip(max=limit) ** 2).sum() / (len(sums_S) - 1))
    # A spread from S values is known as well as one from S tokens.
    return Mismatch(len(sums_S), mean, variance, (variance + mean**2) / 2)


def pool(parts: Sequence[Mismatch]) -> Mismatch:
    """One mismatch of several, weighted by their tokens. ValueError without any token."""
    num_tokens = sum(p.num_tokens for p in parts)
    if num_tokens <= 0:
        raise ValueError("nothing to pool: give at least one measurement with tokens")
    mean = sum(p.num_tokens * p.mean for p in parts) / num_tokens
    second = sum(p.num_tokens * (p.variance + p.mean**2) for p in parts) / num_tokens
    k3 = sum(p.num_tokens * p.k3 for p in parts) / num_tokens
    return Mismatch(num_tokens, mean, max(0.0, second - mean**2), k3)


def scaled(mismatch: Mismatch, factor: float) -> Mismatch:
    """The mismatch of a version whose k3 is `factor` times as large: to second order, so is the variance."""
    return Mismatch(mismatch.num_tokens, mismatch.mean * factor, mismatch.variance * factor, mismatch.k3 * factor)


def weighted(mismatch: Mismatch, factor: float) -> Mismatch:
    """The same measurement with another weight."""
    return Mismatch(mismatch.num_tokens * factor, mismatch.mean, mismatch.variance, mismatch.k3)


def standard_error(mismatch: Mismatch) -> float:
    """Of the mean of d, nats."""
    return mismatch.spread / math.sqrt(mismatch.num_tokens)
