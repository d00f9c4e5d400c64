"""The analysis of the mismatch study on noise that is known, and the study's plan."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from study_mismatch import plan
from study_mismatch_analysis import (
    PAPER,
    Clipped,
    CrossFit,
    Interval,
    LengthFigures,
    by_probability,
    length_figures,
    token_figures,
    two_halves,
    verdicts,
    windows,
)
from study_mismatch_sureness import by_sureness
from study_noise import confidence_factor

SPREAD = 0.06


def gaussian(num: int = 80, length: int = 512, spread: float = SPREAD, shift: float = 0.0) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(shift - spread**2 / 2, spread, length) for _ in range(num)]


@pytest.fixture(scope="module")
def noise() -> tuple[list[np.ndarray], CrossFit]:
    differences = gaussian()
    return differences, CrossFit(differences, num_draws=100)


def test_windows_are_whole_do_not_overlap_and_know_their_sequence() -> None:
    log_s_W, owner_W = windows([np.arange(5.0), np.arange(1.0), np.arange(4.0)], 2)
    assert log_s_W.tolist() == [0.5, 2.5, 0.5, 2.5]
    assert owner_W.tolist() == [0, 0, 2, 2]


def test_figures_of_gaussian_tokens(noise: Any) -> None:
    figures = token_figures(noise[0])
    assert figures.num_tokens == 80 * 512
    assert figures.measured.spread == pytest.approx(SPREAD, rel=0.02)
    assert figures.measured.k3 == pytest.approx(SPREAD**2 / 2, rel=0.05)
    assert figures.mean_abs == pytest.approx(SPREAD * np.sqrt(2 / np.pi), rel=0.02)
    assert figures.mean_error == pytest.approx(SPREAD / np.sqrt(80 * 512), rel=0.25)
    assert abs(figures.mean + SPREAD**2 / 2) < 3 * figures.mean_error
    assert abs(figures.kurtosis) < 0.1


def test_the_error_of_the_mean_counts_sequences_not_tokens() -> None:
    rng = np.random.default_rng(0)
    shared = [np.full(100, rng.normal()) for _ in range(400)]  # all tokens of a sequence are the same
    assert token_figures(shared).mean_error == pytest.approx(1 / np.sqrt(400), rel=0.1)


@pytest.mark.parametrize("length", [9, 16, 64])
def test_a_calibrated_range_clips_two_and_a_half_percent_of_each_sign(noise: Any, length: int) -> None:
    figures = length_figures(noise[0], length, noise[1])
    assert figures is not None
    assert figures.independence == pytest.approx(1.0, abs=0.1)
    for share in (figures.calibrated.good, figures.calibrated.bad):
        assert share.low < 0.03
        assert share.high > 0.02
        assert 0.012 < share.value < 0.045
    assert figures.half_width == pytest.approx(1.96 * SPREAD / np.sqrt(length), rel=0.02)
    assert figures.fixed.good.value > 0.3
    assert figures.fixed.bad.value > figures.fixed.good.value  # the bias is downward
    assert [v.outcome for v in verdicts(figures)] == ["pass"] * 5


def test_a_shift_of_three_half_widths_is_clipped_on_its_side(noise: Any) -> None:
    figures = length_figures(noise[0], 64, noise[1])
    assert figures is not None
    assert figures.shifted_good > 0.99
    assert figures.shifted_bad > 0.99


def test_a_range_is_calibrated_on_the_other_half() -> None:
    quiet, loud = gaussian(40, spread=0.01), gaussian(40, spread=0.1)
    mixed = [(quiet, loud)[half][i] for i, half in enumerate(two_halves(40))]
    fit = CrossFit(mixed, num_draws=2)
    spreads = [clip.spread for clip in fit.ranges[0]]
    assert spreads[0] == pytest.approx(0.1, rel=0.05)  # for the quiet half, from the loud one
    assert spreads[1] == pytest.approx(0.01, rel=0.05)


def test_what_the_calibration_did_not_see_is_clipped() -> None:
    """A policy that moved after the calibration: the planted mean is in the windows, not in the range."""
    still, moved = gaussian(40), gaussian(40, shift=0.02)
    fit = CrossFit(still, num_draws=50)
    figures = length_figures(moved, 64, fit)
    assert figures is not None
    assert figures.calibrated.good.value > 0.7
    assert figures.calibrated.bad.value == 0.0


def test_intervals_are_wider_where_windows_of_a_sequence_move_together() -> None:
    rng = np.random.default_rng(0)
    independent = gaussian(60)
    together = [d + rng.normal(0, SPREAD / 4) for d in gaussian(60)]
    widths = []
    for differences in (independent, together):
        figures = length_figures(differences, 32, CrossFit(differences, num_draws=200))
        assert figures is not None
        widths.append(figures.fixed.good.high - figures.fixed.good.low)
    assert widths[1] > 2.5 * widths[0]


def test_where_nothing_is_clipped_the_interval_still_allows_some() -> None:
    differences = gaussian(40, 512, spread=1e-7)
    figures = length_figures(differences, 512, CrossFit(differences, num_draws=50))
    assert figures is not None
    assert figures.fixed.good.value == 0.0
    assert figures.fixed.good.high == pytest.approx(1 - 0.025 ** (1 / 40))


def test_a_length_that_sequences_do_not_reach_has_no_figures(noise: Any) -> None:
    assert length_figures(noise[0], 600, noise[1]) is None


def test_two_halves_need_sequences() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        CrossFit(gaussian(3))


def test_the_spread_by_probability() -> None:
    rng = np.random.default_rng(0)
    sure, unsure = np.full(400, np.log(0.999)), np.full(400, np.log(0.3))
    differences = [np.concatenate([rng.normal(0, 0.01, 400), rng.normal(0, 0.1, 400)])]
    bins = by_probability(differences, [np.concatenate([sure, unsure])])
    assert [(b.low, b.high, b.num_tokens) for b in bins] == [(0.1, 0.5, 400), (0.99, 1.0, 400)]
    assert bins[0].spread == pytest.approx(0.1, rel=0.1)
    assert bins[1].spread == pytest.approx(0.01, rel=0.1)
    assert bins[0].variance_share == pytest.approx(0.99, abs=0.01)


def test_a_range_by_token_is_fair_to_sure_and_unsure_sequences() -> None:
    """Half of the sequences are of sure tokens, with little noise; the noise follows the factor exactly."""
    rng = np.random.default_rng(0)
    probabilities = [rng.uniform(*((0.9, 0.99) if i % 2 else (0.05, 0.5)), 512) for i in range(120)]
    engine = [np.log(p).astype(np.float32) for p in probabilities]
    sigmas = [SPREAD * confidence_factor(values) for values in engine]
    differences = [rng.normal(-(sigma**2) / 2, sigma) for sigma in sigmas]
    found = by_sureness(differences, engine, 32, CrossFit(differences, num_draws=1))
    assert found is not None and found.num_windows == 120 * 16
    assert found.uniform[0] == 0.0
    assert found.uniform[2] > 0.12
    assert all(0.01 < share < 0.08 for share in found.by_token)  # the configured range itself adds to the small noise


def figures_with(good: Sequence[float], bad: Sequence[float], ratio: Sequence[float], shifted: float) -> LengthFigures:
    clipped = Clipped(Interval(*good), Interval(*bad), Interval(*ratio))
    return LengthFigures(64, 500, 60, 1.0, (0, 0, 0, 0), clipped, clipped, 0.01, shifted, 1.0)


def test_the_acceptance_fails_what_it_should() -> None:
    fine = figures_with((0.03, 0.02, 0.04), (0.02, 0.01, 0.03), (0.4, -0.1, 0.9), 1.0)
    assert [v.outcome for v in verdicts(fine)] == ["pass"] * 5
    too_many = figures_with((0.08, 0.06, 0.10), (0.06, 0.04, 0.08), (0.3, -0.1, 0.7), 0.90)
    assert [v.outcome for v in verdicts(too_many)] == ["FAIL", "pass", "pass", "FAIL", "pass"]
    uneven = figures_with((0.05, 0.04, 0.06), (0.01, 0.005, 0.015), (1.6, 1.1, 2.1), 1.0)
    assert verdicts(uneven)[2].outcome == "FAIL"
    few = replace(uneven, calibrated=replace(uneven.calibrated, log_ratio=Interval(1.6, -0.2, 3.0)))
    assert verdicts(few)[2].outcome == "open"


def test_the_papers_range() -> None:
    assert (PAPER.low, PAPER.high, PAPER.bias, PAPER.spread) == (3e-4, 4e-4, 0.0, 0.0)


def test_every_sample_is_scored_in_every_mode_of_its_engine() -> None:
    all_samples, all_scores = plan(short=False)
    by_precision = {(s.samples.precision, s.precision) for s in all_scores}
    assert {(e, m) for e, m in by_precision if m != "float32"} == {
        ("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "bfloat16-float32-head"),
    }  # fmt: skip
    assert len({s.arm for s in all_samples}) == len(all_samples)
    assert len({s.arm for s in all_scores}) == len(all_scores)
    assert {s.samples for s in all_scores} == set(all_samples)
    assert sum(s.num_sequences for s in all_samples if s.precision == "bfloat16") >= 128
