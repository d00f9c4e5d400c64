"""Workers in trouble: weights that are gone or refused, groups that never end, a stop, a restart. Real hub and loop."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from hub_stories import IDENTITY, LEARNER, MakeHub, events, run
from ray.exceptions import RayActorError
from worker_stories import (
    TOKENIZER,
    end,
    make_worker,
    small_config,
    start,
    train_step,
    until,
    weights,
)

import rollout.follow
from rollout.prompts import PromptSource
from shared.config import Config
from shared.errors import RolloutRejected, RunFailed, WeightsRefused, WeightSyncError
from shared.hub import Hub
from shared.protocols import Completion, GenerateRequest, RequestsInLoad
from shared.records import Group, GroupId, Manifest, Publication
from shared.run_files import read_ledger, read_syncs
from shared.weights import weights_digest


class VersionedEngine(FakeEngine):
    """Writes down which version was active when a request came."""

    def __init__(self, token_s: float = 0.0) -> None:
        super().__init__(token_s=token_s)
        self.asked_at: list[int] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked_at.append(self._version)
        return await super().generate(request)


class RefusingEngine(FakeEngine):
    async def load(
        self, manifest: Manifest, files: Sequence[Path], requests: RequestsInLoad = "recompute"
    ) -> dict[str, float]:
        raise WeightSyncError(f"version {manifest.version} is refused")


class LostBucket:
    """A reference whose owner is dead."""

    def __await__(self) -> Any:
        raise RayActorError
        yield


def test_weights_that_are_gone_are_survived_and_the_next_ones_count(
    tell: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout.follow, "_LOOK_AGAIN_S", 0.01)

    async def story(config: Config, hub: Hub) -> None:
        engine = VersionedEngine()
        working = start(make_worker(config, hub, tmp_path, engine))
        await train_step(hub, 0, publish=False)
        await hub.publish(LEARNER, Publication(weights(1).manifest, (LostBucket(),)))
        await asyncio.sleep(0.1)
        assert not working.done()
        assert engine.num_loads == 0
        await hub.sit_down(LEARNER, IDENTITY)  # its successor
        await hub.publish(LEARNER, weights(1))
        for step in (1, 2):
            await train_step(hub, step)
        assert await working

    tell(story)
    assert [sync.version for sync in read_syncs(tmp_path)] == [1, 2]


def test_a_new_incarnation_of_a_version_is_loaded(tell: Callable[..., None], tmp_path: Path) -> None:
    other = weights(3, incarnation=1)

    async def story(config: Config, hub: Hub) -> None:
        engine = FakeEngine()
        working = start(make_worker(config, hub, tmp_path, engine))
        for step in range(3):
            await train_step(hub, step)
        await until(lambda: engine.num_loads == 3)
        await hub.sit_down(LEARNER, IDENTITY)
        assert await hub.replace_weights(LEARNER, "other") == 1
        await hub.publish(LEARNER, other)
        await until(lambda: engine.num_loads == 4)
        assert engine._weights == weights_digest(other.manifest)
        await train_step(hub, 3)
        assert await working

    tell(story, learner={"steps": 4})
    assert [(s.version, s.incarnation) for s in read_syncs(tmp_path)][:4] == [(1, 0), (2, 0), (3, 0), (3, 1)]


def test_a_restarted_worker_serves_nothing_before_it_holds_the_learners_version(
    tell: Callable[..., None], tmp_path: Path
) -> None:
    """With staleness 1 the bound alone would let it start at version 0."""

    async def story(config: Config, hub: Hub) -> None:
        first = start(make_worker(config, hub, tmp_path, FakeEngine(token_s=0.02)))  # one group after the other
        await train_step(hub, 0)
        await end(first)
        await hub.leave("w0")
        hub._core.publication.forget()  # as when its learner is restarted, too
        engine = VersionedEngine()
        second = start(make_worker(config, hub, tmp_path, engine, "w1"))
        await asyncio.sleep(0.2)
        assert engine.asked_at == []
        await hub.publish(LEARNER, weights(1))
        for step in (1, 2):
            await train_step(hub, step)
        assert await second
        assert min(engine.asked_at) == 1

    tell(story, sync={"max_staleness": 1}, rollout={"max_num_seqs": 4})


@pytest.mark.parametrize("by_the_hub", [True, False])
def test_a_worker_that_is_drained_hands_in_what_it_holds(
    tell: Callable[..., None], tmp_path: Path, by_the_hub: bool
) -> None:
    async def story(config: Config, hub: Hub) -> None:
        worker = make_worker(config, hub, tmp_path, FakeEngine(token_s=0.05))
        working = start(worker)
        await until(lambda: hub._core.ledger.num_held() == {"w0": 2})
        if by_the_hub:
            await hub.request_stop()
        else:
            worker.drain()
        assert await working is False  # the run is not finished
        states = [row and row.state for row in hub._core.ledger.step_groups(0).values()]
        assert states == ["ready", "ready"]
        assert hub._core.ledger.balance().issued == 2
        assert await start(worker) is False

    tell(story)


def test_a_worker_that_waits_for_the_learner_can_be_drained(
    make_config: Callable[..., Config], make_hub: MakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def story() -> None:
        worker = make_worker(small_config(make_config), make_hub(), tmp_path)
        working = start(worker)
        await asyncio.sleep(0.02)
        worker.drain()
        assert await working is False

    run(story())
    assert caplog.messages == ["waiting for this run's learner, which has not come yet"]


def test_a_failed_run_ends_the_worker_with_what_was_said(tell: Callable[..., None], tmp_path: Path) -> None:
    async def story(config: Config, hub: Hub) -> None:
        working = start(make_worker(config, hub, tmp_path))
        await until(lambda: hub._core.ledger.balance().issued == 2)
        await hub.fail("learner", "Traceback: out of memory")
        with pytest.raises(RunFailed, match="the learner side of the run failed:\nTraceback: out of memory"):
            await working

    tell(story)


def test_a_busy_worker_keeps_its_lease(tell: Callable[..., None], tmp_path: Path) -> None:
    """All its slots are taken, so that it asks for nothing for longer than the lease lasts."""

    async def story(config: Config, hub: Hub) -> None:
        working = start(make_worker(config, hub, tmp_path, FakeEngine(token_s=0.3)))
        await until(lambda: hub._core.ledger.num_held() == {"w0": 1})
        await until(lambda: hub._core.ledger.row(GroupId(0)).state == "ready")
        await end(working)

    tell(story, rollout={"lease_s": 1.0, "max_num_seqs": 4})
    assert ("lost", "w0") not in events(tmp_path)


def test_one_of_three_engines_refuses_the_weights_and_the_run_goes_on(
    tell: Callable[..., None], tmp_path: Path
) -> None:
    async def story(config: Config, hub: Hub) -> None:
        engines = [VersionedEngine(0.002), RefusingEngine(token_s=0.002), VersionedEngine(0.002)]
        workers = [make_worker(config, hub, tmp_path, engine, f"w{i}") for i, engine in enumerate(engines)]
        first, refusing, third = [start(worker) for worker in workers]
        groups: list[Group] = await train_step(hub, 0)
        with pytest.raises(WeightsRefused, match="version 1 was refused by the transport check: version 1 is refused"):
            await refusing
        await hub.leave("w1", "WeightsRefused")
        for step in range(1, 6):
            groups += await train_step(hub, step)
        assert await first
        assert await third
        new = [g for g in groups if any(s.policy_version for r in g.rollouts for s in r.segments)]
        assert {group.worker_id for group in groups} == {"w0", "w1", "w2"}
        assert {group.worker_id for group in new} == {"w0", "w2"}
        assert max(engines[0].asked_at + engines[2].asked_at) == 5

    tell(story, learner={"steps": 6, "prompts_per_step": 6}, rollout={"max_num_seqs": 8})
    assert {sync.worker_id for sync in read_syncs(tmp_path)} == {"w0", "w2"}


class StubbornEngine(FakeEngine):
    """One prompt is never trusted; member 2 of group 9 never ends."""

    def __init__(self, hopeless: Sequence[int]) -> None:
        super().__init__()
        self._hopeless = list(hopeless)

    async def generate(self, request: GenerateRequest) -> Completion:
        if list(request.prompt_ids) == self._hopeless:
            raise RolloutRejected("log-probability nan")
        if request.request_id == "9-0-0-2-0":
            await asyncio.Event().wait()
        return await super().generate(request)


def test_a_prompt_that_always_fails_and_a_sample_that_never_ends_do_not_stop_a_run(
    tell: Callable[..., None], tmp_path: Path
) -> None:
    async def story(config: Config, hub: Hub) -> None:
        prompts = PromptSource(config, TOKENIZER)
        engine = StubbornEngine(prompts.training_prompt(GroupId(7)).token_ids)
        working = start(make_worker(config, hub, tmp_path, engine))
        groups: list[Group] = []
        for step in range(20):
            groups += await train_step(hub, step)
        assert await working
        assert [group.group.number for group in groups] == list(range(40))
        status = await hub.status()
        assert status.finished
        assert status.dropped.keys() == {"untrusted_logprobs", "timeout"}
        assert (status.trained, status.issued) == (40, 40 + sum(status.dropped.values()))

    tell(story, learner={"steps": 20}, sync={"max_staleness": 1}, rollout={"group_timeout_s": 1.5})
    rows = {row.group: row for row in read_ledger(tmp_path)[0]}
    assert rows[GroupId(7)].reason == "untrusted_logprobs"
    assert rows[GroupId(7)].detail == "log-probability nan"
    assert rows[GroupId(9)].reason == "timeout"
    expected = "group 9.0 took longer than rollout.group_timeout_s = 1.5: 3 of 4 completions were finished"
    assert rows[GroupId(9)].detail.startswith(expected)
    assert rows[GroupId(9, 1)].state == "trained"
