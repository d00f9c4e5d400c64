"""Policy-gradient objectives as pure functions: tensors in, (loss, metrics) out. No model, config, device or log.

Every objective has the signature of `gspo`, takes the completion tokens of one micro-batch back to back without
padding, and divides by a denominator of the whole mini-batch, so the losses and the metrics of micro-batches add up to
those of the mini-batch however it was split.

Names: `T` all completion tokens of the micro-batch, `S` its sequences. With lengths_S = [2, 3], tokens 0-1 belong to
sequence 0 and tokens 2-4 to sequence 1.
"""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from learner.calibration import log_bounds
from shared.records import ClipRange

# Above this log-ratio exp is continued by its tangent: e^20 = 4.9e8 is far outside anything a run can recover from.
LOG_RATIO_CEILING = 20.0


@dataclass(frozen=True)
class ObjectiveMetrics:
    """Sums and counts over sequences; add them over micro-batches (or ranks) and divide last.

    `log_ratio` is log s of equation 7, nats a token. A sequence counts as clipped when the clipped branch of the
    minimum is active, that is when it gives no gradient.
    """

    num_positive: int = 0
    num_negative: int = 0
    num_zero: int = 0
    num_clipped_positive: int = 0
    num_clipped_negative: int = 0
    sum_log_ratio: float = 0.0
    sum_sq_log_ratio: float = 0.0
    max_abs_log_ratio: float = 0.0
    num_tokens: int = 0

    def __add__(self, other: "ObjectiveMetrics") -> "ObjectiveMetrics":
        totals = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        totals["max_abs_log_ratio"] = max(self.max_abs_log_ratio, other.max_abs_log_ratio)
        return ObjectiveMetrics(**totals)

    @property
    def num_sequences(self) -> int:
        return self.num_positive + self.num_negative + self.num_zero

    @property
    def clip_fraction(self) -> float | None:
        """Clipped sequences over sequences with A != 0; None without any."""
        num_signed = self.num_positive + self.num_negative
        return (self.num_clipped_positive + self.num_clipped_negative) / num_signed if num_signed else None

    @property
    def mean_log_ratio(self) -> float | None:
        """Mean of log s over all sequences; None without any."""
        return self.sum_log_ratio / self.num_sequences if self.num_sequences else None


def gspo(
    logprobs_T: Tensor,
    behavior_logprobs_T: Tensor | None,
    behavior_loglik_S: Tensor,
    lengths_S: Tensor,
    advantages_S: Tensor,
    *,
    clip: ClipRange,
    num_sequences: int,
) -> tuple[Tensor, ObjectiveMetrics]:
    """Group Sequence Policy Optimization, arXiv 2507.18071, equations 5 to 7.

        log s_i = (sum_t log pi_theta(y_it | x, y_i<t) - log pi_behavior(y_i | x)) / |y_i|
        loss    = - sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i) / num_sequences

    The minimum is one-sided for each sign of A, so it is taken on log s, before any exp. With the ends of the range of
    a sequence of T tokens (`learner.calibration.log_bounds`; log(1 - clip_low) and log(1 + clip_high) where engine and
    learner do not differ): A > 0: A exp(min(log s, upper)); A < 0: A exp(max(log s, lower)).

    For A < 0 the equation has no upper bound. It is kept as it is up to `LOG_RATIO_CEILING`; above, exp is continued
    by its tangent, so that such a sequence is still pushed down but can neither overflow nor, through inf - inf or
    0 * inf, spoil the gradient of the others.

    Args:
        logprobs_T: float32 [T], nats, of the policy being trained, after the sampling temperature; requires grad.
        behavior_logprobs_T: float32 [T], nats, of the policy that sampled the tokens, or None. For token-level
            objectives; the sequence ratio does not need it.
        behavior_loglik_S: float64 [S], nats, sequence log-likelihood of the policy that sampled them.
        lengths_S: int64 [S], completion tokens of each sequence, all > 0, summing to T.
        advantages_S: float64 [S], one per sequence.
        clip: the step's clip range.
        num_sequences: scored, non-empty sequences of the whole mini-batch, those with A = 0 included.

    Returns:
        The micro-batch's share of the loss (float64 scalar) and its metrics.

    Raises:
        ValueError: the shapes do not belong together, or a length is 0.
    """
    del behavior_logprobs_T
    _check_shapes(logprobs_T, behavior_loglik_S, lengths_S, advantages_S)
    loglik_S = sum_sequences(logprobs_T, lengths_S)
    log_ratio_S = (loglik_S - behavior_loglik_S.double()) / lengths_S
    advantages_S = advantages_S.double()
    low_S, high_S = (torch.from_numpy(b).to(log_ratio_S.device) for b in log_bounds(clip, lengths_S.cpu().numpy()))
    bounded_S = torch.where(advantages_S > 0, log_ratio_S.minimum(high_S), log_ratio_S.maximum(low_S))
    loss = -(advantages_S * _bounded_exp(bounded_S)).sum() / num_sequences
    return loss, _metrics(log_ratio_S.detach(), advantages_S, low_S, high_S, num_tokens=len(logprobs_T))


def sum_sequences(values_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Sums over each sequence's tokens in float64: [T] -> [S]. In bfloat16, 4096 values of -0.37 would give -128."""
    return torch.stack([part.sum() for part in values_T.double().split(lengths_S.tolist())])


def _bounded_exp(x: Tensor) -> Tensor:
    """exp(x) up to the ceiling, its tangent above: finite, with a finite gradient, for every finite x."""
    tangent = math.exp(LOG_RATIO_CEILING) * (1 + x - LOG_RATIO_CEILING)
    # The clamp matters: torch.where multiplies the branch it does not take by 0, and 0 * exp(800) is NaN.
    return torch.where(x > LOG_RATIO_CEILING, tangent, x.clamp(max=LOG_RATIO_CEILING).exp())


def _metrics(
    log_ratio_S: Tensor, advantages_S: Tensor, low_S: Tensor, high_S: Tensor, num_tokens: int
) -> ObjectiveMetrics:
    positive_S, negative_S = advantages_S > 0, advantages_S < 0
    return ObjectiveMetrics(
        num_positive=int(positive_S.sum()),
        num_negative=int(negative_S.sum()),
        num_zero=int((advantages_S == 0).sum()),
        num_clipped_positive=int((positive_S & (log_ratio_S > high_S)).sum()),
        num_clipped_negative=int((negative_S & (log_ratio_S < low_S)).sum()),
        sum_log_ratio=float(log_ratio_S.sum()),
        sum_sq_log_ratio=float(log_ratio_S.square().sum()),
        max_abs_log_ratio=float(log_ratio_S.abs().max()),
        num_tokens=num_tokens,
    )


def _check_shapes(logprobs_T: Tensor, behavior_loglik_S: Tensor, lengths_S: Tensor, advantages_S: Tensor) -> None:
    if not len(behavior_loglik_S) == len(lengths_S) == len(advantages_S) > 0:
        raise ValueError(
            f"behavior_loglik_S, lengths_S and advantages_S have {len(behavior_loglik_S)}, {len(lengths_S)} and "
            f"{len(advantages_S)} entries: give one of each per sequence, at least one"
        )
    if int(lengths_S.min()) < 1:
        raise ValueError("lengths_S has an empty sequence: exclude sequences without tokens before the objective")
    if int(lengths_S.sum()) != len(logprobs_T):
        raise ValueError(f"lengths_S sums to {int(lengths_S.sum())} but logprobs_T has {len(logprobs_T)} tokens")
