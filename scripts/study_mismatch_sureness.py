"""Whether the calibrated range is fair to sure and unsure completions: its half-width is the same for both. Pure.

A token that the engine drew with probability p has a spread of c min(1, 1.4 (1 - p)) rather than one that all share
(study_noise). A range that knows this has a half-width of z sqrt(mean of the tokens' variances) / sqrt(T) and half that
mean as its bias; c follows from the same measurement, variance = c^2 mean of the factors' squares. Windows are told
apart by the mean of those squares: the third with the smallest is the surest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from study_mismatch_analysis import PAPER, CrossFit, Float64Array, Z, windows
from study_noise import confidence_factor

Shares = tuple[float, float, float]
MIN_WINDOWS = 12


@dataclass(frozen=True)
class Sureness:
    """Shares of windows of `length` tokens clipped on either side, from the surest third to the least sure one.

    `uniform`: by the calibrated range as it is; `by_token`: by the one that knows each token's probability.
    """

    length: int
    num_windows: int
    uniform: Shares
    by_token: Shares


def by_sureness(
    differences: Sequence[Float64Array], engine_logprobs: Sequence[npt.NDArray[np.float32]], length: int, fit: CrossFit
) -> Sureness | None:
    """Both ranges are calibrated on the half of the sequences that a window is not in. None with too few windows."""
    factors = [confidence_factor(values) ** 2 for values in engine_logprobs]
    log_s_W, owner_W = windows(differences, length)
    if len(log_s_W) < MIN_WINDOWS:
        return None
    factor_W, _ = windows(factors, length)
    half_W = fit.halves[owner_W]
    variance_H = np.array([clip.spread**2 for clip in fit.ranges[0]])
    bias_H = np.array([clip.bias for clip in fit.ranges[0]])
    mean_factor_H = np.array([_mean_outside(factors, fit, half) for half in (0, 1)])
    variance_W = (variance_H / mean_factor_H)[half_W] * factor_W
    third_W = np.searchsorted(np.quantile(factor_W, (1 / 3, 2 / 3)), factor_W)

    def shares(center_W: Float64Array, spread_W: Float64Array) -> Shares:
        noise_W = Z * spread_W / math.sqrt(length)
        above = log_s_W > math.log1p(PAPER.high) - center_W + noise_W
        below = log_s_W < math.log1p(-PAPER.low) - center_W - noise_W
        first, second, third = (float((above | below)[third_W == i].mean()) for i in range(3))
        return first, second, third

    return Sureness(
        length,
        len(log_s_W),
        uniform=shares(bias_H[half_W], np.sqrt(variance_H)[half_W]),
        by_token=shares(variance_W / 2, np.sqrt(variance_W)),
    )


def _mean_outside(factors: Sequence[Float64Array], fit: CrossFit, half: int) -> float:
    return float(np.concatenate([f for f, own in zip(factors, fit.halves, strict=True) if own != half]).mean())
