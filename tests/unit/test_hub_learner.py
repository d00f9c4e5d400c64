"""The learner's seat, who may join, what a failure does, and calls that are made twice. The hub is a plain object."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hub_stories import (
    IDENTITY,
    LEARNER,
    Clock,
    MakeGroup,
    MakeHub,
    ask,
    events,
    plan,
    publication,
    rows,
    run,
    submit,
    train,
    work,
)

from shared.errors import ConfigError, HubError, RunFailed, SeatTaken
from shared.hub import Hub
from shared.records import ClipRange, ResumePoint, StepPlan, Work

LEASE_S = 30.0
SAME_HOST, OTHER_HOST = "host-a:200-bb", "host-b:100-cc"


# ---- joining


def test_a_worker_waits_for_the_learner_and_is_let_in_when_it_comes(make_hub: MakeHub, tmp_path: Path) -> None:
    hub = make_hub()

    async def story() -> None:
        assert await hub.check(IDENTITY) == "this run's learner, which has not come yet"
        assert await hub.join("w0", IDENTITY) == "this run's learner, which has not come yet"
        assert (await hub.status()).workers == {}
        hub._core.poll_s = 10.0
        joining = asyncio.create_task(hub.join("w0", IDENTITY))
        await asyncio.sleep(0.001)
        started_s = time.monotonic()
        await hub.sit_down(LEARNER, IDENTITY)
        assert await joining == ""
        assert time.monotonic() - started_s < 1
        assert await hub.join("w0", IDENTITY) == ""  # its acknowledgment was lost
        assert events(tmp_path)[1:] == [("learner_came", LEARNER), ("joined", "w0")]

    run(story())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(IDENTITY, model="model-2"), r"model: the worker has model-2, the learner model-1"),
        (replace(IDENTITY, tokenizer="tokenizer-2"), r"tokenizer: the worker has tokenizer-2, the learner tokenizer-1"),
        (replace(IDENTITY, schema="schema-2"), r"schema: the worker has schema-2, the learner schema-1"),
        (replace(IDENTITY, code="code-2"), r"code: the worker has code-2, the learner code-1"),
        (
            replace(IDENTITY, settings={"sampling.temperature": "0.6"}),
            r"sampling\.temperature: the worker has 0\.6, the learner 1\.0",
        ),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_with_both_values(
    make_hub: MakeHub, tmp_path: Path, other: object, said: str
) -> None:
    hub = make_hub()

    async def story() -> None:
        await hub.sit_down(LEARNER, IDENTITY)
        for call in (hub.check(other), hub.join("w0", other)):
            with pytest.raises(ConfigError, match=said):
                await call
        assert (await hub.status()).workers == {}

    run(story())
    (refusal,) = [row for row in rows(tmp_path / "events.jsonl") if row["name"] == "refused"]
    assert refusal["who"] == "w0"
    assert "this worker does not belong to the learner's run" in refusal["detail"]


@pytest.mark.parametrize("end", [lambda hub: hub.request_stop(), lambda hub: hub.fail("learner", "out of memory")])
def test_who_comes_after_a_run_was_stopped_or_failed_waits_for_the_next_learner(
    make_hub: MakeHub, end: Callable[[Hub], Awaitable[None]]
) -> None:
    hub = make_hub()

    async def story() -> None:
        await hub.sit_down(LEARNER, IDENTITY)
        await hub.join("before", IDENTITY)
        await end(hub)
        assert await hub.join("during", IDENTITY) == ""  # whose engine was starting; it ends with the others
        assert (await hub.next_work("before", 0, (), 1)).stop
        await hub.get_up(LEARNER)
        assert (await hub.next_work("before", 0, (), 1)).stop  # it was busy until now
        waits = "a learner that resumes this run, which was stopped or failed"
        assert await hub.join("after", IDENTITY) == waits
        await hub.sit_down(SAME_HOST, IDENTITY)
        assert await hub.join("after", IDENTITY) == ""
        assert (await hub.next_work("after", 0, (), 1)).tickets

    run(story())


# ---- the seat


def test_a_second_learner_is_refused_while_the_first_is_alive(make_hub: MakeHub, clock: Clock) -> None:
    hub = make_hub()

    async def story() -> None:
        await hub.sit_down(LEARNER, IDENTITY)
        clock.sleep(LEASE_S - 1)
        await hub.learner_alive(LEARNER, IDENTITY)
        clock.sleep(LEASE_S - 5)
        with pytest.raises(SeatTaken, match=rf"trained by learner {LEARNER}, heard of 25 s ago.*wait 30 s"):
            await hub.sit_down(OTHER_HOST, IDENTITY)
        status = await hub.status()
        assert (status.learner, status.learner_age_s) == (LEARNER, 25)
        clock.sleep(6)
        await hub.sit_down(OTHER_HOST, IDENTITY)
        assert (await hub.status()).learner == OTHER_HOST

    run(story())


def test_a_learner_of_the_same_host_takes_over_at_once(make_hub: MakeHub) -> None:
    """Both would hold the run directory's lock: the first one is dead."""
    hub = make_hub()

    async def story() -> None:
        await hub.sit_down(LEARNER, IDENTITY)
        await hub.sit_down(SAME_HOST, IDENTITY)
        assert (await hub.status()).learner == SAME_HOST

    run(story())


