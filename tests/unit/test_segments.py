"""Spans and segments: they tile the tokens, and their sums are exact."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.segments import Span, build_segments, check_spans
from shared.errors import RolloutRejected
from shared.records import Rollout


def test_two_versions_make_two_segments() -> None:
    logprobs_T = np.linspace(-3, -0.1, 128, dtype=np.float32)
    segments = build_segments([(7, 0, 57), (8, 57, 128)], logprobs_T)
    assert [(s.policy_version, s.num_tokens) for s in segments] == [(7, 57), (8, 71)]
    assert segments[0].loglik == pytest.approx(float(logprobs_T[:57].astype(np.float64).sum()), abs=1e-12)
    rollout = Rollout(np.arange(128, dtype=np.int32), logprobs_T, segments, "stop", 1.0)
    assert 9 - rollout.oldest_version == 2  # trained at version 9


def test_sums_are_float64() -> None:
    segments = build_segments([(0, 0, 4096)], np.full(4096, -0.37, dtype=np.float32))
    assert segments[0].loglik == pytest.approx(4096 * float(np.float32(-0.37)), abs=1e-9)
    assert segments[0].loglik == pytest.approx(-1515.5, abs=0.05)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_cut_has_the_same_sum_and_covers_every_token_once(lengths: list[int], random: object) -> None:
    ends = np.cumsum(lengths).tolist()
    spans = [(i, end - length, end) for i, (end, length) in enumerate(zip(ends, lengths, strict=True))]
    logprobs_T = -np.random.default_rng(len(lengths)).exponential(size=ends[-1]).astype(np.float32)
    segments = build_segments(spans, logprobs_T)
    whole = build_segments([(0, 0, ends[-1])], logprobs_T)
    assert sum(s.loglik for s in segments) == pytest.approx(whole[0].loglik, abs=1e-9)
    assert [t for s in segments for t in range(s.start, s.end)] == list(range(ends[-1]))


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(0, 0, 3)],
        [(0, 0, 5)],
        [(0, 1, 4)],
        [(0, 0, 2), (1, 3, 4)],
        [(0, 0, 3), (1, 2, 4)],
        [(0, 0, 2), (1, 2, 2), (2, 2, 4)],
        [(1, 0, 2), (0, 2, 4)],
        [(1, 0, 2), (1, 2, 4)],
        [(-1, 0, 4)],
    ],
)
def test_spans_that_do_not_tile_the_tokens_are_rejected(spans: list[Span]) -> None:
    with pytest.raises(RolloutRejected, match="span"):
        check_spans(spans, 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_rejected(bad: float) -> None:
    with pytest.raises(RolloutRejected, match="token 2"):
        build_segments([(0, 0, 4)], np.array([-1, -1, bad, -1], dtype=np.float32))
