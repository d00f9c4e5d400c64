"""What leaves a worker was sampled under the learner's weights: verdicts and refusals. No vLLM, no Ray cluster."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_stories import IDENTITY, LEARNER, MakeHub, events, rows, run
from worker_stories import (
    WatchedEngine,
    end,
    largest_error,
    make_worker,
    start,
    take_groups,
    train_step,
    until,
    weights,
)

from shared.config import Config
from shared.errors import WeightsRefused
from shared.hub import Hub
from shared.records import ClipRange, Group, ProbeReport, Publication, StepPlan
from shared.run_files import read_evaluations, read_probes, read_syncs

TOKEN_S = 0.003


def states(hub: Hub, step: int) -> list[str | None]:
    return [row.state if row else None for row in hub._core.ledger.step_groups(step).values()]


def probed(folder: Path) -> list[tuple[int, bool]]:
    return [(probe.version, probe.released) for probe in read_probes(folder)]


def test_nothing_sampled_under_a_version_leaves_before_its_verdict(tell: Callable[..., None], tmp_path: Path) -> None:
    async def story(config: Config, hub: Hub) -> None:
        engine = WatchedEngine()
        working = start(make_worker(config, hub, tmp_path, engine))
        groups = await train_step(hub, 0, publish=False)
        engine.scoring.clear()
        await hub.publish(LEARNER, weights(1))
        await until(lambda: len([1 for version, _ in engine.asked if version == 1]) == 8)  # beside the probe
        await asyncio.sleep(0.1)
        assert states(hub, 1) == ["generating", "generating"]
        assert engine.num_scores == 4
        assert not working.done()
        engine.scoring.set()
        for step in (1, 2):
            groups += await train_step(hub, step)
        assert await working
        assert largest_error(groups) < 1e-6

    tell(story)
    assert probed(tmp_path)[:2] == [(1, True), (2, True)]
    assert "weights_refused" not in {name for name, _ in events(tmp_path)}


def test_refused_weights_are_fetched_again_and_their_tokens_never_leave(
    tell: Callable[..., None], tmp_path: Path
) -> None:
    async def story(config: Config, hub: Hub) -> None:
        engine = WatchedEngine(TOKEN_S, wrong=[0])
        engine.scoring.clear()
        working = start(make_worker(config, hub, tmp_path, engine))
        groups = await train_step(hub, 0)
        await until(lambda: len(engine.asked_wrong) >= 4)
        engine.scoring.set()
        for step in (1, 2, 3):
            groups += await train_step(hub, step)
        assert await working
        assert engine.loads[0] == (1, "recompute")
        assert engine.loads[1] in [(1, "abort"), (2, "abort")]  # the learner may be at version 2 by then
        assert {requests for _, requests in engine.loads[2:]} <= {"recompute"}
        assert largest_error(groups) < 1e-6
        assert max(r.num_tokens for group in groups for r in group.rollouts) <= 40
        assert any(not request.request_id.endswith("-0") for _, request in engine.asked)
        seeds = [request.seed for _, request in engine.asked]
        assert len(set(seeds)) == len(seeds)

    tell(story, learner={"steps": 4}, sampling={"max_tokens": 40}, sync={"max_staleness": 1})
    assert [released for _, released in probed(tmp_path)][:2] == [False, True]
    assert ("weights_refused", "w0") in events(tmp_path)


def test_a_worker_whose_weights_are_wrong_twice_ends_with_the_figures(
    tell: Callable[..., None], tmp_path: Path
) -> None:
    async def story(config: Config, hub: Hub) -> None:
        engine = WatchedEngine(TOKEN_S, wrong=[0, 1])
        working = start(make_worker(config, hub, tmp_path, engine))
        await train_step(hub, 0)
        with pytest.raises(WeightsRefused) as caught:
            await working
        text = str(caught.value)
        assert text.startswith("worker w0: version 1 was refused by the load check: rms ")
        assert " nats over 96 tokens, limit 0.25, largest " in text
        assert "Before that, version 1 was refused by the load check" in text
        assert "model.precision and sync.max_mismatch" in text
        assert engine.loads == [(1, "recompute"), (1, "abort")]
        assert set(states(hub, 1)) <= {"generating", None}
        reports = await hub.probes(LEARNER, 1)
        assert [(r.worker_id, r.version, r.released) for r in reports] == [("w0", 1, False)] * 2
        assert min(r.mismatch.rms for r in reports) > 0.25

    tell(story)
    details = [row["detail"] for row in rows(tmp_path / "events.jsonl") if row["name"] == "weights_refused"]
    assert len(details) == 2
    assert details[0].startswith("version 1 by the load check: rms ")


class Bucket:
    """A reference to bytes of which the first `num_bad` arrivals have one changed."""

    def __init__(self, blob: np.ndarray, num_bad: int) -> None:
        self._blob, self._num_bad = blob, num_bad

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        self._num_bad -= 1
        changed = self._blob.copy()
        changed[-1] ^= self._num_bad >= 0
        return changed


def test_bytes_that_changed_on_the_way_are_fetched_again_and_cost_no_request(
    tell: Callable[..., None], tmp_path: Path
) -> None:
    async def story(config: Config, hub: Hub) -> None:
        engine = WatchedEngine(TOKEN_S)
        working = start(make_worker(config, hub, tmp_path, engine))
        groups = await train_step(hub, 0, publish=False)
        first = weights(1)
        await hub.publish(LEARNER, Publication(first.manifest, (Bucket(first.buckets[0], num_bad=1),)))
        for step in (1, 2, 3):
            groups += await train_step(hub, step)
        assert await working
        versions = [version for version, _ in engine.loads]
        assert engine.loads == [(version, "recompute") for version in sorted(set(versions))]
        assert versions[0] in (1, 2), "what is fetched again is version 1, or 2 where that is out by then"
        assert largest_error(groups) < 1e-6
        assert {request.request_id.rsplit("-", 1)[1] for _, request in engine.asked} == {"0"}

    tell(story, learner={"steps": 4}, sampling={"max_tokens": 30}, sync={"max_staleness": 1})
    assert {is_released for _, is_released in probed(tmp_path)} == {True}


def test_bytes_that_are_wrong_twice_end_the_worker_at_the_transport_check(
    tell: Callable[..., None], tmp_path: Path
) -> None:
    async def story(config: Config, hub: Hub) -> None:
        engine = WatchedEngine()
        working = start(make_worker(config, hub, tmp_path, engine))
        await train_step(hub, 0, publish=False)
        first = weights(1)
        await hub.publish(LEARNER, Publication(first.manifest, (Bucket(first.buckets[0], num_bad=2),)))
        with pytest.raises(WeightsRefused, match="worker w0: version 1 was refused by the transport check.*'weight'"):
            await working
        assert engine.loads == []

    tell(story)


def test_a_refusal_long_ago_is_forgotten(tell: Callable[..., None], tmp_path: Path) -> None:
    async def story(config: Config, hub: Hub) -> None:
        working = start(make_worker(config, hub, tmp_path, WatchedEngine(wrong=[0, 2])))
        groups: list[Group] = []
        for step in range(4):
            groups += await train_step(hub, step)
        assert await working
        assert largest_error(groups) < 1e-6

    tell(story, learner={"steps": 4})
    assert probed(tmp_path)[:4] == [(1, False), (1, True), (2, False), (2, True)]


def test_weights_that_did_not_change_are_not_probed_again(tell: Callable[..., None], tmp_path: Path) -> None:
    async def story(config: Config, hub: Hub) -> None:
        engine = WatchedEngine()
        working = start(make_worker(config, hub, tmp_path, engine))
        await train_step(hub, 0)
        await train_step(hub, 1, publish=False)
        await hub.publish(LEARNER, Publication(replace(weights(1).manifest, version=2)))
        await take_groups(hub, 2)  # made at version 2
        assert engine.num_scores == 4
        await end(working)

    tell(story)
    assert probed(tmp_path) == [(1, True)]
    assert [(sync.version, sync.num_bytes > 0) for sync in read_syncs(tmp_path)] == [(1, True), (2, False)]


def test_an_evaluation_waits_for_weights_that_were_released(tell: Callable[..., None], tmp_path: Path) -> None:
    def asked_for(engine: WatchedEngine, version: int) -> int:
        return sum(request.request_id.startswith(f"evaluation-{version}") for _, request in engine.asked)

    async def story(config: Config, hub: Hub) -> None:
        engine = WatchedEngine(wrong=[0])
        working = start(make_worker(config, hub, tmp_path, engine))
        groups = await take_groups(hub, 0)
        await until(lambda: asked_for(engine, 0) == 4)
        engine.scoring.clear()
        await hub.begin_step(LEARNER, StepPlan(0, tuple(g.group for g in groups), 7, ClipRange(3e-4, 4e-4)))
        await hub.commit_step(LEARNER, 0, "digest")
        await hub.publish(LEARNER, weights(1))
        await until(lambda: engine.num_scores == 4)
        await asyncio.sleep(0.1)
        assert asked_for(engine, 1) == 0
        engine.scoring.set()
        assert await working
        assert asked_for(engine, 1) == 4
        assert not any(request_id.startswith("evaluation") for request_id in engine.asked_wrong)
        assert engine.loads == [(1, "recompute"), (1, "abort")]

    tell(story, learner={"steps": 1}, evaluation={"samples": 1})
    assert [report.version for report in read_evaluations(tmp_path)] == [0, 1]


def test_the_hub_keeps_the_verdicts_of_the_newest_versions(make_hub: MakeHub) -> None:
    from shared.hub_state import NUM_PROBED_VERSIONS, RecentProbes
    from shared.records import Mismatch

    reports = [
        ProbeReport(worker, version, Mismatch(96, 0.0, 1e-4, 5e-5), 0.1, 0.2, released=True)
        for version in range(1, NUM_PROBED_VERSIONS + 6)
        for worker in ("w0", "w1")
    ]
    recent = RecentProbes()
    for report in reversed(reports):
        recent.add(report)
    kept = recent.since(0)
    assert [r.version for r in kept[::2]] == list(range(6, NUM_PROBED_VERSIONS + 6))
    assert {r.worker_id for r in recent.since(37)} == {"w0", "w1"}
    assert recent.since(38) == []
    hub = make_hub()

    async def story() -> None:
        await hub.sit_down(LEARNER, IDENTITY)
        await hub.report(reports[:4])
        assert await hub.probes(LEARNER, 2) == reports[2:4]
        assert await hub.probes(LEARNER, 3) == []

    run(story())
