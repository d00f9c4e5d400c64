"""Advantages against the paper's formula in plain float64."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from learner.advantages import group_advantages

sys.path.insert(0, str(Path(__file__).parent))
import reference


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16))
def test_equal_to_the_reference(rewards: list[float]) -> None:
    assume(max(rewards) - min(rewards) > 1e-3)
    advantages_G, scored_G = group_advantages(rewards)
    assert scored_G.all()
    np.testing.assert_allclose(advantages_G, reference.advantages(rewards), rtol=1e-7, atol=1e-9)


def test_one_of_eight_right() -> None:
    advantages_G, _ = group_advantages([1.0] + [0.0] * 7)
    assert advantages_G[0] == pytest.approx(2.475, abs=5e-4)
    np.testing.assert_allclose(advantages_G[1:], -0.35355, atol=1e-5)


@pytest.mark.parametrize("reward", [0.7, 0.1, 0.3, 0.35, 0.95, 0.0])
@pytest.mark.parametrize("size", [7, 8, 16])
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    advantages_G, _ = group_advantages([reward] * size)
    assert advantages_G.tolist() == [0.0] * size


@pytest.mark.parametrize("unscored", [None, math.nan])
def test_unscored_members_are_out_of_mean_and_deviation(unscored: float | None) -> None:
    advantages_G, scored_G = group_advantages([1.0, unscored, 0.0, 1.0])
    assert scored_G.tolist() == [True, False, True, True]
    expected = reference.advantages([1.0, 0.0, 1.0])  # mean 2/3 over three
    np.testing.assert_allclose(advantages_G, [expected[0], 0.0, expected[1], expected[2]], rtol=1e-12)


@pytest.mark.parametrize("rewards", [[None, None], [None, 1.0], [1.0], []])
def test_fewer_than_two_scored_members_give_zero(rewards: list[float | None]) -> None:
    advantages_G, scored_G = group_advantages(rewards)
    assert advantages_G.tolist() == [0.0] * len(rewards)
    assert scored_G.tolist() == [r is not None for r in rewards]


def test_rewards_too_small_to_square_still_compare() -> None:
    np.testing.assert_allclose(group_advantages([1e-200, 0.0])[0], [math.sqrt(0.5), -math.sqrt(0.5)], rtol=1e-12)


def test_infinite_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="infinite"):
        group_advantages([1.0, math.inf])