PLAN = StepPlan(0, (), 0, ClipRange(3e-4, 4e-4))
LEARNERS_CALLS: dict[str, Callable[[Hub], Awaitable[object]]] = {
    "take": lambda hub: hub.take(LEARNER, 0),
    "begin_step": lambda hub: hub.begin_step(LEARNER, PLAN),
    "commit_step": lambda hub: hub.commit_step(LEARNER, 0, "digest"),
    "publish": lambda hub: hub.publish(LEARNER, publication(0, buckets=())),
    "publish_again": lambda hub: hub.publish_again(LEARNER, publication(0, buckets=())),
    "log_metrics": lambda hub: hub.log_metrics(LEARNER, {"step": 0}),
    "recorded_step": lambda hub: hub.recorded_step(LEARNER, 0),
    "replace_weights": lambda hub: hub.replace_weights(LEARNER, "digest"),
    "learner_alive": lambda hub: hub.learner_alive(LEARNER, IDENTITY),
}


@pytest.mark.parametrize("call", LEARNERS_CALLS)
def test_a_learner_that_was_replaced_or_has_left_is_refused(make_hub: MakeHub, call: str) -> None:
    hub = make_hub()

    async def story() -> None:
        await hub.sit_down(LEARNER, IDENTITY)
        await hub.sit_down(SAME_HOST, IDENTITY)
        with pytest.raises(SeatTaken, match=f"learner {LEARNER} was replaced by {SAME_HOST}"):
            await LEARNERS_CALLS[call](hub)
        await hub.get_up(LEARNER)  # not its seat
        assert (await hub.status()).learner == SAME_HOST
        await hub.get_up(SAME_HOST)
        with pytest.raises(SeatTaken, match=f"learner {LEARNER} has left, or was replaced"):
            await LEARNERS_CALLS[call](hub)
        assert (await hub.status()).learner is None

    run(story())


def test_with_the_learner_its_weights_go(make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path) -> None:
    hub = make_hub()

    async def story() -> None:
        await hub.sit_down(LEARNER, IDENTITY)
        await work(hub, make_group)
        await train(hub, 0)
        assert await hub.newer_version(0) == publication(1)
        await hub.get_up(LEARNER)
        assert await hub.newer_version(0) is None
        await hub.get_up(LEARNER)
        assert events(tmp_path).count(("learner_left", LEARNER)) == 1
        await hub.sit_down(LEARNER, IDENTITY)
        await hub.publish(LEARNER, publication(1))
        await hub.sit_down(SAME_HOST, IDENTITY)  # the first was killed
        assert await hub.newer_version(0) is None

    run(story())


