"""What an examination (shared.examination) means for the run. Pure: records in, findings out.

A *fault* is what would make the run silently wrong, or keeps it from running; a *warning* is what
a person should know before the run.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shared.agreement import NOISE_FLOOR, summary
from shared.config import Config
from shared.examination import Examination, Memory, Rewards
from shared.mismatch import MIN_TOKENS
from shared.records import ProbeReport, SamplingReport

Verdict = Literal["ok", "warning", "fault"]

MANY_TRUNCATED = 0.9
MANY_UNSCORED = 0.5
FAR_ABOVE = 4.0  # times the mode's own sync.max_mismatch, which is itself some four times what is measured
# Training holds a gradient and two Adam moments for each float32 weight; activations come on top.
LEARNER_BYTES, TRAINING_BYTES = 16, 12
STAGING_MARGIN_BYTES = 64 << 20
_TRACEBACK, _ERROR = "Traceback (most recent call last)", re.compile(r"[A-Za-z_][\w.]*: ")
UNEXPLAINED = "run"  # the finding that stands for a failure which no other fault explains


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` is "" where there is nothing to do."""

    name: str
    value: str
    verdict: Verdict = "ok"
    remedy: str = ""


def examined_config(config: Config, directory: str) -> Config:
    """The run that is examined in place of the user's: two steps in turn of one worker, in a folder of its own.

    The second step keeps the worker until it holds the weights that were sent after the first. Nothing is clipped; what
    a calibrated range would cut is told in any case.
    """
    changes = {
        "run": {"directory": directory},
        "rollout": {"workers": 1},
        "learner": {"steps": 2},
        "clip": {"calibration": "measured"},
        "sync": {"max_staleness": 0},
        "evaluation": {"samples": 0},
    }
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    )


def judge(config: Config, found: Examination | None, failure: str = "") -> list[Finding]:
    """Every line of the report. `failure`: what a service said that did not come to its end, "" if both did."""
    findings = list(_settings(config))
    if found is not None:
        findings = [_precision(config, found), *findings]
        findings += _sampling(config, found)
        findings += _loading(config, found)
        findings += _rewards(config, found.rewards) if found.rewards else ()
        findings += _memory(config, found.memory) if found.memory else ()
    if failure and not any(f.verdict == "fault" for f in findings):
        remedy = "a run would end like this; the whole text is below"
        findings.append(Finding(UNEXPLAINED, _cause(failure), "fault", remedy))
    return findings


def worst(findings: Sequence[Finding]) -> Verdict:
    verdicts = {finding.verdict for finding in findings}
    return "fault" if "fault" in verdicts else "warning" if "warning" in verdicts else "ok"


def conclusion(findings: Sequence[Finding], config: Config, found: Examination | None) -> str:
    """The report's last sentence."""
    num_faults, num_warnings = (sum(f.verdict == kind for f in findings) for kind in ("fault", "warning"))
    counts = f"{_count(num_faults, 'fault')}, {_count(num_warnings, 'warning')}"
    return counts if num_faults or not found or not found.sampled else f"{counts}; {summary(found.sampled, config)}"


def _settings(config: Config) -> Iterator[Finding]:
    """What the config alone gives away, only where there is something to say."""
    if config.learner.anchor == "recompute":
        yield Finding(
            "learner.anchor",
            "recompute: the first mini-batch has ratio 1 whatever the engine did",
            "warning",
            'for comparison only; learner.anchor = "engine" trains on the numbers that were sampled with',
        )
    if config.sync.probe_sequences == 0:
        yield Finding(
            "sync.probe_sequences",
            "0: no load of weights is verified",
            "warning",
            "set it to 1 or more (4 by default)",
        )
    usual = config.model.mode.max_mismatch
    if config.max_mismatch > FAR_ABOVE * usual:
        yield Finding(
            "sync.max_mismatch",
            f"{config.max_mismatch:g}, {config.max_mismatch / usual:.0f} times the usual limit: wrong weights may pass",
            "warning",
            f"leave it out, or set it near {usual:g}, the limit of model.precision = {config.model.precision}",
        )


def _precision(config: Config, found: Examination) -> Finding:
    mode = config.model.mode
    head = " but for a float32 head" if mode.float32_head else ""
    learner = f"{mode.autocast} products{head} on float32 weights" if mode.autocast else "float32"
    value = f"{config.model.precision}: engine {mode.engine}, learner {learner}, on {found.device}"
    if found.is_emulated:
        remedy = 'this CPU emulates the type: model.precision = "float32" trains faster here'
        return Finding("precision", value, "warning", remedy)
    return Finding("precision", value)


