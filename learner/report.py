"""From what a step did to the numbers that are logged. Pure; the formulas are in shared.metrics."""

from collections.abc import Sequence

import numpy as np

from learner.attribution import LogRatioParts, ScoredRollout, attribute, measured_mismatch
from learner.calibration import current_mismatch, log_bounds
from learner.objectives import ObjectiveMetrics
from learner.step import StepResult
from shared.metrics import StepMetrics, mean, ratio
from shared.records import ClipRange, Group, Span, StepPlan
from shared.spans import Timing, covered_s, union

LENGTHS = (8, 32, 128, 512)  # completion tokens; what is longer is the last class


def step_metrics(
    plan: StepPlan,
    groups: Sequence[Group],
    result: StepResult,
    *,
    unmet_experts: int | None,
    stepped: Timing,
    waited: Timing,
    trained: Timing,
    published: Timing,
) -> StepMetrics:
    """The record of the step that trained `groups` by `plan`, at policy version `plan.step`."""
    step, calibration = plan.step, plan.calibration
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [r.reward for r in rollouts if r.reward is not None]
    staleness = [step - r.oldest_version for r in rollouts if r.num_tokens]
    num_tokens = sum(r.num_tokens for r in rollouts)
    total = result.metrics
    mismatch, measured = current_mismatch(calibration), measured_mismatch(result.first, step)
    parts = attribute(result.first, mismatch)
    by_staleness = _by_staleness(result.first, step)
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
        clip_fraction_positive_by_minibatch=[
            ratio(m.metrics.num_clipped_positive, m.metrics.num_positive) for m in result.minibatches
        ],
        clip_fraction_negative_by_minibatch=[
            ratio(m.metrics.num_clipped_negative, m.metrics.num_negative) for m in result.minibatches
        ],
        clip_fraction_by_staleness=[_clip_fraction(scored, plan.clip) for scored in by_staleness],
        clip_low=plan.clip.low,
        clip_high=plan.clip.high,
        clip_scale=calibration.scale,
        clip_noise_mean=mean([plan.clip.z * plan.clip.spread / r.num_tokens**0.5 for r in rollouts if r.num_tokens]),
        mismatch_spread=mismatch.spread if mismatch else None,
        mismatch_k3=mismatch.k3 if mismatch else None,
        measured_tokens=measured.num_tokens if measured else None,
        measured_spread=measured.spread if measured else None,
        measured_k3=measured.k3 if measured else None,
        probe_k3=calibration.probe.k3 if calibration.probe else None,
        probe_unmet_experts=unmet_experts,
        log_ratio_mean=total.mean_log_ratio,
        log_ratio_rms_by_minibatch=[_log_ratio_rms(m.metrics) for m in result.minibatches],
        log_ratio_mean_by_staleness=[mean([s.log_ratio for s in scored]) for scored in by_staleness],
        log_ratio_rms_by_staleness=[_rms([s.log_ratio for s in scored]) for scored in by_staleness],
        log_ratio_abs_by_length=_abs_by_length(result.first),
        **_parts(parts),
        staleness_mean=mean(staleness),
        staleness_max=max(staleness, default=None),
        segments_mean=ratio(sum(len(r.segments) for r in rollouts), len(rollouts)),
        rollout_tokens_per_s=ratio(num_tokens, _generating_s(groups)),
        learner_tokens_per_s=ratio(result.num_tokens, trained.duration_s),
        wait_s=waited.duration_s,
        train_s=trained.duration_s,
        anchor_s=result.anchor_s,
        forward_s=result.forward_s,
        backward_s=result.backward_s,
        publish_s=published.duration_s,
        step_s=stepped.duration_s,
    )


def _by_staleness(scored: Sequence[ScoredRollout], step: int) -> list[list[ScoredRollout]]:
    """The rollouts that are 0, 1, ... versions behind; nothing behind the last that occurs."""
    lags = [step - s.rollout.oldest_version for s in scored]
    return [[s for s, lag in zip(scored, lags, strict=True) if lag == n] for n in range(max(lags, default=-1) + 1)]


def _clip_fraction(scored: Sequence[ScoredRollout], clip: ClipRange) -> float | None:
    signed = [s for s in scored if s.advantage != 0.0]
    if not signed:
        return None
    low_S, high_S = log_bounds(clip, [s.rollout.num_tokens for s in signed])
    log_ratio_S, positive_S = np.array([s.log_ratio for s in signed]), np.array([s.advantage > 0 for s in signed])
    return float(np.where(positive_S, log_ratio_S > high_S, log_ratio_S < low_S).mean())


def _parts(parts: LogRatioParts | None) -> dict[str, float | None]:
    """As StepMetrics names them."""
    names = (
        "mean_mismatch", "mean_stale_cache", "mean_lag",
        "variance", "variance_mismatch", "variance_stale_cache", "variance_lag",
    )  # fmt: skip
    return {f"log_ratio_{name}": getattr(parts, name) if parts else None for name in names}


def _abs_by_length(scored: Sequence[ScoredRollout]) -> list[float | None]:
    """Mean |log s| by number of tokens, in classes that end at LENGTHS."""
    classes = np.searchsorted(LENGTHS, [s.rollout.num_tokens for s in scored])
    return [
        mean([abs(s.log_ratio) for s, c in zip(scored, classes, strict=True) if c == n])
        for n in range(len(LENGTHS) + 1)
    ]


def _rms(values: Sequence[float]) -> float | None:
    return float(np.sqrt(np.mean(np.square(values)))) if values else None


def _log_ratio_rms(metrics: ObjectiveMetrics) -> float | None:
    mean_square = ratio(metrics.sum_sq_log_ratio, metrics.num_sequences)
    return None if mean_square is None else mean_square**0.5


def _generating_s(groups: Sequence[Group]) -> float:
    """Seconds in which at least one of the groups was being generated."""
    return covered_s(union(Span("", "", g.started_at_s, g.started_at_s + g.generate_s, 0) for g in groups))
