"""The hub as a plain class, without Ray: who gets which work, what is refused, what is in the run directory."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from shared.config import Config
from shared.errors import HubError, RunFailed, SchemaError
from shared.hub import Hub
from shared.ledger import MAX_REPLACEMENTS
from shared.records import (
    EvalReport,
    Group,
    GroupId,
    Manifest,
    ProbeReport,
    Publication,
    Span,
    StepPlan,
    SyncReport,
    TensorEntry,
    Ticket,
    Work,
)
from shared.schema import decode_group, encode_group

MakeGroup = Callable[..., Group]
MakeConfig = Callable[..., Config]
MakeHub = Callable[..., Hub]
POLL_S = 0.05


@pytest.fixture
def make_hub(make_config: MakeConfig, tmp_path: Path) -> Iterator[MakeHub]:
    hubs = []

    def make(poll_s: float = POLL_S, **sections: dict[str, Any]) -> Hub:
        hubs.append(Hub(make_config(**sections), tmp_path, poll_s))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.close()


def publication(
    version: int, weights_version: int | None = None, buckets: tuple[str, ...] = ("bucket",)
) -> Publication:
    tensors = tuple(TensorEntry(f"weight-{i}", "float32", (1,), i, 0, 4, "digest") for i in range(len(buckets)))
    return Publication(Manifest(version, version if weights_version is None else weights_version, tensors), buckets)


async def work(
    hub: Hub, make_group: MakeGroup, version: int = 0, worker: str = "w0", max_groups: int = 9
) -> list[Ticket]:
    """One round of a worker: ask, generate, submit everything."""
    tickets = list((await hub.next_work(worker, version, max_groups)).tickets)
    await asyncio.sleep(0.01)
    for ticket in tickets:
        assert await hub.submit(worker, ticket, encode_group(make_group(ticket, worker, spans=((version, 4),))))
    return tickets


async def train(hub: Hub, step: int, publish: bool = True) -> None:
    taken = await hub.take(step)
    assert taken.groups is not None, taken.waiting_for
    groups = tuple(decode_group(payload).group for payload in taken.groups)
    await hub.begin_step(StepPlan(step, groups, 7, 3e-4, 4e-4))
    await hub.commit_step(step, f"digest-{step}")
    if publish:
        await hub.publish(publication(step + 1))


def run(story: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(story, timeout=30))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_whole_run_leaves_its_records(make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path) -> None:
    hub = make_hub()

    async def story() -> None:
        await hub.publish(publication(0, buckets=()))
        for step in range(3):
            await work(hub, make_group, step)
            await train(hub, step)
            await hub.log_metrics({"step": step, "loss": None, "clip_fraction_by_minibatch": [0.5, None]})
        assert await hub.next_work("w0", 3, 1) == Work(stop=True)
        status = await hub.status()
        assert (status.issued, status.trained, status.dropped, status.pending) == (6, 6, {}, 0)
        assert (status.version, status.published_version, status.finished, status.failure) == (3, 3, True, None)
        assert status.workers["w0"].active_version == 3
        assert 0 <= status.workers["w0"].age_s < 30

    run(story())
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    files = sorted((tmp_path / "trajectories").iterdir())
    assert [file.name for file in files] == [f"step-{step:06d}.parquet" for step in range(3)]
    assert [pd.read_parquet(file)["group_number"].tolist() for file in files] == [
        [0, 0, 1, 1],
        [2, 2, 3, 3],
        [4, 4, 5, 5],
    ]


def test_waiting_calls_return_empty_after_a_poll_and_at_once_on_news(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub(poll_s=10.0, sync={"max_staleness": 0})

    async def story() -> None:
        taking = asyncio.create_task(hub.take(0))
        version = asyncio.create_task(hub.newer_version(0))
        first = await work(hub, make_group)
        assert [decode_group(payload).group for payload in (await taking).groups or ()] == [t.group for t in first]
        more = asyncio.create_task(hub.next_work("w1", 0, 1))
        await asyncio.sleep(0.01)
        assert not more.done()
        assert not version.done()
        await train(hub, 0)
        assert (await version) == publication(1)
        hub._poll_s = POLL_S
        assert await hub.next_work("w2", 0, 1) == Work()  # at version 0 still: too old for the groups of step 1
        assert await hub.newer_version(1) is None
        more.cancel()

    run(story())


def test_the_learner_is_told_what_it_waits_for(make_hub: MakeHub) -> None:
    hub = make_hub(learner={"prompts_per_step": 6})

    async def story() -> None:
        await hub.next_work("w0", 0, 2)
        taken = await hub.take(0)
        assert taken.groups is None
        assert taken.waiting_for.startswith("step 0 waits for group 0.0 (generating, w0, ")
        assert "2 (not issued), 3 (not issued) and 2 more; workers seen: w0" in taken.waiting_for

    run(story())


def test_a_failure_of_one_side_reaches_the_other_at_once(make_hub: MakeHub) -> None:
    hub = make_hub(poll_s=10.0)

    async def story() -> None:
        await hub.next_work("w0", 0, 9)
        taking = asyncio.create_task(hub.take(0))
        asking = asyncio.create_task(hub.next_work("w0", 0, 1))
        await asyncio.sleep(0)
        await hub.fail("rollout", "Traceback ...\nZeroDivisionError: division by zero")
        with pytest.raises(RunFailed, match=r"the rollout side of the run failed:\nTraceback[^$]*ZeroDivisionError"):
            await taking
        assert await asking == Work(stop=True)
        await hub.fail("learner", "because of the other one")
        assert "ZeroDivisionError" in str((await hub.status()).failure)

    run(story())


def test_a_disk_that_fails_stops_the_run(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        (ticket,) = (await hub.next_work("w0", 0, 1)).tickets
        hub._store.close()
        with pytest.raises(Exception, match="closed database"):
            await hub.submit("w0", ticket, encode_group(make_group(ticket, "w0")))
        with pytest.raises(RunFailed, match="the hub side of the run failed"):
            await hub.take(0)

    run(story())


def test_what_a_worker_sends_must_be_what_it_was_asked_for(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        await hub.publish(publication(0, buckets=()))
        first, second = (await hub.next_work("w0", 0, 2)).tickets
        with pytest.raises(SchemaError, match="no Arrow stream"):
            await hub.submit("w0", first, b"junk")
        with pytest.raises(HubError, match=r"submits attempt 0 of group 0\.0, but the bytes say .* group 1\.0"):
            await hub.submit("w0", first, encode_group(make_group(second, "w0")))
        with pytest.raises(HubError, match="the bytes say .* by 'w0'"):
            await hub.submit("w1", first, encode_group(make_group(first, "w0")))
        with pytest.raises(HubError, match="does not hold attempt 0"):
            await hub.submit("w1", first, encode_group(make_group(first, "w1")))
        with pytest.raises(HubError, match=r"tokens of versions \[1\]; versions 0 .* to 0"):
            await hub.submit("w0", first, encode_group(make_group(first, "w0", spans=((0, 2), (1, 2)))))
        with pytest.raises(HubError, match="asks for 1 group or more"):
            await hub.next_work("w0", 0, 0)
        assert await hub.submit("w0", first, encode_group(make_group(first, "w0")))
        assert await hub.submit("w0", first, encode_group(make_group(first, "w0")))  # its acknowledgment was lost

    run(story())


def test_tokens_that_would_be_too_old_when_trained_are_refused(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub(sync={"max_staleness": 0})

    async def story() -> None:
        await work(hub, make_group)
        await train(hub, 0)
        (ticket,) = (await hub.next_work("w0", 1, 1)).tickets
        with pytest.raises(HubError, match=r"tokens of versions \[0\]; versions 1 \(sync\.max_staleness\) to 1"):
            await hub.submit("w0", ticket, encode_group(make_group(ticket, "w0", spans=((0, 2), (1, 2)))))

    run(story())


def test_a_dropped_group_is_counted_and_replaced(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        zero, one = (await hub.next_work("w0", 0, 2)).tickets
        await hub.give_up("w0", zero, "reward_error", "three scores for four")
        assert not await hub.submit("w0", zero, encode_group(make_group(zero, "w0")))
        (again,) = (await hub.next_work("w0", 0, 1)).tickets
        assert again == Ticket(GroupId(0, 1))
        for ticket in (one, again):
            await hub.submit("w0", ticket, encode_group(make_group(ticket, "w0")))
        await train(hub, 0)
        status = await hub.status()
        assert (status.issued, status.trained, status.dropped) == (3, 2, {"reward_error": 1})

    run(story())


def test_prompts_that_all_fail_end_the_run_with_the_reason(make_hub: MakeHub) -> None:
    hub = make_hub()

    async def story() -> None:
        for _ in range(MAX_REPLACEMENTS):
            (ticket,) = (await hub.next_work("w0", 0, 1)).tickets
            await hub.give_up("w0", ticket, "reward_error", "three scores for four")
        (ticket,) = (await hub.next_work("w0", 0, 1)).tickets
        with pytest.raises(RunFailed, match="replaced 100 times"):
            await hub.give_up("w0", ticket, "reward_error", "three scores for four")
        with pytest.raises(RunFailed, match="three scores for four"):
            await hub.take(0)

    run(story())


def test_a_lost_workers_groups_are_issued_again(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub(poll_s=10.0, sync={"max_staleness": 0})

    async def story() -> None:
        lost = (await hub.next_work("lost", 0, 2)).tickets
        asking = asyncio.create_task(hub.next_work("w0", 0, 2))
        await asyncio.sleep(0)
        await hub.worker_lost("lost")
        assert (await asking).tickets == (Ticket(GroupId(0), 1), Ticket(GroupId(1), 1))
        assert not await hub.submit("lost", lost[0], encode_group(make_group(lost[0], "lost")))

    run(story())


def test_the_first_and_the_last_version_are_evaluated_once(
    make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path
) -> None:
    hub = make_hub(evaluation={"samples": 2}, learner={"steps": 1})

    async def story() -> None:
        assert await hub.next_work("w0", 0, 2) == Work(evaluate_version=0)
        assert (await hub.next_work("w0", 0, 1)).tickets  # it may generate next to its evaluation
        await hub.worker_lost("w0")
        assert await hub.next_work("w1", 0, 2) == Work(evaluate_version=0)
        await hub.report([EvalReport(0, 32, 8, 0)])
        await hub.report([EvalReport(0, 32, 9, 0)])  # of the worker that was believed lost
        await work(hub, make_group, worker="w1")
        await train(hub, 0)
        assert await hub.next_work("w1", 0, 2) == Work()
        assert await hub.next_work("w1", 1, 2) == Work(evaluate_version=1)
        assert await hub.next_work("w2", 1, 2) == Work()
        assert not (await hub.status()).finished
        await hub.report([EvalReport(1, 32, 16, 0)])
        assert await hub.next_work("w2", 1, 2) == Work(stop=True)
        with pytest.raises(HubError, match=r"evaluation of version 7; the hub asked for \[0, 1\]"):
            await hub.report([EvalReport(7, 1, 1, 0)])

    run(story())
    assert [(row["version"], row["num_passed"]) for row in rows(tmp_path / "evaluations.jsonl")] == [(0, 8), (1, 16)]


def test_reports_go_to_their_files(make_hub: MakeHub, tmp_path: Path) -> None:
    hub = make_hub()
    span = Span("w0", "load", 1.0, 2.5, 1, "13 MB")
    sync = SyncReport("w0", 1, 13, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    probe = ProbeReport("w0", 1, 40, 2e-6, 0.7)
    run(hub.report([span, sync, span, probe]))
    assert [Span(**row) for row in rows(tmp_path / "spans.jsonl")] == [span, span]
    assert [SyncReport(**row) for row in rows(tmp_path / "syncs.jsonl")] == [sync]
    assert [ProbeReport(**row) for row in rows(tmp_path / "probes.jsonl")] == [probe]


def test_a_sync_reported_during_a_poll_brings_work_at_the_new_version(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub(poll_s=5.0, sync={"max_staleness": 0})

    async def story() -> None:
        await work(hub, make_group)
        waiting = asyncio.create_task(hub.next_work("w0", 0, 9))
        await train(hub, 0)
        await asyncio.sleep(0.05)
        assert not waiting.done()  # published, and not active on the worker yet
        await hub.report([SyncReport("w0", 1, 13, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)])
        async with asyncio.timeout(1):
            assert [ticket.group.number for ticket in (await waiting).tickets] == [2, 3]

    run(story())


def test_a_metric_that_does_not_exist_is_none_never_nan(make_hub: MakeHub) -> None:
    hub = make_hub()
    with pytest.raises(HubError, match="use None"):
        run(hub.log_metrics({"step": 0, "loss": float("nan")}))


def test_a_worker_that_joins_late_gets_the_buckets_of_older_weights(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        await work(hub, make_group)
        await train(hub, 0)
        await work(hub, make_group, 1)
        await train(hub, 1, publish=False)
        await hub.publish(publication(2, weights_version=1, buckets=()))  # a step without an update
        newest = await hub.newer_version(0)
        assert newest
        assert (newest.manifest.version, newest.manifest.weights_version) == (2, 1)
        assert (newest.buckets, newest.manifest.tensors) == (("bucket",), publication(1).manifest.tensors)
        await work(hub, make_group, 2)
        await train(hub, 2, publish=False)
        await hub.publish(publication(3, buckets=("new",)))
        newest = await hub.newer_version(0)
        assert newest
        assert newest.buckets == ("new",)

    run(story())


def test_publications_without_their_weights_are_refused(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        await hub.publish(publication(0, buckets=()))
        await work(hub, make_group)
        await train(hub, 0, publish=False)
        with pytest.raises(HubError, match="no buckets, but its weights_version is 1 and the hub holds 0"):
            await hub.publish(publication(1, buckets=()))
        with pytest.raises(HubError, match=r"has 2 buckets, its manifest names \[0\]"):
            await hub.publish(Publication(publication(1).manifest, ("a", "b")))
        with pytest.raises(HubError, match="publish of version 2, but the learner's current version is 1"):
            await hub.publish(publication(2))
        assert (await hub.status()).published_version == 0
        await hub.publish(publication(1))

    run(story())


def test_a_hub_that_starts_again_finds_everything(make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path) -> None:
    async def before(hub: Hub) -> None:
        await work(hub, make_group)
        taken = await hub.take(0)
        groups = tuple(decode_group(payload).group for payload in taken.groups or ())
        await hub.begin_step(StepPlan(0, groups, 7, 3e-4, 4e-4))
        hub._ledger.commit_step(0, "digest")
        hub._save_step(0)  # and the kill comes before the Parquet file

    async def after(hub: Hub) -> None:
        assert (tmp_path / "trajectories" / "step-000000.parquet").exists()
        await hub.publish(publication(1))
        assert (await hub.take(1)).groups
        status = await hub.status()
        assert (status.trained, status.pending, status.version) == (2, 2, 1)

    run(before(make_hub()))
    run(after(make_hub()))
