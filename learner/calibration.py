"""From what engine and learner differ by, and how far a step moves the policy, to the clip range of a step. Pure.

Gate: what is measured in step k counts from step k+1, and all of it stands in the step's plan. Derivation and choices:
docs/gspo.md.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shared.config import ClipConfig
from shared.mismatch import MIN_TOKENS, pool, scaled, weighted
from shared.records import Calibration, ClipRange, Mismatch, ProbeReport, StepPlan

Float64Array = npt.NDArray[np.float64]

# A pooled measurement loses a fifth of its weight with each new one: about five count. Probes are shorter: about ten.
KEEP, KEEP_PROBES = 0.8, 0.9
# Tokens of probes below which their k3 says nothing, and how far they may move the k3 of a measurement.
MIN_PROBE_TOKENS = 128
MAX_PROBE_FACTOR = 4.0
# One step changes the scale of the range by at most 2; a clipped share that is off by 0.5 does so.
MAX_SCALE_STEP = 2.0
# On either side, nats a token: wide enough to clip nothing, and 1 - low stays above 0 in float64.
MAX_LOG_WIDTH = 10.0
SCALE_GAIN = math.log(MAX_SCALE_STEP) / 0.5


def clip_range(config: ClipConfig, calibration: Calibration) -> ClipRange:
    """The range of a step: the configured one times the scale, and the mismatch unless calibration is "none"."""
    low, high = config.low, config.high
    if (scale := calibration.scale) != 1.0:  # in logs; a scale of 1 keeps the configured numbers to the last bit
        low = -math.expm1(max(-MAX_LOG_WIDTH, scale * math.log1p(-low)))
        high = math.expm1(min(MAX_LOG_WIDTH, scale * math.log1p(high)))
    mismatch = current_mismatch(calibration)
    if config.calibration == "none" or mismatch is None:
        return ClipRange(low, high)
    return ClipRange(low, high, bias=mismatch.k3, spread=mismatch.spread, z=config.z)


def log_bounds(clip: ClipRange, lengths_S: npt.ArrayLike) -> tuple[Float64Array, Float64Array]:
    """Lower and upper end of log s for sequences of these many tokens, nats a token: float64 [S] each.

    With bias = spread = 0 exactly log(1 - low) and log(1 + high) for every length. With 3e-4/4e-4, bias 0.002, spread
    0.06, z = 1.96 and 64 tokens: -0.002 - 0.0003 - 0.0147 and -0.002 + 0.0004 + 0.0147.
    """
    noise_S = clip.z * clip.spread / np.sqrt(np.asarray(lengths_S, dtype=np.float64))
    return math.log1p(-clip.low) - clip.bias - noise_S, math.log1p(clip.high) - clip.bias + noise_S


def current_mismatch(calibration: Calibration) -> Mismatch | None:
    """The pooled measurement, carried to the weights of now by the k3 of the probes since; None without one."""
    mismatch, reference_k3 = calibration.mismatch, calibration.reference_k3
    if mismatch is None or not reference_k3 or (probe := _trusted_probe(calibration)) is None:
        return mismatch
    return scaled(mismatch, min(MAX_PROBE_FACTOR, max(1 / MAX_PROBE_FACTOR, probe.k3 / reference_k3)))


def with_probes(calibration: Calibration, reports: Sequence[ProbeReport]) -> Calibration:
    """Pooled with the released probes of versions that are new here, over workers and versions, newer ones heavier."""
    released = [r for r in reports if r.released and r.version > calibration.probe_version]
    probe = calibration.probe
    for version in sorted({r.version for r in released}):
        before = [] if probe is None else [weighted(probe, KEEP_PROBES)]
        probe = pool([*before, *(r.mismatch for r in released if r.version == version)])
    newest = max((r.version for r in released), default=calibration.probe_version)
    return replace(calibration, probe=probe, probe_version=newest)


def with_measurement(calibration: Calibration, measured: Mismatch | None, temperature: float) -> Calibration:
    """A measurement on tokens sampled at `temperature`, pooled with those before. Too few tokens in all change nothing.

    Probes are scored at temperature 1. Where none can be trusted yet, theirs is taken to be temperature^2 times the
    measured k3: noise in the logits is divided by the temperature.
    """
    before = current_mismatch(calibration)
    if measured is None:
        return calibration
    pooled = measured if before is None else pool([weighted(before, KEEP), measured])
    if pooled.num_tokens < MIN_TOKENS:
        return calibration
    probe = _trusted_probe(calibration)
    return replace(calibration, mismatch=pooled, reference_k3=probe.k3 if probe else pooled.k3 * temperature**2)


def _trusted_probe(calibration: Calibration) -> Mismatch | None:
    probe = calibration.probe
    return probe if probe is not None and probe.num_tokens >= MIN_PROBE_TOKENS else None


def with_drift(calibration: Calibration, config: ClipConfig, clipped_share: float | None) -> Calibration:
    """The scale after a step that clipped this share of its sequences behind the first mini-batch (None: none there).

    Log-scale and share move together: 0.65 clipped at a target of 0.15 doubles the range, 0.20 widens it by 7 %.
    """
    if config.sizing == "off" or clipped_share is None:
        return calibration
    factor = math.exp(SCALE_GAIN * (clipped_share - config.target))
    factor = min(MAX_SCALE_STEP, max(1 / MAX_SCALE_STEP, factor))
    return replace(calibration, scale=min(config.max_scale, max(1 / config.max_scale, calibration.scale * factor)))


def after_step(
    plan: StepPlan, config: ClipConfig, measured: Mismatch | None, clipped_share: float | None, temperature: float
) -> Calibration:
    """The calibration that a step leaves: what it `measured`, and the clipped share behind its first mini-batch."""
    return with_drift(with_measurement(plan.calibration, measured, temperature), config, clipped_share)
