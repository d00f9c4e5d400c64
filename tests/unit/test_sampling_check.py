"""The sampling check on rollouts of a tiny real model, drawn as they should be, and with each fault that it can see."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_config, tiny_model

from learner.policy import Policy
from learner.sampling_check import calibrated, sampling_reports
from shared.agreement import summary
from shared.config import Config
from shared.errors import RunFailed
from shared.mismatch import MIN_TOKENS
from shared.records import Calibration, Group, GroupId, Rollout, Segment

SPREAD = 0.05


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    path = tmp_path_factory.mktemp("model")
    tiny_model(initializer_range=0.2).save_pretrained(path)
    return Policy.load(tiny_config(path))


def config_for(policy: Policy, max_mismatch: float | None = None, **sections: Any) -> Config:
    values = tiny_config(policy.source, precision="float32").model_dump()
    values["sync"]["max_mismatch"] = max_mismatch
    for section, given in sections.items():
        values[section] |= given
    return Config.model_validate(values)


@torch.no_grad()
def sampled(
    policy: Policy, *, drawn_at: float = 1.0, reported_at: float = 1.0, shift: float = 0.0, noise: float = 0.0,
    worker: str = "w0", seed: int = 0,
) -> list[Group]:  # fmt: skip
    """40 groups of 4 completions of 8 tokens; drawn at one temperature, log-probabilities of another, plus faults."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(40):
        prompt = torch.randint(0, 61, (1, 5), generator=generator)
        ids = prompt.repeat(4, 1)
        logprobs = []
        for _ in range(8):
            logits = policy.model(ids).logits[:, -1]
            token = torch.multinomial((logits / drawn_at).softmax(-1), 1, generator=generator)
            logprobs.append((logits / reported_at).log_softmax(-1).gather(1, token))
            ids = torch.cat([ids, token], 1)
        values = torch.cat(logprobs, 1).numpy() + shift + rng.normal(noise**2 / 2, noise, (4, 8))
        rollouts = tuple(
            Rollout(
                row[5:].numpy().astype(np.int32), value.astype(np.float32),
                (Segment(0, 0, 8, float(value.astype(np.float32).sum(dtype=np.float64))),), "stop", 1.0,
            )
            for row, value in zip(ids, values, strict=True)
        )  # fmt: skip
        groups.append(
            Group(GroupId(number), 0, worker, f"p{number}", prompt[0].numpy().astype(np.int32), reported_at, rollouts)
        )
    return groups


def the_fault(policy: Policy, groups: list[Group], config: Config) -> str:
    (report,) = sampling_reports(policy, groups, config, version=0)
    return report.fault


def test_right_samples_pass_and_say_how_much_would_show(policy: Policy) -> None:
    config = config_for(policy)
    (report,) = sampling_reports(policy, sampled(policy), config, version=0)
    assert report.fault == ""
    assert (report.worker_id, report.version, report.num_sequences) == ("w0", 0, 160)
    assert report.mismatch.rms < 1e-5
    assert report.smallest_shift == pytest.approx(1e-5)  # float32 rounds
    assert report.fixed_clip == report.calibrated_clip == (0.0, 0.0)
    assert "engine and learner agree" in summary([report], config)


@pytest.mark.parametrize(
    "wrong",
    [
        {"drawn_at": 0.6},  # temperature
        {"drawn_at": 0.6, "reported_at": 1.0, "seed": 2},
        {"shift": 1e-3},
        {"noise": 1e-3},
    ],
)
def test_in_float32_every_fault_shows(policy: Policy, wrong: dict[str, Any]) -> None:
    groups = sampled(policy, **wrong)
    if wrong.get("drawn_at"):  # the learner scores at the run's temperature, the engine drew and reported at 1.0
        groups = [replace(group, temperature=0.6) for group in groups]
    text = the_fault(policy, groups, config_for(policy))
    for part in ("w0", "version 0", "sampling check", "sync.max_mismatch allows", "nats on 1280 tokens"):
        assert part in text
    with pytest.raises(RunFailed, match="sampling check refused w0"):
        calibrated(sampling_reports(policy, groups, config_for(policy), 0), Calibration(), 1.0)


def test_probabilities_that_are_not_those_sampled_with_show_within_the_limit(policy: Policy) -> None:
    """Noise as of bfloat16 is within its limit; a constant on top shows once it exceeds what chance explains."""
    config = config_for(policy, max_mismatch=0.25)
    assert the_fault(policy, sampled(policy, noise=SPREAD), config) == ""
    text = the_fault(policy, sampled(policy, noise=SPREAD, shift=0.05), config)
    assert "tokens were drawn with other probabilities" in text


def test_each_worker_is_checked_for_itself(policy: Policy) -> None:
    groups = [*sampled(policy), *sampled(policy, worker="w1", shift=1e-3)]
    reports = sampling_reports(policy, groups, config_for(policy), 0)
    faults = {report.worker_id: bool(report.fault) for report in reports}
    assert faults == {"w0": False, "w1": True}
    told = summary(reports, config_for(policy))
    assert told == reports[1].fault
    assert "agree" not in told


def test_the_measurement_calibrates_the_first_range_and_foretells_what_it_clips(policy: Policy) -> None:
    config = config_for(policy, max_mismatch=0.25)
    (report,) = sampling_reports(policy, sampled(policy, noise=SPREAD), config, version=0)
    assert report.mismatch.num_tokens > MIN_TOKENS
    assert report.mismatch.spread == pytest.approx(SPREAD, rel=0.1)
    assert min(report.fixed_clip) > 0.3
    assert max(report.calibrated_clip) < 0.08
    calibration = calibrated([report], Calibration(), 1.0)
    assert calibration.mismatch == report.mismatch
    text = summary([report], config)
    assert "uncalibrated" in text
    uncalibrated = summary([report], config_for(policy, clip={"calibration": "none"}))
    assert "uncalibrated" not in uncalibrated
    assert "the range is below the noise" in uncalibrated


def test_tokens_of_later_versions_are_no_business_of_this_check(policy: Policy) -> None:
    later = [
        replace(g, rollouts=tuple(replace(r, segments=(replace(r.segments[0], policy_version=1),)) for r in g.rollouts))
        for g in sampled(policy, shift=1.0)
    ]
    assert sampling_reports(policy, later, config_for(policy), 0) == []
    assert calibrated([], Calibration(scale=2.0), 1.0) == Calibration(scale=2.0)
