"""A learner that was killed goes on with the same weights, byte for byte: tiny models, a real hub, no Ray."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_stories import IDENTITY, LEARNER, rows
from tiny_models import tiny_group, tiny_policy

from learner.main import Learner
from learner.recover import recover
from shared.config import Config
from shared.hub import Hub, MetricRow
from shared.hub_state import HubStatus
from shared.records import (
    ClipRange,
    ProbeReport,
    Publication,
    RecordedStep,
    ResumePoint,
    SamplingReport,
    Span,
    StepPlan,
)
from shared.run_files import read_ledger
from shared.schema import decode_group, encode_group
from shared.store import read_trajectories, write_trajectories

STEPS, PROMPTS = 4, 2
WITHOUT_SIGNAL = 2  # a step whose rewards are all equal
WORKER = "worker-0"
State = dict[str, torch.Tensor]


class Seat:
    """The learner's hub client over a hub in this process, and a worker that makes what is to be taken."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.point: ResumePoint = self._call("sit_down", IDENTITY)

    def take(self, step: int) -> list[bytes]:
        tickets = asyncio.run(self.hub.next_work(WORKER, 0, (), PROMPTS)).tickets
        for ticket in tickets:
            equal = ticket.group.number // PROMPTS == WITHOUT_SIGNAL
            group = tiny_group(ticket.group.number, [1.0] * 3 if equal else [1.0, None, 0.0, 0.5])
            made = replace(group, group=ticket.group, attempt=ticket.attempt)
            assert asyncio.run(self.hub.submit(WORKER, ticket, encode_group(made)))
        return self._call("take", step).groups

    def begin_step(self, plan: StepPlan) -> None:
        self._call("begin_step", plan)

    def commit_step(self, step: int, weights_digest: str) -> None:
        self._call("commit_step", step, weights_digest)

    def publish(self, publication: Publication) -> None:
        self._call("publish", publication)

    def recorded_step(self, step: int) -> RecordedStep:
        return self._call("recorded_step", step)

    def replace_weights(self, weights_digest: str) -> int:
        return self._call("replace_weights", weights_digest)

    def log_metrics(self, row: MetricRow) -> None:
        self._call("log_metrics", row)

    def report(self, reports: Sequence[Span | SamplingReport]) -> None:
        asyncio.run(self.hub.report(reports))

    def probes(self, since_version: int) -> list[ProbeReport]:
        return []

    def status(self) -> HubStatus:
        return asyncio.run(self.hub.status())

    def _call(self, method: str, *arguments: Any) -> Any:
        return asyncio.run(getattr(self.hub, method)(LEARNER, *arguments))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Site":
    monkeypatch.setattr("ray.put", lambda value: value)
    return Site(tmp_path)


class Site:
    """A run directory, its config, and learners that come and go."""

    def __init__(self, root: Path) -> None:
        _, config = tiny_policy(root / "model", "moe", steps=STEPS, minibatches=2, weight_decay=0.1, checkpoint_steps=2)
        (root / "model" / "tokenizer.json").write_text("{}")
        sync = config.sync.model_copy(update={"max_staleness": STEPS})  # the worker stays at version 0
        evaluation = config.evaluation.model_copy(update={"samples": 0})
        self.config: Config = config.model_copy(update={"sync": sync, "evaluation": evaluation})
        self.root, self.checkpoints = root, root / "run" / "checkpoints"
        self.hub: Hub | None = None

    def learner(self) -> tuple[Learner, ResumePoint]:
        """A learner after the hub, too, was killed."""
        torch.set_num_threads(self.config.learner.threads)
        if self.hub is not None:
            self.hub.close()
        self.hub = Hub(self.config, self.root / "run", poll_s=0.05)
        seat = Seat(self.hub)
        recovered = recover(self.config, self.checkpoints, seat, seat.point)
        learner = Learner(self.config, self.checkpoints, seat, seat.point.version, recovered)  # type: ignore[arg-type]
        return learner, seat.point

    def train(self, steps: int) -> Learner:
        learner, _ = self.learner()
        while learner.version < steps:
            assert learner.step(None)
        return learner

    def drop_checkpoints(self, *versions: int) -> None:
        for version in versions:
            (self.checkpoints / f"step-{version:06d}" / "state.json").unlink()

    def logged_steps(self) -> list[int]:
        return [row["step"] for row in rows(self.root / "run" / "metrics.jsonl")]