def _sampling(config: Config, found: Examination) -> Iterator[Finding]:
    """Engine against learner on sampled tokens, before and after a sync, and what of it the clip range would cut."""
    if found.rewards and not found.sampled:
        yield Finding(
            "sampling check",
            "nothing to compare: no completion with tokens",
            "fault",
            "look at the samples, at sampling.max_tokens and at the model's end-of-sequence id",
        )
    for report in found.sampled:
        yield _sampling_check("sampling check", report, config)
    for report in found.sampled:
        value = f"a constant error of {report.smallest_shift:.1e} nats a token would show"
        yield Finding("smallest shift", value)
        yield _clipping(report, config)
    for report in found.resampled:
        yield _sampling_check("sampling after a sync", report, config)


def _sampling_check(name: str, report: SamplingReport, config: Config) -> Finding:
    m = report.mismatch
    value = (
        f"rms {m.rms:.1e} nats a token (limit {config.max_mismatch:g}), mean {m.mean:+.1e}, spread {m.spread:.1e}, "
        f"k3 {m.k3:.1e}, largest {report.max_abs:.1e}; {m.num_tokens:g} "
        f"{'tokens' if config.rollout.payload == 'token' else 'sequences'}"
    )
    if report.fault:
        return Finding(name, value, "fault", report.fault)
    if abs(m.mean + m.k3) > report.smallest_shift:
        remedy = f"mean and -k3 should agree within {report.smallest_shift:.1e}: look again with another run.seed"
        return Finding(name, value, "warning", remedy)
    return Finding(name, value)


def _clipping(report: SamplingReport, config: Config) -> Finding:
    """Expected clip fractions before any update: the noise floor of the clip range."""
    clip = config.clip
    fixed = f"{clip.low:g}/{clip.high:g} {_signs(report.fixed_clip)}"
    calibrated = f"calibrated {_signs(report.calibrated_clip)}"
    if clip.calibration == "none":
        value = f"{fixed} ({calibrated}, which is off)" if report.mismatch.num_tokens >= MIN_TOKENS else fixed
        if max(report.fixed_clip) <= NOISE_FLOOR:
            return Finding("clipped by noise", value)
        remedy = 'the range lies below the noise: set clip.calibration = "measured", or model.precision = "float32"'
        return Finding("clipped by noise", value, "warning", remedy)
    value = f"{calibrated} (fixed {fixed})"
    if report.mismatch.num_tokens < MIN_TOKENS:
        remedy = "the range is not calibrated before that: raise learner.prompts_per_step or sampling.group_size"
        few = f"{report.mismatch.num_tokens:g} of step 0 are fewer than the {MIN_TOKENS} that tell a spread"
        return Finding("clipped by noise", f"{value}; {few}", "warning", remedy)
    if max(report.calibrated_clip) <= NOISE_FLOOR:
        return Finding("clipped by noise", value)
    return Finding("clipped by noise", value, "warning", "raise clip.z, or choose a model.precision with less noise")


def _loading(config: Config, found: Examination) -> Iterator[Finding]:
    for sync in found.syncs:
        parts = {part: getattr(sync, f"{part}_s") for part in ("fetch", "digest", "stage", "pause", "load", "resume")}
        listed = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
        yield Finding("weight sync", f"{sum(parts.values()):.2f} s for {size(sync.num_bytes)}: {listed}")
    for probe in found.probes:
        yield _load_check(probe, config)
    if config.sync.probe_sequences and not found.has_probe:
        remedy = "the load check needs a completion with tokens; look at the samples"
        yield Finding("load check", "no probe: no completion of step 0 has a token", "warning", remedy)
    if found.num_unmet_experts is not None:
        value = f"no token of the probe was routed to {found.num_unmet_experts} of {found.num_experts}"
        remedy = (
            "the load check says nothing about those: raise sync.probe_sequences" if found.num_unmet_experts else ""
        )
        yield Finding("experts", value, "warning" if remedy else "ok", remedy)


def _load_check(probe: ProbeReport, config: Config) -> Finding:
    value = (
        f"rms {probe.mismatch.rms:.1e} nats a token (limit {config.max_mismatch:g}), largest {probe.max_abs:.1e}; "
        f"{probe.mismatch.num_tokens:g} tokens, {probe.probe_s:.2f} s"
    )
    if probe.released:
        return Finding("load check", value)
    remedy = f"{probe.worker_id} refused the weights: after a sync its engine is not the learner; see model.precision"
    return Finding("load check", value, "fault", remedy)


