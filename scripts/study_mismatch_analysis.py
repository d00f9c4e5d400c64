"""What the mismatch study asks of per-token differences: figures, clipped shares, intervals. NumPy, pure.

d = log pi_learner - log pi_engine of a sampled token (nats), one array a sequence. A window of T consecutive tokens is
a valid sample of T tokens, for E[exp(sum of d)] = 1 holds after any prefix: its log s is the mean of d. Windows of one
length do not overlap, but those of one sequence depend on each other, so every interval is a bootstrap that draws whole
sequences.

A clip range is calibrated on one half of the sequences and applied to the other, both ways, also within each draw of
the bootstrap: nothing is judged by figures that were measured on itself, and the intervals hold the calibration's own
uncertainty.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from learner.calibration import log_bounds
from shared.mismatch import measure
from shared.records import ClipRange, Mismatch

Float64Array = npt.NDArray[np.float64]

LENGTHS = (9, 16, 32, 64, 128, 256, 512)
PAPER = ClipRange(low=3e-4, high=4e-4)  # arXiv 2507.18071, section 5.1
Z = 1.96
NUM_DRAWS = 1000
QUANTILES = (0.5, 0.9, 0.99)
# Bins by the probability with which the engine drew the token.
PROBABILITY_EDGES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TokenFigures:
    """Of all tokens of one mode. `measured` is what calibrates, its tails cut; `mean_error`: the standard error of the
    mean over sequences; `kurtosis` in excess of a Gaussian's.
    """

    num_sequences: int
    num_tokens: int
    mean_abs: float
    mean: float
    mean_error: float
    max_abs: float
    kurtosis: float
    measured: Mismatch


@dataclass(frozen=True)
class Clipped:
    """Shares of windows that one range clips: `good` if their advantage is positive, `bad` if it is negative.

    `log_ratio`: natural logarithm of good over bad, with half a window added to each count.
    """

    good: Interval
    bad: Interval
    log_ratio: Interval


@dataclass(frozen=True)
class LengthFigures:
    """Of the windows of `length` tokens. `independence`: sd of log s times sqrt(T) over the spread of tokens.

    `quantiles` of |log s| at QUANTILES, then the largest. `shifted_good`: share clipped of windows with A > 0 whose
    policy moved up by three half-widths of the calibrated range; `shifted_bad`: likewise down, with A < 0.
    """

    length: int
    num_windows: int
    num_sequences: int
    independence: float
    quantiles: tuple[float, ...]
    fixed: Clipped
    calibrated: Clipped
    half_width: float
    shifted_good: float
    shifted_bad: float


@dataclass(frozen=True)
class Bin:
    """Tokens that the engine drew with a probability in [low, high)."""

    low: float
    high: float
    num_tokens: int
    spread: float
    k3: float
    variance_share: float


def token_figures(differences: Sequence[Float64Array]) -> TokenFigures:
    """Figures of all tokens of these sequences."""
    d_T = np.concatenate(differences)
    mean = float(d_T.mean())
    excess_S = np.array([d.sum() - mean * len(d) for d in differences])
    centered_T = d_T - mean
    variance = float(centered_T.var())
    return TokenFigures(
        num_sequences=len(differences),
        num_tokens=len(d_T),
        mean_abs=float(np.abs(d_T).mean()),
        mean=mean,
        mean_error=float(np.sqrt((excess_S**2).sum()) / len(d_T)),
        max_abs=float(np.abs(d_T).max()),
        kurtosis=float((centered_T**4).mean() / variance**2 - 3.0) if variance else 0.0,
        measured=measure(d_T),
    )


def windows(differences: Sequence[Float64Array], length: int) -> tuple[Float64Array, npt.NDArray[np.int64]]:
    """log s of all whole windows, and the sequence each comes from: [W] and [W]."""
    counts = [len(d) // length for d in differences]
    parts = [d[: n * length].reshape(n, length).mean(axis=1) for d, n in zip(differences, counts, strict=True)]
    return np.concatenate(parts), np.repeat(np.arange(len(differences)), counts)


def calibrated(differences: Sequence[Float64Array], z: float = Z) -> ClipRange:
    """The paper's range with the mismatch of these sequences added."""
    measured = measure(np.concatenate(differences))
    return replace(PAPER, bias=measured.k3, spread=measured.spread, z=z)


