"""From what an engine returned to a `Completion` that can be trusted, on plain data. Pure.

Whatever cannot be trusted is rejected with the reason and counted by the caller; nothing is ever filled in. The
log-probability of a token is looked up by the sampled token's id: a position maps ids to values, and with the map
{512: -0.10, 880: -2.30} and 880 sampled the value is -2.30 wherever it stands in the map.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from rollout.segments import check_spans
from shared.errors import RolloutRejected
from shared.protocols import Completion
from shared.records import Float32Array

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


def _finish(reason: str | None) -> Literal["stop", "length", "abort"]:
    match reason:
        case "stop" | "length" | "abort":
            return reason
    raise RolloutRejected(f"the engine ended the completion with {reason!r} instead of stop, length or abort.")


NOTHING = Completion(np.empty(0, np.int32), np.empty(0, np.float32), (), "abort")


def cut(completion: Completion, num_tokens: int) -> Completion:
    """Its first `num_tokens` tokens; fewer than there are make it an unfinished one."""
    if num_tokens == len(completion.token_ids):
        return completion
    spans = tuple((v, start, min(end, num_tokens)) for v, start, end in completion.version_spans if start < num_tokens)
    return Completion(completion.token_ids[:num_tokens], completion.logprobs[:num_tokens], spans, "abort")


def joined(head: Completion, tail: Completion) -> Completion:
    """The completion of which `tail` continues `head`: it ends as `tail` does.

    Spans of one version that meet are one span: (3, 0, 10) and (3, 0, 5) give (3, 0, 15).
    """
    num_tokens, spans = len(head.token_ids), list(head.version_spans)
    for version, start, end in tail.version_spans:
        first = spans.pop()[1] if spans and spans[-1][0] == version else start + num_tokens
        spans.append((version, first, end + num_tokens))
    ids, logprobs = (head.token_ids, tail.token_ids), (head.logprobs, tail.logprobs)
    return Completion(np.concatenate(ids), np.concatenate(logprobs), tuple(spans), tail.finish_reason)
