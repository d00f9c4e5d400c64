"""From what an engine returned to a `Completion` that can be trusted, on plain data. Pure.

Whatever cannot be trusted is rejected with the reason and counted by the caller; nothing is ever filled in. The
log-probability of a token is looked up by the sampled token's id: a position maps ids to values, and with the map
{512: -0.10, 880: -2.30} and 880 sampled the value is -2.30 wherever it stands in the map.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rollout.segments import check_spans
from shared.errors import RolloutRejected
from shared.protocols import Completion
from shared.records import FinishReason, Float32Array

Position = Mapping[int, float | None]

# A float32 log-softmax can exceed 0 by a few rounding errors; more than this is not a log-probability.
MAX_LOGPROB = 1e-4


def build_completion(
    token_ids: Sequence[int],
    positions: Sequence[Position | None] | None,
    spans: Sequence[tuple[str, int, int]] | None,
    finish_reason: str | None,
) -> Completion:
    """Check one engine output: ids as sampled, one map from token id to log-probability (nats) per token, labeled
    spans (version, start, end) that tile the tokens, and how it ended. RolloutRejected with the reason.
    """
    logprobs_T = sampled_logprobs(token_ids, positions)
    version_spans = tuple((_version(label), start, end) for label, start, end in spans or ())
    check_spans(version_spans, len(token_ids))
    return Completion(np.asarray(token_ids, dtype=np.int32), logprobs_T, version_spans, _finish(finish_reason))


def sampled_logprobs(token_ids: Sequence[int], positions: Sequence[Position | None] | None) -> Float32Array:
    """float32 [T]: the log-probability (nats) of each sampled token. RolloutRejected when one cannot be trusted."""
    if positions is None:
        raise RolloutRejected(f"the engine returned no log-probabilities for {len(token_ids)} tokens.")
    if len(positions) != len(token_ids):
        raise RolloutRejected(f"the engine returned {len(positions)} log-probabilities for {len(token_ids)} tokens.")
    logprobs_T = np.empty(len(token_ids), dtype=np.float32)
    for index, (token_id, position) in enumerate(zip(token_ids, positions, strict=True)):
        value = None if position is None else position.get(token_id)
        if value is None:
            raise RolloutRejected(f"no log-probability for token {index} (id {token_id}).")
        if not math.isfinite(value) or value > MAX_LOGPROB:
            raise RolloutRejected(f"log-probability {value} for token {index} (id {token_id}).")
        logprobs_T[index] = value
    return logprobs_T


def _version(label: str) -> int:
    if not label.isdecimal():
        raise RolloutRejected(f"weight version {label!r} is not a policy version; the engine was loaded by others.")
    return int(label)


def _finish(reason: str | None) -> FinishReason:
    if reason == "stop":
        return "stop"
    if reason == "length":
        return "length"
    raise RolloutRejected(f"the engine ended the completion with {reason!r} instead of stop or length.")
