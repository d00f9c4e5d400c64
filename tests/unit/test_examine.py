"""The doctor's examination against a hub and an engine of made-up answers: what it measures, does, and gives up on."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_config, tiny_group, tiny_model

import learner.examine
from learner.examine import Examiner, rewards_of
from learner.policy import Policy
from learner.sampling_check import score_groups
from shared.config import Config
from shared.doctor import judge
from shared.errors import RunFailed, WeightsRefused
from shared.examination import read_examination
from shared.hub_state import HubStatus
from shared.records import (
    Group,
    Mismatch,
    ProbeReport,
    Publication,
    SamplingReport,
    StepPlan,
    SyncReport,
)
from shared.schema import encode_group
from shared.stopping import StopRequest

REWARDS: list[float | None] = [1.0, 0.0, 0.0, 1.0]
STATUS = HubStatus(8, 4, {}, 4, 1, 1, 0, 2, {}, False, waiting_for="a worker")


@dataclass
class Hub:
    """A hub whose worker samples `groups` and answers a publication with `probes`."""

    folder: Path
    groups: list[list[Group] | None]
    probes_after: tuple[ProbeReport, ...] = ()
    status_now: HubStatus = STATUS
    done: list[str] = field(default_factory=list)
    reports: list[SamplingReport] = field(default_factory=list)
    sent: list[Publication] = field(default_factory=list)

    def take(self, step: int) -> list[bytes] | None:
        groups = self.groups[step]
        return None if groups is None else [encode_group(group) for group in groups]

    def begin_step(self, plan: StepPlan) -> None:
        self.done.append(f"begin {plan.step}")

    def commit_step(self, step: int, weights_digest: str) -> None:
        self.done.append(f"commit {step} {weights_digest[:8]}")

    def publish(self, publication: Publication) -> None:
        self.sent.append(publication)
        sync = SyncReport("worker-0", publication.manifest.version, 10, *[0.1] * 6)
        with (self.folder / "syncs.jsonl").open("a") as file:
            file.write(json.dumps(vars(sync)) + "\n")

    def report(self, reports: Sequence[SamplingReport]) -> None:
        self.reports += reports

    def probes(self, since_version: int) -> list[ProbeReport]:
        return [probe for probe in self.probes_after if probe.version >= since_version and self.sent]

    def status(self) -> HubStatus:
        return self.status_now

    def wait_finished(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.put", lambda value: value)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"object_store_memory": 1e9})


@pytest.fixture
def setting(tmp_path: Path) -> tuple[Policy, Config]:
    tiny_model("moe").save_pretrained(tmp_path / "model")
    config = tiny_config(tmp_path / "model")
    config = config.model_copy(update={"sync": config.sync.model_copy(update={"max_mismatch": 1e-4})})
    return Policy.load(config), config


def sampled(policy: Policy, config: Config, version: int, shift: float = 0.0) -> list[Group]:
    """Groups whose engine reports the learner's own log-probabilities, all `shift` nats too high."""
    groups = []
    for number in (2 * version, 2 * version + 1):
        group = tiny_group(number, REWARDS, [5, 8, 8, 3])
        rollouts = []
        for scored in score_groups(policy, [group], config):
            logprobs_T = scored.logprobs_T + shift
            segment = replace(
                scored.rollout.segments[0], policy_version=version, loglik=float(logprobs_T.sum(dtype="float64"))
            )
            rollouts.append(replace(scored.rollout, behavior_logprobs=logprobs_T, segments=(segment,)))
        groups.append(replace(group, rollouts=tuple(rollouts)))
    return groups


def probe(released: bool = True) -> ProbeReport:
    return ProbeReport("worker-0", 1, Mismatch(20, 0.0, 1e-12, 5e-13), 1e-6, 0.1, released)


def examiner(hub: Hub, setting: tuple[Policy, Config], stop: StopRequest | None = None) -> Examiner:
    policy, config = setting
    hub_like: Any = hub
    return Examiner(
        config, hub.folder, hub_like, policy, lambda ids: f"{len(ids)} ids", StopRequest() if stop is None else stop
    )


def faults(config: Config, folder: Path) -> list[str]:
    return [f.name for f in judge(config, read_examination(folder)) if f.verdict == "fault"]


def test_a_run_is_taken_scored_sent_and_ended_untrained(tmp_path: Path, setting: tuple[Policy, Config]) -> None:
    policy, config = setting
    before = [p.clone() for _, p in policy.named_parameters()]
    hub = Hub(tmp_path, [sampled(policy, config, 0), sampled(policy, config, 1)], (probe(),))
    assert examiner(hub, setting).examine()
    assert all(old.equal(new) for old, (_, new) in zip(before, policy.named_parameters(), strict=True))
    assert [(p.manifest.version, p.manifest.weights_version) for p in hub.sent] == [(1, 1), (2, 1)]
    assert [line.split()[:2] for line in hub.done] == [[w, s] for s in "01" for w in ("begin", "commit")]
    assert [report.version for report in hub.reports] == [0, 1]
    found = read_examination(tmp_path)
    assert found is not None
    assert faults(config, tmp_path) == []
    assert found.sampled[0].mismatch.num_tokens == found.resampled[0].mismatch.num_tokens == 48
    assert max(report.max_abs for report in (*found.sampled, *found.resampled)) < 1e-5
    assert found.rewards is not None
    assert (found.rewards.num_mixed, found.rewards.mean, found.rewards.num_rollouts) == (2, 0.5, 8)
    assert [sample.reward for sample in found.rewards.samples] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert (found.num_experts, found.probes, [s.version for s in found.syncs]) == (8, (probe(),), [1])
    assert found.memory is not None
    assert found.memory.num_parameters == sum(p.numel() for p in before)
    assert found.memory.published_bytes >= 4 * found.memory.num_parameters
    assert found.memory.store_bytes == 10**9


