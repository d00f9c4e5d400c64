"""Statistics of engine against learner: what they estimate, and that a few wild tokens do not run them."""

import numpy as np
import pytest

from shared.mismatch import measure, measure_sequences, pool, scaled, standard_error, weighted
from shared.records import Mismatch

SIGMA = 0.06


def noise(num: int, seed: int = 0, sigma: float = SIGMA) -> np.ndarray:
    """d with E[exp(d)] = 1, as it is over tokens that the engine drew."""
    return np.random.default_rng(seed).normal(-(sigma**2) / 2, sigma, num)


def test_spread_bias_and_k3_of_known_noise() -> None:
    found = measure(noise(20_000))
    assert found.num_tokens == 20_000
    assert found.spread == pytest.approx(SIGMA, rel=0.02)
    assert found.k3 == pytest.approx(SIGMA**2 / 2, rel=0.05)
    assert abs(found.mean + found.k3) < 3 * standard_error(found)
    assert found.rms == pytest.approx(np.sqrt(found.variance + found.mean**2))


def test_k3_of_one_value_is_exact() -> None:
    assert measure([0.5] * 3).k3 == pytest.approx(np.exp(0.5) - 1.5)


@pytest.mark.parametrize("wild", [20.0, -20.0])
def test_two_wild_tokens_of_a_thousand_change_little(wild: float) -> None:
    clean = noise(1000)
    found = measure(np.concatenate([clean, [wild, wild]]))
    assert found.spread == pytest.approx(measure(clean).spread, rel=0.1)
    assert found.k3 == pytest.approx(measure(clean).k3, rel=0.2)


def test_nothing_or_what_is_not_finite_is_refused() -> None:
    for bad in ([], [0.1, float("nan")], [float("inf")]):
        with pytest.raises(ValueError, match="finite"):
            measure(bad)


def test_sequences_alone_tell_the_same_spread() -> None:
    lengths = np.random.default_rng(1).integers(4, 60, 4000)
    sums = [noise(int(n), seed).sum() for seed, n in enumerate(lengths)]
    found = measure_sequences(sums, lengths)
    assert found.spread == pytest.approx(SIGMA, rel=0.05)
    assert found.k3 == pytest.approx(SIGMA**2 / 2, rel=0.1)
    with pytest.raises(ValueError, match="at least 2"):
        measure_sequences([0.1], [3])


def test_a_pool_is_as_if_measured_together() -> None:
    first, second = noise(3000, 1), noise(1000, 2, 0.12)
    together, pooled = measure(np.concatenate([first, second])), pool([measure(first), measure(second)])
    assert pooled.num_tokens == 4000
    assert pooled.mean == pytest.approx(together.mean, abs=1e-4)
    assert pooled.variance == pytest.approx(together.variance, rel=0.03)
    with pytest.raises(ValueError, match="nothing to pool"):
        pool([weighted(measure(first), 0.0)])


def test_weights_and_scales() -> None:
    part = Mismatch(100, -0.001, 0.004, 0.002)
    assert weighted(part, 0.5).num_tokens == 50
    assert scaled(part, 2.0) == Mismatch(100, -0.002, 0.008, 0.004)


def test_differences_beyond_any_number_stay_finite() -> None:
    found = measure([5000.0, -5000.0] * 10)
    assert np.isfinite([found.mean, found.variance, found.k3]).all()
    assert found.rms == pytest.approx(100.0)
