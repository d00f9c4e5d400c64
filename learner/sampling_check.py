"""The sampling check: what the workers really sampled at version 0, scored by the learner under the same weights.

Real rollouts of the first step, at the run's temperature, with decode path, cache and filters as they are: whatever the
engine reports other than the probability it sampled with, or samples from other than the learner's distribution, shows
here. Gate: step 0 does not begin before it passes; then its figures calibrate the first clip range.
"""

from collections.abc import Sequence

import numpy as np
import torch

from learner.attribution import ScoredRollout, measured_mismatch, zero_lag
from learner.calibration import clip_range, log_bounds, with_measurement
from learner.packing import pack
from learner.policy import Policy
from shared.config import Config
from shared.errors import RunFailed
from shared.mismatch import pool, standard_error
from shared.records import Calibration, ClipRange, Group, Mismatch, SamplingReport

# A constant error of the log-probabilities shows at 3 standard errors of their mean. Chance alone gives one start of
# a few hundred such a mean, so a run is refused at 5 and told about at 3.
SHOWS_AT, REFUSED_AT = 3.0, 5.0
# Float32 itself rounds: so much of a mean is no fault however many tokens there are, nats.
ROUNDING = 1e-5
# A limit above this many nats a token says that the two sides need not agree at all.
UNCHECKED = 1.0


@torch.no_grad()
def score_groups(policy: Policy, groups: Sequence[Group], config: Config) -> list[ScoredRollout]:
    """Every non-empty rollout with the policy's log-probabilities at the groups' temperature, in order."""
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts if rollout.num_tokens]
    scored: list[ScoredRollout | None] = [None] * len(pairs)
    sequences = [(group.prompt_ids, rollout.completion_ids) for group, rollout in pairs]
    for batch in pack(sequences, config.learner.micro_batch_tokens, share_prompts=policy.shares_prompts):
        temperature = pairs[0][0].temperature
        logprobs_T = policy.completion_logprobs(batch, temperature, config.learner.logprob_chunk_tokens).cpu()
        for index, part in zip(batch.indices_S, logprobs_T.split(batch.lengths_S.tolist()), strict=True):
            group, rollout = pairs[index]
            scored[index] = ScoredRollout(group.worker_id, rollout, 0.0, part.numpy())
    return [s for s in scored if s is not None]


def sampling_reports(policy: Policy, groups: Sequence[Group], config: Config, version: int) -> list[SamplingReport]:
    """One report for each worker that sampled the groups, under the policy's present weights, which are `version`'s.

    A worker with no rollout wholly of that version has none.
    """
    reports = []
    for worker_id in sorted({group.worker_id for group in groups}):
        scored = score_groups(policy, [group for group in groups if group.worker_id == worker_id], config)
        if (mismatch := measured_mismatch(scored, version)) is not None:
            reports.append(_report(worker_id, version, zero_lag(scored, version), mismatch, config))
    return reports


def calibrated(reports: Sequence[SamplingReport], calibration: Calibration, temperature: float) -> Calibration:
    """The calibration with the check's measurement. RunFailed when a worker's samples cannot be trusted."""
    if faults := [report.fault for report in reports if report.fault]:
        raise RunFailed("\n".join(faults))
    if not reports:
        return calibration
    return with_measurement(calibration, pool([report.mismatch for report in reports]), temperature)


def clip_fractions(clip: ClipRange, scored: Sequence[ScoredRollout]) -> tuple[float, float]:
    """Share of these sequences that would be clipped if their advantage were positive, and if it were negative."""
    log_ratio_S = np.array([s.log_ratio for s in scored])
    low_S, high_S = log_bounds(clip, [s.rollout.num_tokens for s in scored])
    return float((log_ratio_S > high_S).mean()), float((log_ratio_S < low_S).mean())


def _report(
    worker_id: str, version: int, scored: Sequence[ScoredRollout], mismatch: Mismatch, config: Config
) -> SamplingReport:
    parts = [s.logprobs_T - s.rollout.behavior_logprobs for s in scored if s.rollout.behavior_logprobs is not None]
    max_abs = float(np.abs(np.concatenate(parts)).max()) if parts else max(abs(s.log_ratio) for s in scored)
    known = with_measurement(Calibration(), mismatch, config.sampling.temperature)
    return SamplingReport(
        worker_id=worker_id,
        version=version,
        num_sequences=len(scored),
        mismatch=mismatch,
        max_abs=max_abs,
        smallest_shift=max(SHOWS_AT * standard_error(mismatch), ROUNDING),
        fixed_clip=clip_fractions(ClipRange(config.clip.low, config.clip.high), scored),
        calibrated_clip=clip_fractions(clip_range(config.clip, known), scored),
        fault=_fault(worker_id, version, mismatch, config),
    )


def _fault(worker_id: str, version: int, mismatch: Mismatch, config: Config) -> str:
    """Why the worker's numbers are not those of the learner's distribution; "" if they can be.

    Either the difference is larger than the precision explains, or its mean is not the -k3 that it must have on tokens
    which were drawn with the reported probabilities.
    """
    limit, bias = config.max_mismatch, mismatch.mean + mismatch.k3
    figures = f"mean {mismatch.mean:.2e}, spread {mismatch.spread:.2e} nats on {mismatch.num_tokens:.0f} tokens"
    allowed = max(REFUSED_AT * standard_error(mismatch), ROUNDING)
    if mismatch.rms > limit:
        what = f"the root mean square {mismatch.rms:.2e} is more than the {limit:.2e} that sync.max_mismatch allows"
    elif abs(bias) > allowed and limit <= UNCHECKED:
        what = f"the mean should be {-mismatch.k3:.2e} within {allowed:.1e}: tokens were drawn with other probabilities"
    else:
        return ""
    return (
        f"the sampling check refused {worker_id} at version {version}: {what} (learner minus engine: {figures}). "
        f"Look at temperature, filters, log-probability mode and cache of its engine; nothing was trained."
    )
