"""An engine output is trusted only when it is whole; nothing is filled in."""

import math
from typing import Any

import numpy as np
import pytest

from rollout.completions import build_completion, sampled_logprobs
from shared.errors import RolloutRejected

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
        ({"finish_reason": "abort"}, "'abort'"),
        ({"finish_reason": "error"}, "'error'"),
        ({"finish_reason": None}, "None"),
    ],
)
def test_what_cannot_be_trusted_is_rejected_with_the_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutRejected, match=message):
        build_completion(**GOOD | change)