def two_halves(num_sequences: int) -> npt.NDArray[np.int64]:
    """Half 0 or 1 for each sequence, at random: their order follows the prompts."""
    return np.random.default_rng(0).permutation(num_sequences) % 2


class CrossFit:
    """Ranges for every sequence from the half it is not in, once as it is and once for each draw of the bootstrap.

    `ranges[i]` holds the ranges for the sequences of half 0 and of half 1; `weights[i]` how often each sequence was
    drawn. Entry 0 is the data as it is.
    """

    def __init__(self, differences: Sequence[Float64Array], num_draws: int = NUM_DRAWS, seed: int = 0) -> None:
        if len(differences) < 4:
            raise ValueError(f"{len(differences)} sequences: at least 4 make two halves to draw from")
        self.halves = two_halves(len(differences))
        members = [np.flatnonzero(self.halves == half) for half in (0, 1)]
        rng = np.random.default_rng(seed)
        draws = [members] + [[rng.choice(m, len(m)) for m in members] for _ in range(num_draws)]
        self.weights = np.array([np.bincount(np.concatenate(d), minlength=len(differences)) for d in draws])
        self.ranges = [tuple(calibrated([differences[i] for i in draw[1 - half]]) for half in (0, 1)) for draw in draws]

    def bounds(self, draw: int, length: int) -> tuple[Float64Array, Float64Array]:
        """Lower and upper end of log s for each sequence [S]."""
        ends = [log_bounds(clip, [length]) for clip in self.ranges[draw]]
        low_2, high_2 = (np.concatenate(side) for side in zip(*ends, strict=True))
        return low_2[self.halves], high_2[self.halves]


Bounds = Callable[[int, int], tuple[Float64Array, Float64Array]]


def length_figures(differences: Sequence[Float64Array], length: int, fit: CrossFit) -> LengthFigures | None:
    """None when fewer than two sequences are that long."""
    log_s_W, owner_W = windows(differences, length)
    num_sequences = len(np.unique(owner_W))
    if num_sequences < 2:
        return None
    ends = log_bounds(PAPER, np.full(len(differences), length))
    low_S, high_S = fit.bounds(0, length)
    half_widths = [Z * clip.spread / math.sqrt(length) for clip in fit.ranges[0]]
    shift_W = 3 * np.array(half_widths)[fit.halves][owner_W]
    spread = measure(np.concatenate(differences)).spread
    abs_W = np.abs(log_s_W)
    return LengthFigures(
        length=length,
        num_windows=len(log_s_W),
        num_sequences=num_sequences,
        independence=float(log_s_W.std() * math.sqrt(length) / spread) if spread else 0.0,
        quantiles=(*np.quantile(abs_W, QUANTILES).tolist(), float(abs_W.max())),
        fixed=_clipped(log_s_W, owner_W, fit.weights, lambda draw, length: ends, length),
        calibrated=_clipped(log_s_W, owner_W, fit.weights, fit.bounds, length),
        half_width=float(np.mean(half_widths)),
        shifted_good=float((log_s_W + shift_W > high_S[owner_W]).mean()),
        shifted_bad=float((log_s_W - shift_W < low_S[owner_W]).mean()),
    )


def _clipped(
    log_s_W: Float64Array, owner_W: npt.NDArray[np.int64], weights: npt.NDArray[np.int64], bounds: Bounds, length: int
) -> Clipped:
    counts = np.empty((len(weights), 3))
    for draw, weights_S in enumerate(weights):
        low_S, high_S = bounds(draw, length)
        weights_W = weights_S[owner_W]
        good = weights_W[log_s_W > high_S[owner_W]].sum()
        counts[draw] = good, weights_W[log_s_W < low_S[owner_W]].sum(), weights_W.sum()
    good_D, bad_D, all_D = counts[:, 0], counts[:, 1], np.maximum(counts[:, 2], 1)
    num_sequences = len(np.unique(owner_W))
    log_ratio_D = np.log(good_D + 0.5) - np.log(bad_D + 0.5)
    return Clipped(_share(good_D / all_D, num_sequences), _share(bad_D / all_D, num_sequences), _interval(log_ratio_D))


