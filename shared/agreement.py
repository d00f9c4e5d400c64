"""What the checks of engine against learner found, in words for a person. Pure."""

from collections.abc import Sequence

from shared.config import Config
from shared.mismatch import pool
from shared.records import ProbeReport, SamplingReport

# Share of the samples of one advantage sign that noise alone takes out of the range, before any update: a range that
# loses more is narrower than the noise. A calibrated one with z = 1.96 loses some 3 %.
NOISE_FLOOR = 0.1


def summary(reports: Sequence[SamplingReport], config: Config) -> str:
    """What the sampling check found and what it means for the clip range, in one line; its faults, if it refused.

    ValueError without a report.
    """
    if faults := [report.fault for report in reports if report.fault]:
        return "\n".join(faults)
    mismatch = pool([report.mismatch for report in reports])
    fixed, calibrated_ = (_mean_pairs(reports, kind) for kind in ("fixed_clip", "calibrated_clip"))
    line = (
        f"engine and learner agree: {mismatch.rms:.1e} nats a token apart on {mismatch.num_tokens:.0f} tokens "
        f"(limit {config.max_mismatch:.2g}); before any update the clip range would cut "
    )
    fixed_text = f"{fixed[0]:.0%} of good and {fixed[1]:.0%} of bad samples"
    if any(abs(r.mismatch.mean + r.mismatch.k3) > r.smallest_shift for r in reports):
        line = "on the border of what chance explains (seqrelay doctor samples again): " + line
    if config.clip.calibration == "none":
        below_noise = max(fixed) > NOISE_FLOOR
        warning = ": the range is below the noise, set clip.calibration = measured or widen it"
        return line + fixed_text + (warning if below_noise else "")
    return line + f"{calibrated_[0]:.0%} of good and {calibrated_[1]:.0%} of bad samples, uncalibrated {fixed_text}"


def _mean_pairs(reports: Sequence[SamplingReport], name: str) -> tuple[float, float]:
    """Over all sequences of all reports."""
    num = sum(report.num_sequences for report in reports)
    first, second = (sum(getattr(r, name)[i] * r.num_sequences for r in reports) / num for i in (0, 1))
    return first, second


def refusal(probe: ProbeReport, config: Config) -> str:
    """A refused version, in one line."""
    return (
        f"{probe.worker_id} refused the weights it had loaded as version {probe.version}: {probe.mismatch.rms:.1e} "
        f"nats a token from the learner (limit {config.max_mismatch:.2g}); nothing sampled under them is used"
    )
