"""The hub as a plain class, without Ray: who gets which work, what is refused, what is in the run directory."""

import asyncio
import re
from pathlib import Path

import pandas as pd
import pytest
from hub_stories import LEARNER, POLL_S, MakeGroup, MakeHub, ask, publication, rows, run, sync, train, work

from shared.errors import HubError, RunFailed, SchemaError
from shared.ledger import MAX_REPLACEMENTS
from shared.records import EvalReport, GroupId, Mismatch, ProbeReport, Publication, Span, SyncReport, Ticket, Work
from shared.run_files import read_probes
from shared.schema import decode_group, encode_group


def test_a_whole_run_leaves_its_records(make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path) -> None:
    hub = make_hub()

    async def story() -> None:
        await hub.publish(LEARNER, publication(0, buckets=()))
        for step in range(3):
            await work(hub, make_group, step)
            await train(hub, step)
            await hub.log_metrics(LEARNER, {"step": step, "loss": None, "clip_fraction_by_minibatch": [0.5, None]})
        assert await hub.next_work("w0", 3, (), 1) == Work(stop="now")
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
        taking = asyncio.create_task(hub.take(LEARNER, 0))
        version = asyncio.create_task(hub.newer_version(0))
        first = await work(hub, make_group)
        assert [decode_group(payload).group for payload in (await taking).groups or ()] == [t.group for t in first]
        more = asyncio.create_task(hub.next_work("w1", 0, (), 1))
        await asyncio.sleep(0.01)
        assert not more.done()
        assert not version.done()
        await train(hub, 0)
        assert (await version) == publication(1)
        hub._core.poll_s = POLL_S
        too_old = Work(waiting_for="version 1 on this worker, which has 0")
        assert await hub.next_work("w2", 0, (), 1) == too_old
        assert await hub.newer_version(1) is None
        more.cancel()

    run(story())


def test_the_learner_is_told_what_it_waits_for(make_hub: MakeHub) -> None:
    hub = make_hub(learner={"prompts_per_step": 6})

    async def story() -> None:
        await hub.next_work("w0", 0, (), 2)
        taken = await hub.take(LEARNER, 0)
        assert taken.groups is None
        assert taken.waiting_for.startswith("step 0 waits for group 0.0 (generating, w0, ")
        assert "2 (not issued), 3 (not issued) and 2 more; workers seen: w0" in taken.waiting_for

    run(story())


def test_a_failure_of_one_side_reaches_the_other_at_once(make_hub: MakeHub) -> None:
    hub = make_hub(poll_s=10.0)

    async def story() -> None:
        tickets = await ask(hub)
        taking = asyncio.create_task(hub.take(LEARNER, 0))
        asking = asyncio.create_task(hub.next_work("w0", 0, tickets, 1))
        await asyncio.sleep(0)
        await hub.fail("learner", "Traceback ...\nZeroDivisionError: division by zero")
        text = r"the learner side of the run failed:\nTraceback[^$]*ZeroDivisionError"
        with pytest.raises(RunFailed, match=text):
            await taking
        work = await asking
        assert work.stop == "now"
        assert re.match(text, work.waiting_for)
        await hub.fail("learner", "because of the other one")
        assert "ZeroDivisionError" in str((await hub.status()).failure)

    run(story())