def state(learner: Learner) -> State:
    """All that decides what the next step gives."""
    weights = dict(learner.policy.checkpoint_tensors())
    return {name: tensor.clone() for name, tensor in (weights | learner.optimizer.state_tensors()).items()}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    """The states at versions 0 to STEPS of a run that nobody disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.put", lambda value: value)
        site = Site(tmp_path_factory.mktemp("undisturbed"))
        learner, _ = site.learner()
        states = [state(learner)]
        for _ in range(STEPS):
            learner.step(None)
            states.append(state(learner))
    assert not same(states[1], states[2])
    return states


@pytest.mark.parametrize("dropped", [(), (2,)], ids=["from version 2", "from no checkpoint"])
@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_recovery_gives_the_same_weights_and_moments(
    site: Site, expected: list[State], killed_at: int, dropped: tuple[int, ...]
) -> None:
    site.train(killed_at)
    if killed_at >= 2:
        site.drop_checkpoints(*dropped)
    learner, point = site.learner()
    assert point == ResumePoint(killed_at)
    assert same(state(learner), expected[killed_at])
    while learner.version < STEPS:
        learner.step(None)
    assert same(state(learner), expected[STEPS])
    _, steps = read_ledger(site.root / "run")
    assert [row.incarnation for row in steps] == [0] * STEPS
    assert site.logged_steps() == list(range(STEPS))


def test_recovery_publishes_what_it_recovered(site: Site) -> None:
    before = site.train(3)
    learner, _ = site.learner()
    assert site.hub is not None
    publication = asyncio.run(site.hub.newer_version(2))
    assert publication is not None
    assert (publication.manifest.version, publication.manifest.incarnation) == (3, 0)
    assert publication.manifest.num_bytes > 0
    assert learner.publisher.digest == before.publisher.digest
    assert len(publication.manifest.probe) == site.config.sync.probe_sequences


def test_a_step_that_was_begun_is_trained_by_its_plan(site: Site, expected: list[State]) -> None:
    learner = site.train(3)
    payloads = learner.hub.take(3)
    assert payloads is not None
    plan = learner.plan([decode_group(payload) for payload in payloads])
    learner.hub.begin_step(plan)
    learner, point = site.learner()
    assert point == ResumePoint(3, plan)
    learner.step(point.begun)
    assert same(state(learner), expected[STEPS])


def test_the_plan_of_a_begun_step_counts_whatever_this_learner_would_have_planned(site: Site) -> None:
    learner = site.train(1)
    groups = [decode_group(payload) for payload in learner.hub.take(1) or ()]
    learner.hub.begin_step(replace(learner.plan(groups), minibatch_seed=1, clip=ClipRange(0.1, 0.2)))
    learner, point = site.learner()
    learner.step(point.begun)
    assert learner.hub.recorded_step(1).plan == point.begun


def test_a_kill_between_commit_and_publish_is_made_up_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = site.train(2)
    with monkeypatch.context() as patch:
        patch.setattr(Seat, "publish", fail)
        with pytest.raises(KeyboardInterrupt):
            learner.step(None)
    assert learner.hub.status().published_version == 2
    learner, point = site.learner()
    assert point.version == 3
    assert learner.hub.status().published_version == 3
    assert site.logged_steps() == [0, 1, 2]  # the row that the kill left out is there


def test_a_row_that_a_kill_left_out_is_logged_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = site.train(2)
    with monkeypatch.context() as patch:
        patch.setattr(Seat, "log_metrics", fail)
        with pytest.raises(KeyboardInterrupt):
            learner.step(None)
    assert site.logged_steps() == [0, 1]
    site.drop_checkpoints(2)
    site.learner()
    assert site.logged_steps() == [0, 1, 2]
    site.learner()
    assert site.logged_steps() == [0, 1, 2]
    row = rows(site.root / "run" / "metrics.jsonl")[-1]
    assert row["num_updates"] == 0
    assert row["reward_mean"] == 1.0


def fail(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_other_weights_than_before_are_a_new_incarnation(
    site: Site, expected: list[State], caplog: pytest.LogCaptureFixture
) -> None:
    """One reward of step 1 is another than it was: what comes out of it is what the run goes on with."""
    site.train(3)
    site.drop_checkpoints(2)
    path = site.root / "run" / "trajectories" / "step-000001.parquet"
    first, *others = read_trajectories(path)
    rewarded = replace(first.rollouts[0], reward=0.7)
    changed = replace(first, rollouts=(rewarded, *first.rollouts[1:]))
    write_trajectories(path, [encode_group(group) for group in (changed, *others)], 1)

    learner, point = site.learner()
    assert point == ResumePoint(3)
    assert not same(state(learner), expected[3])
    assert "these are not the weights of before" in caplog.text
    assert site.hub is not None
    publication = asyncio.run(site.hub.newer_version(3, 0))  # a worker at version 3 is told
    assert publication is not None
    assert (publication.manifest.version, publication.manifest.incarnation) == (3, 1)
    recovered = state(learner)

    learner, point = site.learner()  # the same again is no further incarnation
    assert point == ResumePoint(3, incarnation=1)
    assert same(state(learner), recovered)
    publication = asyncio.run(site.hub.newer_version(2))
    assert publication is not None
    assert publication.manifest.incarnation == 1
    learner.step(None)
    _, steps = read_ledger(site.root / "run")
    assert [row.incarnation for row in steps] == [0, 0, 1, 1]
    assert steps[2].weights_digest != steps[1].weights_digest


def test_nothing_is_published_before_the_first_step(site: Site) -> None:
    learner, point = site.learner()
    assert point == ResumePoint(0)
    assert site.hub is not None
    assert asyncio.run(site.hub.newer_version(-1)) is None
    assert learner.version == 0
