"""Faults of sampling on a real engine: each is refused by the sampling check, and nothing is trained.

The engine's weights are right in all of them: transport and load have nothing to find.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from learner.policy import Policy
from learner.sampling_check import REFUSED_AT, SHOWS_AT, calibrated, sampling_reports
from shared.config import Config
from shared.errors import RunFailed
from shared.protocols import Completion
from shared.records import Calibration, Group, GroupId, Rollout, SamplingReport, Segment

pytestmark = pytest.mark.engine

LONG = [40 + (i * 7) % 50 for i in range(300)]  # longer than a block of the prefix cache
OTHER = 77  # noise seed of other weights


class Checked:
    """An engine's samples before the learner's sampling check, both with the model's own weights."""

    def __init__(self, served: Any, precision: str) -> None:
        self.served = served
        values = {"model": {"path": str(served.path), "precision": precision}, "sampling": {"max_tokens": 12}}
        self.config = Config.model_validate(values)
        self.policy = Policy.load(self.config)

    def report(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], temperature: float = 1.0
    ) -> SamplingReport:
        groups = [
            Group(
                GroupId(number), 0, "worker-7", "p", np.array(prompt, np.int32), temperature,
                (Rollout(c.token_ids, c.logprobs, _whole(c), c.finish_reason, 1.0),),
            )
            for number, (prompt, c) in enumerate(zip(prompts, completions, strict=True))
        ]  # fmt: skip
        (report,) = sampling_reports(self.policy, groups, self.config, version=0)
        return report

    def refused(self, report: SamplingReport) -> bool:
        """Whether the learner stops before its first step; its error names worker, version and check."""
        if not report.fault:
            return False
        with pytest.raises(RunFailed, match="sampling check refused worker-7 at version 0"):
            calibrated([report], Calibration(), 1.0)
        return True


def _whole(completion: Completion) -> tuple[Segment, ...]:
    return (Segment(0, 0, len(completion.token_ids), float(completion.logprobs.sum(dtype=np.float64))),)


@pytest.fixture(params=["dense", "moe"], scope="module")
def learner_and_engine(request: pytest.FixtureRequest) -> Checked:
    return Checked(request.getfixturevalue(request.param), "float32")


@pytest.fixture
def checked(learner_and_engine: Checked) -> Checked:
    learner_and_engine.served.load(None)
    return learner_and_engine


@pytest.fixture
def prompts() -> list[list[int]]:
    return [[50 + n, 60, 61 + n, 70, 55] for n in range(8)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_right_samples_pass(checked: Checked, prompts: list[list[int]], temperature: float) -> None:
    report = checked.report(prompts, checked.served.sample(prompts, 12, temperature), temperature)
    assert report.fault == ""
    assert not checked.refused(report)
    print(f"rms {report.mismatch.rms:.1e} nats a token at temperature {temperature}")


def test_another_temperature_is_refused_by_the_sampling_check(checked: Checked, prompts: list[list[int]]) -> None:
    assert checked.refused(checked.report(prompts, checked.served.sample(prompts, 12, 0.9), temperature=1.0))


def test_raw_log_probabilities_are_refused_by_the_sampling_check(checked: Checked, prompts: list[list[int]]) -> None:
    """Those before temperature, which is what `score` gives."""
    served = checked.served
    sampled = served.sample(prompts, 12, 0.6)
    raw = [
        replace(c, logprobs=served.run(served.engine.score([*p, *c.token_ids.tolist()], len(p))))
        for p, c in zip(prompts, sampled, strict=True)
    ]
    assert checked.refused(checked.report(prompts, raw, temperature=0.6))


def test_a_thousandth_of_a_nat_is_refused_by_the_sampling_check(checked: Checked, prompts: list[list[int]]) -> None:
    sampled = checked.served.sample(prompts, 12)
    off = [replace(c, logprobs=c.logprobs + np.float32(1e-3)) for c in sampled]
    assert checked.refused(checked.report(prompts, off))


def test_a_stale_prefix_cache_is_refused_by_the_sampling_check(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = checked.served
    llm = served.engine._llm
    served.load(OTHER)
    served.sample([LONG], 4, salt="stale")  # fills the cache under other weights
    with monkeypatch.context() as patch:
        patch.setattr(llm, "reset_prefix_cache", _pretended)
        served.load(None)
    prompts = [LONG] * 4
    assert checked.refused(checked.report(prompts, served.sample(prompts, 12, salt="stale")))
    served.load(None)
    assert not checked.refused(checked.report(prompts, served.sample(prompts, 12, salt="stale")))


async def _pretended(**options: Any) -> bool:
    return True


def test_in_bfloat16_the_smallest_shift_that_shows_is_told_and_larger_ones_are_refused(
    dense_bf16: Any, shifted: Callable[[Sequence[Completion], float], list[Completion]]
) -> None:
    dense_bf16.load(None)
    checked = Checked(dense_bf16, "bfloat16")
    prompts = [[50 + n % 40, 60, 61 + n % 7, 70, 55] for n in range(64)]
    sampled = dense_bf16.sample(prompts, 12)
    report = checked.report(prompts, sampled)
    tokens, spread = report.mismatch.num_tokens, report.mismatch.spread
    print(f"bfloat16: {report.smallest_shift:.1e} nats shows at 3 sigma on {tokens:.0f} tokens of spread {spread:.3f}")
    assert report.fault == ""
    assert report.smallest_shift == pytest.approx(3 * spread / np.sqrt(tokens))
    certain = report.smallest_shift * (REFUSED_AT + 3) / SHOWS_AT
    assert checked.refused(checked.report(prompts, shifted(sampled, certain)))


@pytest.fixture
def shifted() -> Callable[[Sequence[Completion], float], list[Completion]]:
    return lambda completions, shift: [replace(c, logprobs=c.logprobs - np.float32(shift)) for c in completions]
