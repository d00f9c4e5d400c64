"""The record of one learner step: every number that is shown or logged, each with its formula.

Sums and counts are reduced, never means of means. A value that does not exist (no sequence of that sign, say) is None
and shown as "-", never as 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


def _metric(formula: str) -> Any:
    return field(metadata={"formula": formula})


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int = _metric("learner step k; the step trains at policy version k")
    reward_mean: float | None = _metric("sum of rewards / scored rollouts of the step's groups")
    num_rollouts: int = _metric("rollouts of the step's groups")
    num_unscored: int = _metric("rollouts without a reward; left out of mean, spread and loss")
    num_empty: int = _metric("rollouts without a token; left out of the loss")
    num_rejected: int = _metric("completions thrown away for missing, NaN or misaligned log-probabilities")
    num_zero_advantage: int = _metric("scored rollouts whose group has equal rewards; in the denominator, no gradient")
    num_truncated: int = _metric("rollouts that met the length limit")
    num_updates: int = _metric("optimizer updates made")
    num_skipped_updates: int = _metric("updates not made because the gradient norm was not finite")
    completion_tokens: int = _metric("completion tokens that went through the objective")
    completion_length_mean: float | None = _metric("completion tokens / rollouts")
    loss: float | None = _metric("mean over mini-batches of the GSPO loss (arXiv 2507.18071, eq. 5, negated)")
    grad_norm: float | None = _metric("mean over updates of the gradient norm before clipping")
    lr: float | None = _metric("learning rate of the step's last update")
    clip_fraction_positive: float | None = _metric("clipped sequences with A > 0 / sequences with A > 0")
    clip_fraction_negative: float | None = _metric("clipped sequences with A < 0 / sequences with A < 0")
    clip_fraction_by_minibatch: list[float | None] = _metric(
        "clipped sequences / sequences with A != 0, for each mini-batch in order: the first shows engine mismatch and "
        "staleness, the later ones the step's own updates too"
    )
    clip_fraction_positive_by_minibatch: list[float | None] = _metric("clip_fraction_positive of each mini-batch")
    clip_fraction_negative_by_minibatch: list[float | None] = _metric("clip_fraction_negative of each mini-batch")
    clip_fraction_by_staleness: list[float | None] = _metric(
        "clipped sequences / sequences with A != 0 of the first mini-batch, by versions their oldest segment is behind"
    )
    clip_low: float = _metric("width of the clip range below 1, sized to the run if clip.sizing says so")
    clip_high: float = _metric("width of the clip range above 1, likewise")
    clip_scale: float = _metric("factor on the configured range in logs; 1 with clip.sizing = off")
    clip_noise_mean: float | None = _metric(
        "mean over sequences of z spread / sqrt(T), nats a token: what calibration adds to the range on either side"
    )
    mismatch_spread: float | None = _metric(
        "standard deviation over tokens of log pi_learner - log pi_engine at equal weights, nats, as this step used it"
    )
    mismatch_k3: float | None = _metric("mean over tokens of exp(d) - 1 - d of the same d, nats, as this step used it")
    measured_tokens: float | None = _metric(
        "tokens of this step's first mini-batch that were sampled under the weights it trains: they are measured, and "
        "count from the next step"
    )
    measured_spread: float | None = _metric("their spread, nats")
    measured_k3: float | None = _metric("their k3, nats")
    probe_k3: float | None = _metric("k3 of the probes, pooled over workers and recent versions, nats")
    probe_unmet_experts: int | None = _metric(
        "experts over all layers that no token of the new version's probe was routed to: it does not check those"
    )
    log_ratio_mean: float | None = _metric("mean over sequences of log s (eq. 7), in nats per token")
    log_ratio_rms_by_minibatch: list[float | None] = _metric("root of the mean of (log s)^2, for each mini-batch")
    log_ratio_mean_by_staleness: list[float | None] = _metric("mean of log s in the first mini-batch, by staleness")
    log_ratio_rms_by_staleness: list[float | None] = _metric("root mean square of log s there, by staleness")
    log_ratio_abs_by_length: list[float | None] = _metric(
        "mean of |log s| in the first mini-batch over sequences of up to 8, 32, 128, 512 and more completion tokens"
    )
    log_ratio_mean_mismatch: float | None = _metric("part of the first mini-batch's mean log s: engine mismatch, -k3")
    log_ratio_mean_stale_cache: float | None = _metric("part of it that old attention caches explain; None without any")
    log_ratio_mean_lag: float | None = _metric("the rest: the learner's own move since the tokens were sampled")
    log_ratio_variance: float | None = _metric("variance of log s over the first mini-batch's sequences")
    log_ratio_variance_mismatch: float | None = _metric("part that is engine mismatch: spread^2 times the mean of 1/T")
    log_ratio_variance_stale_cache: float | None = _metric("part that old attention caches explain; None without any")
    log_ratio_variance_lag: float | None = _metric("the rest; a small one can come out below 0")
    staleness_mean: float | None = _metric("mean over rollouts of step - version of the oldest segment")
    staleness_max: int | None = _metric("largest staleness of the step")
    segments_mean: float | None = _metric("segments / rollouts")
    rollout_tokens_per_s: float | None = _metric("completion tokens / seconds covered by generating the step's groups")
    learner_tokens_per_s: float | None = _metric("completion tokens / train_s")
    wait_s: float = _metric("learner idle, waiting for the step's groups")
    train_s: float = _metric("learner computing: packing, forward, backward, optimizer")
    anchor_s: float = _metric("part of train_s: the second forward pass of learner.anchor = recompute")
    forward_s: float = _metric("part of train_s")
    backward_s: float = _metric("part of train_s")
    publish_s: float = _metric("learner copying weights out, digests and probe included")
    step_s: float = _metric("wall time of the step: wait_s + train_s + publish_s")


FORMULAS: Mapping[str, str] = {f.name: f.metadata["formula"] for f in fields(StepMetrics)}


def as_row(metrics: StepMetrics) -> dict[str, Any]:
    """The record as it is written to metrics.jsonl."""
    return asdict(metrics)


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator / denominator; None where there is nothing to divide by."""
    return numerator / denominator if denominator else None


def mean(values: Sequence[float]) -> float | None:
    """Mean; None of nothing."""
    return sum(values) / len(values) if values else None