@pytest.mark.parametrize(("version", "fault"), [(0, "sampling check"), (1, "sampling after a sync")])
def test_shifted_log_probabilities_are_a_fault_before_and_after_a_sync(
    version: int, fault: str, tmp_path: Path, setting: tuple[Policy, Config]
) -> None:
    policy, config = setting
    groups = [sampled(policy, config, v, shift=1e-3 if v == version else 0.0) for v in (0, 1)]
    assert examiner(Hub(tmp_path, [*groups], (probe(),)), setting).examine()
    assert faults(config, tmp_path) == [fault]


def test_refused_weights_end_it_with_everything_found_so_far(tmp_path: Path, setting: tuple[Policy, Config]) -> None:
    policy, config = setting
    hub = Hub(tmp_path, [sampled(policy, config, 0), None], (probe(released=False),))
    with pytest.raises(WeightsRefused, match="worker-0 refused the learner's own weights"):
        examiner(hub, setting).examine()
    assert faults(config, tmp_path) == ["load check"]
    found = read_examination(tmp_path)
    assert found is not None
    assert found.sampled
    assert found.memory


def test_without_a_probe_the_sync_is_enough(tmp_path: Path, setting: tuple[Policy, Config]) -> None:
    policy, config = setting
    config = config.model_copy(update={"sync": config.sync.model_copy(update={"probe_sequences": 0})})
    hub = Hub(tmp_path, [sampled(policy, config, 0), sampled(policy, config, 1)])
    assert examiner(hub, (policy, config)).examine()
    found = read_examination(tmp_path)
    assert found is not None
    assert (found.has_probe, found.num_unmet_experts, found.probes) == (False, None, ())


@pytest.mark.parametrize("step", [0, 1])
def test_asked_to_stop_it_ends_without_a_word(step: int, tmp_path: Path, setting: tuple[Policy, Config]) -> None:
    policy, config = setting
    groups = [sampled(policy, config, 0) if step else None, None]
    assert not examiner(Hub(tmp_path, [*groups], (probe(),)), setting).examine()
    stop = StopRequest()
    stop.set()
    assert not examiner(Hub(tmp_path, [sampled(policy, config, 0), None]), setting, stop).examine()


def test_groups_that_do_not_come_end_it_with_what_it_waited_for(
    tmp_path: Path, setting: tuple[Policy, Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, config = setting
    rollout = config.rollout.model_copy(update={"group_timeout_s": 0.05})
    config = config.model_copy(update={"rollout": rollout})
    monkeypatch.setattr(learner.examine, "ENGINE_START_S", 0.05)
    stop, hub = StopRequest(), Hub(tmp_path, [None, None])
    monkeypatch.setattr(hub, "take", lambda step: None if stop.wait(30) else [])
    with pytest.raises(RunFailed, match="no groups of step 0 within 0.1 s: a worker"):
        examiner(hub, (policy, config), stop).examine()


@pytest.mark.parametrize(
    ("status", "said"),
    [(replace(STATUS, failure="the rollout side of the run failed: no engine"), "no engine"), (STATUS, "a worker")],
)
def test_a_load_that_does_not_come_ends_it(
    status: HubStatus,
    said: str,
    tmp_path: Path,
    setting: tuple[Policy, Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, config = setting
    monkeypatch.setattr(learner.examine, "LOAD_S", 0.1)
    hub = Hub(tmp_path, [sampled(policy, config, 0), None], status_now=status)
    with pytest.raises(RunFailed, match=said):
        examiner(hub, setting).examine()


def test_rewards_are_counted_by_group_and_shown_of_every_kind(make_group: Callable[..., Group]) -> None:
    groups = [tiny_group(0, [1.0, 1.0]), tiny_group(1, [0.0, 0.5, None]), tiny_group(2, [None, None])]
    groups[0] = replace(groups[0], group=replace(groups[0].group, replacement=1))
    long = replace(groups[1].rollouts[0], finish_reason="length")
    groups[1] = replace(groups[1], rollouts=(long, *groups[1].rollouts[1:]))
    rewards = rewards_of(groups, lambda ids: str(len(ids)))
    assert (rewards.num_groups, rewards.num_mixed, rewards.num_replaced) == (3, 1, 1)
    assert (rewards.num_rollouts, rewards.num_unscored, rewards.num_truncated) == (7, 3, 1)
    assert (rewards.mean, rewards.least, rewards.most) == (0.625, 0.0, 1.0)
    assert [sample.reward for sample in rewards.samples] == [1.0, 0.0, None, 0.5, 1.0]
    nothing = rewards_of(groups[2:], lambda ids: "")
    assert (nothing.mean, nothing.least, nothing.most, len(nothing.samples)) == (None, None, None, 2)