def _rewards(config: Config, rewards: Rewards) -> Iterator[Finding]:
    num, scored = rewards.num_rollouts, rewards.num_rollouts - rewards.num_unscored
    name = config.reward.function
    unscored = f"; {rewards.num_unscored} could not be scored" if rewards.num_unscored else ""
    if rewards.mean is None:
        yield Finding("reward", f"none of {num} samples could be scored", "fault", f"correct {name}; see the samples")
    elif rewards.least == rewards.most == 0:
        remedy = f"nothing to learn from: correct {name}, or take an easier task or a better model; see the samples"
        yield Finding("reward", f"every one of {scored} scored samples has reward 0{unscored}", "fault", remedy)
    else:
        many = rewards.num_unscored > MANY_UNSCORED * num
        value = f"mean {rewards.mean:.3f} of {scored} samples, {rewards.least:g} to {rewards.most:g}{unscored}"
        yield Finding("reward", value, "warning" if many else "ok", f"look at what {name} cannot score" if many else "")
    equal = rewards.num_mixed == 0
    value = f"{rewards.num_mixed} of {rewards.num_groups} have unequal rewards; the others give no gradient"
    remedy = "step 0 would update nothing: raise sampling.group_size or sampling.temperature" if equal else ""
    yield Finding("groups", value, "warning" if equal else "ok", remedy)
    if rewards.num_replaced:
        value = f"{rewards.num_replaced} of {rewards.num_groups} took the place of one that was dropped"
        yield Finding("dropped groups", value, "warning", "`seqrelay train` logs the reason of each drop")
    many = rewards.num_truncated > MANY_TRUNCATED * num
    value = f"{rewards.num_truncated / num:.0%} of {num} samples hit sampling.max_tokens = {config.sampling.max_tokens}"
    yield Finding("truncated", value, "warning" if many else "ok", "raise sampling.max_tokens" if many else "")


def _memory(config: Config, memory: Memory) -> Iterator[Finding]:
    wanted, more = (memory.num_parameters * each for each in (LEARNER_BYTES, TRAINING_BYTES))
    value = (
        f"{size(memory.learner_bytes)} now; {size(wanted)} for weights, gradients and moments of "
        f"{memory.num_parameters / 1e6:.1f} M parameters, plus activations; {size(memory.learner_free_bytes)} free"
    )
    fits = more <= memory.learner_free_bytes
    remedy = f"another {size(more)} are needed: free memory, or lower rollout.max_num_seqs or rollout.workers"
    yield Finding("learner memory", value, "ok" if fits else "warning", "" if fits else remedy)
    yield Finding("engine memory", f"{_engine(config, memory)}; {size(memory.ram_free_bytes)} RAM free")
    yield _shared_memory(memory)


def _engine(config: Config, memory: Memory) -> str:
    rollout, total, model = config.rollout, memory.engine_total_bytes, size(memory.published_bytes)
    if rollout.memory_share is not None:
        share = f"{size(rollout.memory_share * total)} a worker (rollout.memory_share = {rollout.memory_share:g})"
        return f"{share}, of which the model {model}"
    if memory.engine_kv_bytes is None:
        return f"vLLM's own share of {size(total)}, of which the model {model}"
    room = f"{rollout.max_num_seqs} sequences of {rollout.max_model_len} tokens"
    return f"model {model}, KV cache {size(memory.engine_kv_bytes)} a worker ({room})"


def _shared_memory(memory: Memory) -> Finding:
    """Where weights pass through: Ray's object store and the engine's staged copy are both in /dev/shm."""
    value = (
        f"{size(memory.published_bytes)} a version: two at most in the object store ({size(memory.store_bytes)}), and "
        f"one staged while it loads; {size(memory.shared_memory_free_bytes)} of /dev/shm free"
    )
    if 2 * memory.published_bytes > memory.store_bytes:
        return Finding("published weights", value, "warning", "Ray will spill to disk: give /dev/shm more room")
    if 2 * memory.published_bytes + STAGING_MARGIN_BYTES > memory.shared_memory_free_bytes:
        return Finding("published weights", value, "warning", "weights will be staged on disk: give /dev/shm more room")
    return Finding("published weights", value)


def _cause(failure: str) -> str:
    """The line that names the error: behind a traceback the first that begins like one, else the first of all.

    One that ends in a colon goes with what it announces.
    """
    lines = failure.strip().splitlines()
    named = [line for line in lines if _ERROR.match(line)] if _TRACEBACK in failure else []
    first = (named or lines)[0]
    return f"{first} {lines[-1]}" if first.endswith(":") else first


def size(num_bytes: float) -> str:
    """For a person: "269 MB"."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _signs(fractions: tuple[float, float]) -> str:
    return f"{fractions[0]:.0%} of good and {fractions[1]:.0%} of bad samples"


def _count(num: int, what: str) -> str:
    return f"{num or 'no'} {what}{'' if num == 1 else 's'}"
