"""GSPO in float64 NumPy, term by term as the paper has it (arXiv 2507.18071). Shares nothing with the product.

Plain loops, ratios as ratios, minimum and clip as written: slow, overflowing where the equations do, easy to check.
"""

from collections.abc import Sequence

import numpy as np


def advantages(rewards: Sequence[float]) -> list[float]:
    """Equation 6, with the sample standard deviation."""
    values = np.array(rewards, dtype=np.float64)
    mean = values.sum() / len(values)
    std = np.sqrt(((values - mean) ** 2).sum() / (len(values) - 1))
    return [(r - mean) / std for r in values]


def ratio(token_logprobs: Sequence[float], behavior_loglik: float) -> float:
    """Equation 7: (pi_theta(y|x) / pi_old(y|x)) ^ (1 / |y|)."""
    loglik = np.float64(0.0)
    for logprob in token_logprobs:
        loglik += np.float64(logprob)
    return float(np.exp((loglik - behavior_loglik) / len(token_logprobs)))


def loss(
    sequences: Sequence[Sequence[float]],
    behavior_logliks: Sequence[float],
    advantages: Sequence[float],
    clip_low: float,
    clip_high: float,
) -> float:
    """Equation 5 with a minus sign: the mean over the sequences."""
    total = 0.0
    for token_logprobs, behavior, advantage in zip(sequences, behavior_logliks, advantages, strict=True):
        s = ratio(token_logprobs, behavior)
        clipped = min(max(s, 1.0 - clip_low), 1.0 + clip_high)
        total += min(s * advantage, clipped * advantage)
    return -total / len(sequences)


def gradient(
    sequences: Sequence[Sequence[float]],
    behavior_logliks: Sequence[float],
    advantages: Sequence[float],
    clip_low: float,
    clip_high: float,
) -> list[list[float]]:
    """d loss / d log pi(y_t) by equation 10: s A / |y| for each token of an unclipped sequence, 0 for a clipped one."""
    result = []
    for token_logprobs, behavior, advantage in zip(sequences, behavior_logliks, advantages, strict=True):
        s = ratio(token_logprobs, behavior)
        is_clipped = (advantage > 0 and s > 1 + clip_high) or (advantage < 0 and s < 1 - clip_low)
        slope = 0.0 if is_clipped else s * advantage
        result.append([-slope / len(token_logprobs) / len(sequences)] * len(token_logprobs))
    return result


def calibrated_range(
    clip_low: float, clip_high: float, bias: float, spread: float, z: float, length: int
) -> tuple[float, float]:
    """Widths below and above 1 of the range that allows for the noise of a mean of `length` tokens, as ratios."""
    noise = z * spread / np.sqrt(length)
    lower = (1.0 - clip_low) * np.exp(-bias - noise)
    upper = (1.0 + clip_high) * np.exp(-bias + noise)
    return float(1.0 - lower), float(upper - 1.0)
