"""From mismatch and drift to the clip range of a step: what counts, when, and how far."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.calibration import (
    KEEP,
    MAX_PROBE_FACTOR,
    MAX_SCALE_STEP,
    after_step,
    clip_range,
    current_mismatch,
    log_bounds,
    with_drift,
    with_measurement,
    with_probes,
)
from shared.config import ClipConfig
from shared.mismatch import MIN_TOKENS
from shared.plans import calibration_of, plan_of, plan_text
from shared.records import Calibration, ClipRange, GroupId, Mismatch, ProbeReport, StepPlan

CONFIG = ClipConfig()
SEEN = Mismatch(1000, -0.002, 0.0036, 0.002)


def probe(version: int, k3: float = 0.002, num_tokens: int = 200, released: bool = True) -> ProbeReport:
    return ProbeReport("w", version, Mismatch(num_tokens, 0.0, 2 * k3, k3), 0.1, 0.1, released)


def test_without_mismatch_it_is_the_fixed_range_to_the_last_bit() -> None:
    for calibration in (Calibration(), Calibration(mismatch=Mismatch(1000, 0.0, 0.0, 0.0))):
        low_S, high_S = log_bounds(clip_range(CONFIG, calibration), [1, 7, 512])
        assert np.broadcast_to(low_S, 3).tolist() == [math.log1p(-3e-4)] * 3
        assert np.broadcast_to(high_S, 3).tolist() == [math.log1p(4e-4)] * 3


def test_the_range_of_worked_numbers() -> None:
    """3e-4/4e-4, bias 0.002, spread 0.06, z 1.96, 64 tokens: the noise is 0.0147 on either side of -0.002."""
    low_S, high_S = log_bounds(clip_range(CONFIG, Calibration(mismatch=SEEN)), [64, 16])
    assert low_S[0] == pytest.approx(-0.002 - 0.0003 - 0.0147, abs=1e-6)
    assert high_S[0] == pytest.approx(-0.002 + 0.0004 + 0.0147, abs=1e-6)
    assert high_S[1] - high_S[0] == pytest.approx(0.0147, abs=1e-6)  # a quarter of the tokens, twice the noise


def test_calibration_none_leaves_the_configured_range() -> None:
    config = CONFIG.model_copy(update={"calibration": "none"})
    assert clip_range(config, Calibration(mismatch=SEEN)) == ClipRange(3e-4, 4e-4)


def test_the_scale_multiplies_the_range_in_logs() -> None:
    clip = clip_range(CONFIG, Calibration(scale=100.0))
    assert math.log1p(clip.high) == pytest.approx(100 * math.log1p(4e-4))
    assert math.log1p(-clip.low) == pytest.approx(100 * math.log1p(-3e-4))
    assert clip_range(CONFIG.model_copy(update={"low": 0.5}), Calibration(scale=1000.0)).low < 1.0


def test_too_few_tokens_leave_the_last_trusted_estimate() -> None:
    few = replace(SEEN, num_tokens=MIN_TOKENS - 1, variance=9.0)
    assert with_measurement(Calibration(), few, 1.0) == Calibration()
    assert with_measurement(Calibration(), None, 1.0) == Calibration()
    first = with_measurement(Calibration(), SEEN, 1.0)
    assert first.mismatch == SEEN
    later = with_measurement(first, replace(SEEN, num_tokens=10, variance=9.0), 1.0)
    assert later.mismatch is not None
    assert later.mismatch.num_tokens == 1000 * KEEP + 10  # pooled: ten tokens weigh as ten tokens
    assert later.mismatch.variance == pytest.approx((800 * SEEN.variance + 90) / 810, rel=1e-2)


def test_what_a_step_measures_counts_from_the_next_one() -> None:
    plan = StepPlan(3, (), 0, ClipRange(3e-4, 4e-4), Calibration())
    after = after_step(plan, CONFIG, SEEN, None, 1.0)
    assert plan.calibration.mismatch is None
    assert clip_range(CONFIG, after).spread == pytest.approx(0.06)


def test_probes_carry_the_measurement_to_later_weights() -> None:
    measured = with_measurement(Calibration(), SEEN, 1.0)
    same, halved = (with_probes(measured, [probe(1, k3)]) for k3 in (0.002, 0.001))
    assert current_mismatch(same) == SEEN
    assert current_mismatch(halved).variance == pytest.approx(SEEN.variance / 2)
    assert current_mismatch(halved).k3 == pytest.approx(SEEN.k3 / 2)
    assert clip_range(CONFIG, halved).spread == pytest.approx(0.06 / math.sqrt(2))


def test_a_probe_at_another_temperature_is_taken_as_noise_of_the_logits() -> None:
    measured = with_measurement(Calibration(), SEEN, 0.5)
    assert current_mismatch(with_probes(measured, [probe(1, SEEN.k3 / 4)])) == SEEN


def test_probes_that_say_little_or_too_much() -> None:
    measured = with_measurement(Calibration(), SEEN, 1.0)
    assert current_mismatch(with_probes(measured, [probe(1, 1.0, num_tokens=5)])) == SEEN
    wild = current_mismatch(with_probes(measured, [probe(1, 1.0)]))
    assert wild.variance == pytest.approx(MAX_PROBE_FACTOR * SEEN.variance)
    assert with_probes(measured, [probe(1, 1.0, released=False)]) == measured


def test_each_version_is_counted_once_over_all_workers() -> None:
    once = with_probes(Calibration(), [probe(1), probe(1), probe(2)])
    assert once.probe.num_tokens == pytest.approx(400 * 0.9 + 200)
    assert once.probe_version == 2
    assert with_probes(once, [probe(1), probe(2)]) == once


def test_a_new_measurement_takes_the_probes_of_its_time_as_reference() -> None:
    before = with_probes(with_measurement(Calibration(), SEEN, 1.0), [probe(1, 0.001)])
    after = with_measurement(before, replace(SEEN, num_tokens=4000), 1.0)
    assert after.reference_k3 == pytest.approx(0.001)
    assert current_mismatch(after) == after.mismatch


def test_drift_moves_the_scale_slowly_and_within_bounds() -> None:
    config = CONFIG.model_copy(update={"sizing": "drift", "max_scale": 8.0})
    scales, calibration = [], Calibration()
    for _ in range(6):
        calibration = with_drift(calibration, config, 0.8)
        scales.append(calibration.scale)
    assert scales[0] == MAX_SCALE_STEP
    assert scales[-1] == 8.0
    assert with_drift(Calibration(), config, 0.15).scale == 1.0
    assert 1.0 < with_drift(Calibration(), config, 0.2).scale < 1.1
    assert with_drift(Calibration(), config, 0.0).scale < 1.0
    assert with_drift(Calibration(), config, None).scale == 1.0
    assert with_drift(Calibration(scale=1 / 8.0), config, 0.0).scale == 1 / 8.0
    assert with_drift(Calibration(), CONFIG, 0.8).scale == 1.0  # off


@given(st.floats(1e-5, 0.5), st.floats(1e-5, 0.5), st.floats(0, 0.5), st.floats(0, 1), st.integers(1, 4096))
def test_calibration_never_narrows_the_range(low: float, high: float, bias: float, spread: float, length: int) -> None:
    clip = ClipRange(low, high, bias, spread, 1.96)
    (low_T,), (high_T,) = log_bounds(clip, [length])
    assert high_T - low_T >= math.log1p(high) - math.log1p(-low) - 1e-12
    assert low_T + bias <= math.log1p(-low) + 1e-12


def test_a_plan_survives_its_text() -> None:
    calibration = Calibration(SEEN, SEEN, 4, 0.0021, 1.7)
    plan = StepPlan(5, (GroupId(3), GroupId(4, 1)), 99, clip_range(CONFIG, calibration), calibration)
    assert plan_of(plan_text(plan)) == plan
    with pytest.raises(TypeError):
        calibration_of({"mismatch": None, "probe": None, "else": 1})
