"""From what a step did to the numbers that are logged. Pure; the formulas are in shared.metrics."""

from collections.abc import Sequence

from learner.objectives import ObjectiveMetrics
from learner.step import StepResult
from shared.metrics import StepMetrics, mean, ratio
from shared.records import Group, Span
from shared.spans import Timing, covered_s, union


def step_metrics(
    step: int,
    groups: Sequence[Group],
    result: StepResult,
    *,
    stepped: Timing,
    waited: Timing,
    trained: Timing,
    published: Timing,
) -> StepMetrics:
    """The record of step `step`, which trained `groups` at policy version `step`."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [r.reward for r in rollouts if r.reward is not None]
    staleness = [step - r.oldest_version for r in rollouts if r.num_tokens]
    num_tokens = sum(r.num_tokens for r in rollouts)
    total = result.metrics
    return StepMetrics(
        step=step,
        reward_mean=mean(rewards),
        num_rollouts=len(rollouts),
        num_unscored=result.num_unscored,
        num_empty=result.num_empty,
        num_rejected=sum(group.num_rejected for group in groups),
        num_zero_advantage=result.num_zero_advantage,
        num_truncated=sum(r.finish_reason == "length" for r in rollouts),
        num_updates=result.num_updates,
        num_skipped_updates=result.num_non_finite,
        completion_tokens=result.num_tokens,
        completion_length_mean=ratio(num_tokens, len(rollouts)),
        loss=mean([m.loss for m in result.minibatches]),
        grad_norm=mean([m.grad_norm for m in result.minibatches if m.grad_norm is not None and m.outcome == "updated"]),
        lr=next((m.lr for m in reversed(result.minibatches) if m.lr is not None), None),
        clip_fraction_positive=ratio(total.num_clipped_positive, total.num_positive),
        clip_fraction_negative=ratio(total.num_clipped_negative, total.num_negative),
        clip_fraction_by_minibatch=[m.metrics.clip_fraction for m in result.minibatches],
        log_ratio_mean=total.mean_log_ratio,
        log_ratio_rms_by_minibatch=[_log_ratio_rms(m.metrics) for m in result.minibatches],
        staleness_mean=mean(staleness),
        staleness_max=max(staleness, default=None),
        segments_mean=ratio(sum(len(r.segments) for r in rollouts), len(rollouts)),
        rollout_tokens_per_s=ratio(num_tokens, _generating_s(groups)),
        learner_tokens_per_s=ratio(result.num_tokens, trained.duration_s),
        wait_s=waited.duration_s,
        train_s=trained.duration_s,
        forward_s=result.forward_s,
        backward_s=result.backward_s,
        publish_s=published.duration_s,
        step_s=stepped.duration_s,
    )


def _log_ratio_rms(metrics: ObjectiveMetrics) -> float | None:
    mean_square = ratio(metrics.sum_sq_log_ratio, metrics.num_sequences)
    return None if mean_square is None else mean_square**0.5


def _generating_s(groups: Sequence[Group]) -> float:
    """Seconds in which at least one of the groups was being generated."""
    return covered_s(union(Span("", "", g.started_at_s, g.started_at_s + g.generate_s, 0) for g in groups))
