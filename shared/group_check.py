"""What must hold of every group, whoever made it. Pure; called by the codec in both directions.

Invariants: segments tile [0, T) without gap or overlap; there is one log-probability per token or none at all; a
segment's log-likelihood is the sum of its tokens' log-probabilities; everything is finite. Example: 12 tokens in
segments [0, 2), [2, 4), [4, 12) are accepted, [0, 2), [3, 12) are not.
"""

import math
from collections.abc import Mapping
from typing import get_args

import numpy as np

from shared.errors import SchemaError
from shared.records import FinishReason, Group, KvState, Rollout, Segment

# A float32 log-probability of -20 is exact to 1e-6; a wrong, missing or shifted token is off by far more than this.
_TOLERANCE_PER_TOKEN = 1e-5


def check_group(group: Group) -> None:
    """SchemaError naming group, member, field and value unless the group follows the contract."""
    try:
        _check_fields(group)
        for member, rollout in enumerate(group.rollouts):
            _check_rollout(rollout, f"rollouts[{member}]")
    except SchemaError as error:
        raise SchemaError(f"group {group.group} of worker {group.worker_id!r}: {error}") from None


def _check_fields(group: Group) -> None:
    _require(len(group.rollouts) > 0, "rollouts", "none", "give the group up instead of sending it empty")
    counts = {
        "number": group.group.number,
        "replacement": group.group.replacement,
        "attempt": group.attempt,
        "num_rejected": group.num_rejected,
    }
    for name, count in counts.items():
        _require(count >= 0, name, count, "it counts from 0")
    for name in ("started_at_s", "generate_s", "reward_s"):
        seconds = getattr(group, name)
        _require(math.isfinite(seconds) and seconds >= 0, name, seconds, "seconds are finite and not negative")
    _require(
        math.isfinite(group.temperature) and group.temperature > 0, "temperature", group.temperature, "it is above 0"
    )
    _require(bool(group.worker_id), "worker_id", group.worker_id, "it names the worker")
    _require(bool(group.prompt_id), "prompt_id", group.prompt_id, "it names the prompt")
    _check_ids(group.prompt_ids, "prompt_ids")
    _require(len(group.prompt_ids) > 0, "prompt_ids", "none", "a prompt has at least one token")


def _check_rollout(rollout: Rollout, where: str) -> None:
    _check_ids(rollout.completion_ids, f"{where}.completion_ids")
    _check_segments(rollout, where)
    _check_logprobs(rollout, where)
    reasons = get_args(FinishReason)
    _require(rollout.finish_reason in reasons, f"{where}.finish_reason", rollout.finish_reason, f"one of {reasons}")
    rewards: Mapping[str, float | None] = {"reward": rollout.reward, **rollout.reward_parts}
    for name, value in rewards.items():
        _require(value is None or math.isfinite(value), f"{where}.{name}", value, "a reward is finite, or None")


def _check_ids(ids: np.ndarray, where: str) -> None:
    _require(ids.ndim == 1 and ids.dtype == np.int32, where, f"{ids.dtype}{list(ids.shape)}", "int32 [T] is expected")
    _require(not (ids < 0).any(), where, "a negative id", "token ids are 0 or more")


def _check_segments(rollout: Rollout, where: str) -> None:
    expected_start = 0
    for index, segment in enumerate(rollout.segments):
        name = f"{where}.segments[{index}]"
        _require(
            segment.start == expected_start < segment.end,
            name,
            f"[{segment.start}, {segment.end})",
            f"segments tile the completion, so this one starts at {expected_start} and is not empty",
        )
        _check_segment(segment, name)
        expected_start = segment.end
    num_tokens = rollout.num_tokens
    _require(
        expected_start == num_tokens, f"{where}.segments", f"up to {expected_start}", f"they end at {num_tokens} tokens"
    )


def _check_segment(segment: Segment, name: str) -> None:
    _require(segment.policy_version >= 0, f"{name}.policy_version", segment.policy_version, "versions count from 0")
    _require(math.isfinite(segment.loglik), f"{name}.loglik", segment.loglik, "reject the rollout instead")
    _require(segment.kv in get_args(KvState), f"{name}.kv", segment.kv, f"one of {get_args(KvState)}")


def _check_logprobs(rollout: Rollout, where: str) -> None:
    logprobs = rollout.behavior_logprobs
    if logprobs is None:
        return
    name = f"{where}.behavior_logprobs"
    kind = f"{logprobs.dtype}{list(logprobs.shape)}"
    _require(
        logprobs.dtype == np.float32 and logprobs.shape == (rollout.num_tokens,),
        name,
        kind,
        f"float32 [{rollout.num_tokens}] is expected, one per token",
    )
    _require(bool(np.isfinite(logprobs).all()), name, "NaN or infinite", "reject the rollout instead")
    for index, segment in enumerate(rollout.segments):
        total = float(logprobs[segment.start : segment.end].sum(dtype=np.float64))
        _require(
            abs(total - segment.loglik) <= _TOLERANCE_PER_TOKEN * segment.num_tokens,
            f"{where}.segments[{index}].loglik",
            segment.loglik,
            f"the segment's log-probabilities sum to {total}",
        )


def _require(holds: bool, field: str, value: object, remedy: str) -> None:
    if not holds:
        raise SchemaError(f"{field} = {value!s}: {remedy}")