def test_a_new_learner_goes_on_where_the_ledger_says(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        assert await hub.sit_down(LEARNER, IDENTITY) == ResumePoint(0)
        await work(hub, make_group)
        await train(hub, 0)
        begun = await plan(hub, 1)
        assert await hub.sit_down(SAME_HOST, IDENTITY) == ResumePoint(1)
        await hub.begin_step(SAME_HOST, begun)
        await hub.fail("learner", "out of memory")
        assert await hub.sit_down(LEARNER, IDENTITY) == ResumePoint(1, begun)
        assert (await hub.take(LEARNER, 1)).groups  # the failure was its predecessor's
        with pytest.raises(HubError, match="cannot be begun again"):
            await hub.begin_step(LEARNER, replace(begun, minibatch_seed=8))

    run(story())


# ---- failure and stop


def test_a_rollout_service_that_fails_stops_nothing_while_others_work(
    make_hub: MakeHub, make_group: MakeGroup, clock: Clock, tmp_path: Path
) -> None:
    hub = make_hub(poll_s=10.0)

    async def story() -> None:
        await ask(hub, worker="dead", max_groups=1)
        await ask(hub, worker="alive", max_groups=1)
        await hub.leave("dead")
        await hub.fail("rollout", "Traceback: first")
        assert (await hub.status()).failure is None
        assert ("failed", "rollout") in events(tmp_path)
        taking = asyncio.create_task(hub.take(LEARNER, 0))
        await asyncio.sleep(0.001)
        clock.sleep(LEASE_S + 1)  # now the other one is silent, too
        started_s = time.monotonic()
        await hub.fail("rollout", "Traceback: second")
        with pytest.raises(RunFailed, match="the rollout side of the run failed:\nTraceback: second"):
            await taking
        assert time.monotonic() - started_s < 1

    run(story())


def test_a_failure_counts_although_a_call_of_the_last_worker_still_waits_here(make_hub: MakeHub) -> None:
    hub = make_hub(poll_s=0.2, sync={"max_staleness": 0})

    async def story() -> None:
        held = await ask(hub)
        left_behind = asyncio.create_task(hub.next_work("w0", 0, held, 9))
        await asyncio.sleep(0.001)
        await hub.leave("w0", "RuntimeError")
        await asyncio.sleep(0.001)
        await hub.fail("rollout", "Traceback: RuntimeError")
        assert "RuntimeError" in str((await hub.status()).failure)
        await left_behind

    run(story())


def test_a_stop_reaches_the_learner_and_workers_that_wait(make_hub: MakeHub, tmp_path: Path) -> None:
    hub = make_hub(poll_s=10.0, sync={"max_staleness": 0})

    async def story() -> None:
        await hub.sit_down(LEARNER, IDENTITY)
        held = await ask(hub)
        asking = asyncio.create_task(hub.next_work("w0", 0, held, 9))
        await asyncio.sleep(0.001)
        assert not (await hub.learner_alive(LEARNER, IDENTITY)).stop
        await hub.request_stop()
        assert await asking == Work(stop="drain")
        assert (await hub.learner_alive(LEARNER, IDENTITY)).stop
        assert (await hub.status()).stopping
        assert ("stop_requested", "hub") in events(tmp_path)
        await hub.sit_down(LEARNER, IDENTITY)  # resumed
        assert not (await hub.status()).stopping

    run(story())


# ---- the same call again


def test_every_call_may_be_made_again(make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path) -> None:
    """An answer may be lost with the hub: state and files after the second call are those after the first."""
    hub = make_hub()

    async def twice(call: Callable[[], Awaitable[object]]) -> None:
        answer = await call()
        before = state(hub)
        assert await call() == answer
        assert state(hub) == before
        hub._core.ledger.check()

    async def story() -> None:
        await twice(lambda: hub.sit_down(LEARNER, IDENTITY))
        await twice(lambda: hub.join("w0", IDENTITY))
        dropped, *tickets = await ask(hub, max_groups=3)
        await twice(lambda: hub.give_up("w0", dropped, "reward_error", "three scores for four"))
        tickets += await ask(hub, max_groups=1, holds=tickets)
        for ticket in tickets:
            await twice(lambda ticket=ticket: submit(hub, make_group, ticket))
        await twice(lambda: hub.take(LEARNER, 0))
        begun = await plan(hub, 0)
        await twice(lambda: hub.begin_step(LEARNER, begun))
        await twice(lambda: hub.commit_step(LEARNER, 0, "digest"))
        with pytest.raises(HubError, match="commit_step of step 0, but the next step is 1"):
            await hub.commit_step(LEARNER, 0, "another digest")
        await twice(lambda: hub.replace_weights(LEARNER, "other weights"))
        assert hub._core.ledger.incarnation == 1
        await twice(lambda: hub.publish(LEARNER, publication(1, incarnation=1)))
        await twice(lambda: hub.publish_again(LEARNER, publication(1, incarnation=1)))
        await twice(lambda: hub.recorded_step(LEARNER, 0))
        await twice(lambda: hub.log_metrics(LEARNER, {"step": 0}))
        await twice(lambda: hub.request_stop())
        await twice(lambda: hub.fail("learner", "boom"))
        await twice(lambda: hub.leave("w0"))
        await twice(lambda: hub.get_up(LEARNER))

    def state(hub: Hub) -> object:
        ledger = hub._core.ledger
        steps = [ledger.step_row(step) for step in ledger._steps]
        files = [rows(tmp_path / f"{name}.jsonl") for name in ("metrics", "syncs")]
        seats = (hub._core.seat.holder, [name for name, _ in hub._core.workers.items()], hub._core.failure)
        return ledger.balance(), dict(ledger._rows), steps, hub._core.store.load(), files, seats

    run(story())
    assert len(list((tmp_path / "trajectories").iterdir())) == 1


def test_a_step_that_is_trained_again_is_logged_once(make_hub: MakeHub, tmp_path: Path) -> None:
    async def story(hub: Hub, steps: tuple[int, ...], loss: float) -> None:
        for step in steps:
            await hub.log_metrics(LEARNER, {"step": step, "loss": loss})

    run(story(make_hub(), (0, 1, 2), 0.1))
    run(story(make_hub(), (1, 2, 3), 0.2))  # resumed from the checkpoint of version 1
    found = [(row["step"], row["loss"]) for row in rows(tmp_path / "metrics.jsonl")]
    assert found == [(0, 0.1), (1, 0.1), (2, 0.1), (3, 0.2)]
