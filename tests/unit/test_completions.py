"""An engine output is trusted only when it is whole; nothing is filled in."""

import math
from typing import Any

import numpy as np
import pytest

from rollout.completions import NOTHING, build_completion, cut, joined, sampled_logprobs
from shared.errors import RolloutRejected
from shared.protocols import Completion

GOOD: dict[str, Any] = {
    "token_ids": [880, 3],
    "positions": [{512: -0.10, 880: -2.30}, {3: -0.5}],
    "spans": [("4", 0, 1), ("5", 1, 2)],
    "finish_reason": "stop",
}


def test_a_whole_output_becomes_a_completion() -> None:
    completion = build_completion(**GOOD)
    assert completion.token_ids.tolist() == [880, 3]
    assert completion.token_ids.dtype == np.int32
    assert completion.logprobs.dtype == np.float32
    assert completion.version_spans == ((4, 0, 1), (5, 1, 2))
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("position", [{512: -0.10, 880: -2.30}, {880: -2.30, 512: -0.10}])
def test_the_value_is_looked_up_by_the_sampled_id(position: dict[int, float]) -> None:
    assert sampled_logprobs([880], [position]).tolist() == [np.float32(-2.30)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": None}, "no log-probabilities"),
        ({"positions": [{880: -2.3}]}, "1 log-probabilities for 2 tokens"),
        ({"positions": [{880: -2.3}, {3: -0.5}, {4: -0.5}]}, "3 log-probabilities for 2 tokens"),
        ({"positions": [{880: -2.3}, None]}, "token 1"),
        ({"positions": [{880: -2.3}, {}]}, "token 1"),
        ({"positions": [{880: -2.3}, {3: None}]}, "token 1"),
        ({"positions": [{512: -0.1}, {3: -0.5}]}, "token 0"),
        ({"positions": [{880: math.nan}, {3: -0.5}]}, "log-probability nan for token 0"),
        ({"positions": [{880: -math.inf}, {3: -0.5}]}, "log-probability -inf for token 0"),
        ({"positions": [{880: 0.7}, {3: -0.5}]}, r"log-probability 0\.7 for token 0"),
        ({"spans": None}, "do not tile|end at 0"),
        ({"spans": [("4", 0, 1)]}, "end at 1"),
        ({"spans": [("default", 0, 2)]}, "'default' is not a policy version"),
        ({"spans": [("-1", 0, 2)]}, "'-1' is not a policy version"),
        ({"finish_reason": "error"}, "'error'"),
        ({"finish_reason": None}, "None"),
    ],
)
def test_what_cannot_be_trusted_is_rejected_with_the_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutRejected, match=message):
        build_completion(**GOOD | change)


def test_a_request_that_a_load_ended_is_checked_like_any_other() -> None:
    ended = build_completion(**GOOD | {"finish_reason": "abort"})
    assert (ended.finish_reason, ended.token_ids.tolist()) == ("abort", [880, 3])
    empty = build_completion(token_ids=[], positions=[], spans=[], finish_reason="abort")
    assert (empty.token_ids.tolist(), empty.logprobs.tolist(), empty.version_spans) == ([], [], ())
    with pytest.raises(RolloutRejected, match="1 log-probabilities for 2 tokens"):
        build_completion(**GOOD | {"finish_reason": "abort", "positions": [{880: -2.3}]})


@pytest.mark.parametrize(
    ("num_tokens", "spans", "finish_reason"),
    [
        (0, (), "abort"),
        (1, ((4, 0, 1),), "abort"),
        (2, ((4, 0, 1), (5, 1, 2)), "abort"),
        (3, ((4, 0, 1), (5, 1, 3)), "stop"),
    ],
)
def test_what_is_cut_off_is_gone_and_leaves_the_rest_unfinished(
    num_tokens: int, spans: Any, finish_reason: str
) -> None:
    ids, logprobs_T = np.int32([880, 3, 9]), np.float32([-2.3, -0.5, -0.1])
    kept = cut(Completion(ids, logprobs_T, ((4, 0, 1), (5, 1, 3)), "stop"), num_tokens)
    assert (kept.token_ids.tolist(), kept.logprobs.tolist()) == (
        ids[:num_tokens].tolist(),
        logprobs_T[:num_tokens].tolist(),
    )
    assert (kept.version_spans, kept.finish_reason) == (spans, finish_reason)


def test_a_continued_completion_is_one() -> None:
    head = Completion(np.int32([7, 8]), np.float32([-1, -2]), ((3, 0, 2),), "abort")
    tail = Completion(np.int32([9, 1, 2]), np.float32([-3, -4, -5]), ((3, 0, 1), (5, 1, 3)), "length")
    whole = joined(joined(NOTHING, head), tail)
    assert whole.token_ids.tolist() == [7, 8, 9, 1, 2]
    assert whole.logprobs.tolist() == [-1, -2, -3, -4, -5]
    assert (whole.token_ids.dtype, whole.logprobs.dtype) == (np.int32, np.float32)
    assert (whole.version_spans, whole.finish_reason) == (((3, 0, 3), (5, 3, 5)), "length")