def test_a_disk_that_fails_stops_the_run(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        (ticket,) = (await hub.next_work("w0", 0, (), 1)).tickets
        hub._core.store.close()
        with pytest.raises(Exception, match="closed database"):
            await hub.submit("w0", ticket, encode_group(make_group(ticket, "w0")))
        with pytest.raises(RunFailed, match="the hub side of the run failed"):
            await hub.take(LEARNER, 0)

    run(story())


def test_what_a_worker_sends_must_be_what_it_was_asked_for(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        await hub.publish(LEARNER, publication(0, buckets=()))
        first, second = (await hub.next_work("w0", 0, (), 2)).tickets
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
            await hub.next_work("w0", 0, (), 0)
        assert await hub.submit("w0", first, encode_group(make_group(first, "w0")))
        assert await hub.submit("w0", first, encode_group(make_group(first, "w0")))  # its acknowledgment was lost

    run(story())


def test_tokens_that_would_be_too_old_when_trained_are_refused(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub(sync={"max_staleness": 0})

    async def story() -> None:
        await work(hub, make_group)
        await train(hub, 0)
        (ticket,) = (await hub.next_work("w0", 1, (), 1)).tickets
        with pytest.raises(HubError, match=r"tokens of versions \[0\]; versions 1 \(sync\.max_staleness\) to 1"):
            await hub.submit("w0", ticket, encode_group(make_group(ticket, "w0", spans=((0, 2), (1, 2)))))

    run(story())


def test_a_dropped_group_is_counted_and_replaced(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        zero, one = (await hub.next_work("w0", 0, (), 2)).tickets
        await hub.give_up("w0", zero, "reward_error", "three scores for four")
        assert not await hub.submit("w0", zero, encode_group(make_group(zero, "w0")))
        (again,) = (await hub.next_work("w0", 0, (one,), 1)).tickets
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
            (ticket,) = (await hub.next_work("w0", 0, (), 1)).tickets
            await hub.give_up("w0", ticket, "reward_error", "three scores for four")
        (ticket,) = (await hub.next_work("w0", 0, (), 1)).tickets
        with pytest.raises(RunFailed, match="replaced 100 times"):
            await hub.give_up("w0", ticket, "reward_error", "three scores for four")
        with pytest.raises(RunFailed, match="three scores for four"):
            await hub.take(LEARNER, 0)

    run(story())


def test_a_lost_workers_groups_are_issued_again(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub(poll_s=10.0, sync={"max_staleness": 0})

    async def story() -> None:
        lost = (await hub.next_work("lost", 0, (), 2)).tickets
        asking = asyncio.create_task(hub.next_work("w0", 0, (), 2))
        await asyncio.sleep(0)
        await hub.leave("lost")
        assert (await asking).tickets == (Ticket(GroupId(0), 1), Ticket(GroupId(1), 1))
        assert not await hub.submit("lost", lost[0], encode_group(make_group(lost[0], "lost")))

    run(story())


def test_the_first_and_the_last_version_are_evaluated_once(
    make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path
) -> None:
    hub = make_hub(evaluation={"samples": 2}, learner={"steps": 1})

    async def story() -> None:
        assert await hub.next_work("w0", 0, (), 2) == Work(evaluate_version=0)
        assert (await hub.next_work("w2", 0, (), 1)).tickets  # others generate meanwhile
        await hub.leave("w2")
        await hub.leave("w0")
        assert await hub.next_work("w1", 0, (), 2) == Work(evaluate_version=0)
        await hub.report([EvalReport(0, 32, 8, 0)])
        await hub.report([EvalReport(0, 32, 9, 0)])  # of the worker that was believed lost
        await work(hub, make_group, worker="w1")
        await train(hub, 0)
        assert (await hub.next_work("w1", 0, (), 2)).evaluate_version is None
        assert await hub.next_work("w1", 1, (), 2) == Work(evaluate_version=1)
        assert (await hub.next_work("w2", 1, (), 2)).evaluate_version is None
        assert not (await hub.status()).finished
        await hub.report([EvalReport(1, 32, 16, 0)])
        assert await hub.next_work("w2", 1, (), 2) == Work(stop="now")
        await hub.report([EvalReport(7, 32, 4, 0)])  # asked for by a hub with another last step: a true result

    run(story())
    evaluations = [(row["version"], row["num_passed"]) for row in rows(tmp_path / "evaluations.jsonl")]
    assert evaluations == [(0, 8), (1, 16), (7, 4)]


def test_reports_go_to_their_files(make_hub: MakeHub, tmp_path: Path) -> None:
    hub = make_hub()
    span = Span("w0", "load", 1.0, 2.5, 1, "13 MB")
    synced = sync("w0", 1)
    probe = ProbeReport("w0", 1, Mismatch(40, 1e-6, 1e-12, 1e-12), 2e-6, 0.7, released=True)
    run(hub.report([span, synced, span, probe]))
    assert [Span(**row) for row in rows(tmp_path / "spans.jsonl")] == [span, span]
    assert [SyncReport(**row) for row in rows(tmp_path / "syncs.jsonl")] == [synced]
    assert read_probes(tmp_path) == [probe]


def test_a_sync_reported_during_a_poll_brings_work_at_the_new_version(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub(poll_s=5.0, sync={"max_staleness": 0})

    async def story() -> None:
        await work(hub, make_group)
        waiting = asyncio.create_task(hub.next_work("w0", 0, (), 9))
        await train(hub, 0)
        await asyncio.sleep(0.05)
        assert not waiting.done()  # published, and not active on the worker yet
        await hub.report([sync("w0", 1)])
        async with asyncio.timeout(1):
            assert [ticket.group.number for ticket in (await waiting).tickets] == [2, 3]

    run(story())


def test_a_metric_that_does_not_exist_is_none_never_nan(make_hub: MakeHub) -> None:
    hub = make_hub()
    with pytest.raises(HubError, match="use None"):
        run(hub.log_metrics(LEARNER, {"step": 0, "loss": float("nan")}))


def test_a_worker_that_joins_late_gets_the_buckets_of_older_weights(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        await work(hub, make_group)
        await train(hub, 0)
        await work(hub, make_group, 1)
        await train(hub, 1, publish=False)
        await hub.publish(LEARNER, publication(2, weights_version=1, buckets=()))  # a step without an update
        newest = await hub.newer_version(0)
        assert newest
        assert (newest.manifest.version, newest.manifest.weights_version) == (2, 1)
        assert (newest.buckets, newest.manifest.tensors) == (("bucket",), publication(1).manifest.tensors)
        await work(hub, make_group, 2)
        await train(hub, 2, publish=False)
        await hub.publish(LEARNER, publication(3, buckets=("new",)))
        newest = await hub.newer_version(0)
        assert newest
        assert newest.buckets == ("new",)

    run(story())


def test_publications_without_their_weights_are_refused(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        await hub.publish(LEARNER, publication(0, buckets=()))
        await work(hub, make_group)
        await train(hub, 0, publish=False)
        with pytest.raises(HubError, match="no buckets, but its weights_version is 1 and the hub holds 0"):
            await hub.publish(LEARNER, publication(1, buckets=()))
        with pytest.raises(HubError, match=r"has 2 buckets, its manifest names \[0\]"):
            await hub.publish(LEARNER, Publication(publication(1).manifest, ("a", "b")))
        with pytest.raises(HubError, match="publish of version 2, but the learner's current version is 1"):
            await hub.publish(LEARNER, publication(2))
        assert (await hub.status()).published_version == 0
        await hub.publish(LEARNER, publication(1))

    run(story())