def _interval(values_D: Float64Array) -> Interval:
    low, high = np.quantile(values_D[1:], (0.025, 0.975))
    return Interval(float(values_D[0]), float(low), float(high))


def _share(values_D: Float64Array, num_sequences: int) -> Interval:
    """Where no window at all is clipped, or every one, drawing shows nothing: then the exact bound for so many
    independent sequences.
    """
    interval, beyond = _interval(values_D), 1.0 - 0.025 ** (1.0 / num_sequences)
    if interval.value == 0.0:
        return replace(interval, high=max(interval.high, beyond))
    if interval.value == 1.0:
        return replace(interval, low=min(interval.low, 1.0 - beyond))
    return interval


def by_probability(differences: Sequence[Float64Array], engine_logprobs: Sequence[npt.ArrayLike]) -> list[Bin]:
    """The spread of tokens by the probability they were drawn with; bins without two tokens are left out."""
    d_T = np.concatenate(differences)
    p_T = np.exp(np.concatenate([np.asarray(values, dtype=np.float64) for values in engine_logprobs]))
    place_T = np.clip(np.searchsorted(PROBABILITY_EDGES, p_T, side="right") - 1, 0, len(PROBABILITY_EDGES) - 2)
    total = float((d_T**2).sum()) or 1.0
    bins = []
    for place, (low, high) in enumerate(itertools.pairwise(PROBABILITY_EDGES)):
        inside = d_T[place_T == place]
        if len(inside) > 1:
            measured, share = measure(inside), float((inside**2).sum()) / total
            bins.append(Bin(low, high, len(inside), measured.spread, measured.k3, share))
    return bins


@dataclass(frozen=True)
class Verdict:
    """One line of the acceptance. `outcome`: "pass", "FAIL", or "open" where too few windows tell."""

    what: str
    outcome: str
    figures: str


SHARE_RANGE = (0.01, 0.05)
MOST_UNEVEN = 2.5
SHIFT_SHARE = 0.95
SHORTEST = 16


def verdicts(figures: LengthFigures) -> list[Verdict]:
    """The acceptance at one length: shares of 1 to 5 %, signs alike, a planted shift seen."""
    clipped = figures.calibrated
    lines = []
    for name, share in (("A > 0", clipped.good), ("A < 0", clipped.bad)):
        meets = share.low <= SHARE_RANGE[1] and share.high >= SHARE_RANGE[0]
        text = f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"
        lines.append(Verdict(f"clipped share, {name}, meets 1-5 %", _outcome(meets), text))
    larger = max(clipped.good.value, clipped.bad.value)
    smaller = min(clipped.good.value, clipped.bad.value)
    limit = math.log(MOST_UNEVEN)
    uneven = larger > MOST_UNEVEN * smaller
    can_be_even = clipped.log_ratio.low <= limit and clipped.log_ratio.high >= -limit
    outcome = "open" if uneven and can_be_even else _outcome(not uneven)
    text = f"{clipped.good.value * figures.num_windows:.0f} and {clipped.bad.value * figures.num_windows:.0f} windows"
    lines.append(Verdict(f"neither sign more than {MOST_UNEVEN} times the other", outcome, text))
    for name, share_value in (("up, A > 0", figures.shifted_good), ("down, A < 0", figures.shifted_bad)):
        lines.append(
            Verdict(f"planted shift {name}, is clipped", _outcome(share_value >= SHIFT_SHARE), f"{share_value:.1%}")
        )
    return lines


def _outcome(passed: bool) -> str:
    return "pass" if passed else "FAIL"
