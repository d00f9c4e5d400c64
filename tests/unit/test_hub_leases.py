"""Workers that go silent, come back, come late or never get an answer: who holds what. The hub is a plain object."""

import asyncio
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
    publication,
    run,
    submit,
    sync,
    train,
    work,
)

from shared.hub_state import HubStatus
from shared.ledger_rows import GroupState
from shared.records import EvalReport, GroupId, Ticket, Work

LEASE_S = 30.0


def test_a_silent_worker_is_lost_and_its_groups_go_to_others(
    make_hub: MakeHub, make_group: MakeGroup, clock: Clock, tmp_path: Path
) -> None:
    hub = make_hub()

    async def story() -> None:
        held = await ask(hub, worker="silent", max_groups=2)
        clock.sleep(LEASE_S - 1)
        assert await ask(hub, worker="w0", max_groups=2) == [Ticket(GroupId(2)), Ticket(GroupId(3))]
        clock.sleep(2)
        again = await ask(hub, worker="w0", max_groups=2, holds=[Ticket(GroupId(2)), Ticket(GroupId(3))])
        assert again == [Ticket(GroupId(0), 1), Ticket(GroupId(1), 1)]
        assert ("lost", "silent") in events(tmp_path)
        assert not await submit(hub, make_group, held[0], worker="silent")  # late
        assert await submit(hub, make_group, again[0], worker="w0")
        assert not await submit(hub, make_group, held[0], worker="silent")  # and still
        assert "silent" in (await hub.status()).workers  # it is heard of again, and may go on

    run(story())


def test_a_worker_that_was_lost_may_come_back(make_hub: MakeHub, make_group: MakeGroup, clock: Clock) -> None:
    hub = make_hub(sync={"max_staleness": 0})

    async def story() -> None:
        await ask(hub)
        clock.sleep(LEASE_S + 1)
        assert await ask(hub, worker="w1", max_groups=1) == [Ticket(GroupId(0), 1)]
        assert await work(hub, make_group) == [Ticket(GroupId(1), 1)]

    run(story())


def test_the_learners_wait_is_enough_to_notice_a_lost_worker(make_hub: MakeHub, clock: Clock, tmp_path: Path) -> None:
    hub = make_hub()

    async def story() -> None:
        await ask(hub)
        clock.sleep(LEASE_S + 1)
        await hub.take(LEARNER, 0)
        assert ("lost", "w0") in events(tmp_path)
        assert hub._core.ledger.row(GroupId(0)).state is GroupState.WAITING

    run(story())


def test_a_heartbeat_renews_the_lease(make_hub: MakeHub, make_group: MakeGroup, clock: Clock, tmp_path: Path) -> None:
    hub = make_hub()

    async def story() -> None:
        tickets = await ask(hub)
        for _ in range(3):
            clock.sleep(LEASE_S - 1)
            await hub.heartbeat("w0")
        assert await submit(hub, make_group, tickets[0])
        assert ("lost", "w0") not in events(tmp_path)

    run(story())


def test_who_leaves_gives_back_at_once(make_hub: MakeHub, tmp_path: Path) -> None:
    hub = make_hub(poll_s=10.0, sync={"max_staleness": 0})

    async def story() -> None:
        await ask(hub)
        waiting = asyncio.create_task(ask(hub, worker="w1"))
        await asyncio.sleep(0.001)
        await hub.leave("w0", "drained")
        assert await waiting == [Ticket(GroupId(0), 1), Ticket(GroupId(1), 1)]
        await hub.leave("w0", "once more")  # its service says so too
        assert events(tmp_path).count(("left", "w0")) == 1
        assert list((await hub.status()).workers) == ["w1"]

    run(story())


@pytest.mark.parametrize("how", ["silent", "left", "left with nothing to give back"])
def test_who_is_gone_gets_nothing_in_a_poll_it_left_behind(make_hub: MakeHub, clock: Clock, how: str) -> None:
    """A call that waits in the hub outlives its caller's process; what it would be given, nobody would make."""
    hub = make_hub(poll_s=0.2, sync={"max_staleness": 0})

    async def story() -> None:
        held = await ask(hub, worker="w0")
        left_behind = asyncio.create_task(hub.next_work("gone", 0, (), 9))
        await asyncio.sleep(0.001)
        if how == "silent":
            clock.sleep(LEASE_S + 1)
            await hub.heartbeat("w1")
        else:
            await hub.leave("gone")
        if how == "left":
            await hub.leave("w0")
        assert await left_behind == Work()
        assert "gone" not in (await hub.status()).workers
        assert hub._core.ledger.num_held() == ({"w0": len(held)} if how.endswith("back") else {})

    run(story())


def test_ten_lost_workers_lose_no_group(make_hub: MakeHub, make_group: MakeGroup, clock: Clock) -> None:
    hub = make_hub(rollout={"max_attempts": 20})

    async def story() -> None:
        lost: list[tuple[str, Ticket]] = []
        for number in range(10):
            name = f"lost-{number}"
            tickets = await ask(hub, worker=name)
            assert [ticket.attempt for ticket in tickets] == [number] * 4
            lost += [(name, ticket) for ticket in tickets]
            clock.sleep(LEASE_S + 1)
            hub._core.ledger.check()
        for step in range(3):
            await work(hub, make_group, step, "last")
            await train(hub, step)
        for name, ticket in lost:
            assert not await submit(hub, make_group, ticket, worker=name)
        status = await hub.status()
        assert (status.issued, status.trained, status.dropped, status.pending) == (6, 6, {}, 0)
        hub._core.ledger.check()

    run(story())


def test_a_group_that_loses_too_many_workers_is_dropped_and_said_so(
    make_hub: MakeHub, make_group: MakeGroup, clock: Clock
) -> None:
    hub = make_hub(rollout={"max_attempts": 2})

    async def story() -> None:
        for name in ("a", "b"):
            await ask(hub, worker=name, max_groups=1)
            clock.sleep(LEASE_S + 1)
        assert await ask(hub, max_groups=1) == [Ticket(GroupId(0, 1))]
        assert (await hub.status()).dropped == {"worker_lost": 1}
        assert hub._core.ledger.row(GroupId(0)).detail == "2 workers were lost with it"

    run(story())


def test_a_lost_worker_is_counted_in_the_status_until_then(make_hub: MakeHub, clock: Clock) -> None:
    hub = make_hub()

    async def story() -> None:
        await ask(hub, max_groups=3)
        clock.sleep(7)
        status: HubStatus = await hub.status()
        worker = status.workers["w0"]
        assert (worker.age_s, worker.joined_s, worker.num_groups, worker.active_version) == (7, 7, 3, 0)
        clock.sleep(LEASE_S)
        assert (await hub.status()).workers == {}

    run(story())


def test_an_answer_that_never_arrived_is_taken_back(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        held = await ask(hub, max_groups=1)
        await ask(hub, max_groups=2, holds=held)  # groups 1 and 2, and the answer is lost
        again = await ask(hub, max_groups=3, holds=held)
        assert again == [Ticket(GroupId(1), 1), Ticket(GroupId(2), 1), Ticket(GroupId(3))]
        for ticket in (*held, *again):
            assert await submit(hub, make_group, ticket)
        assert not await submit(hub, make_group, Ticket(GroupId(1), 0))
        hub._core.ledger.check()

    run(story())


def test_an_evaluation_that_never_arrived_is_handed_out_again(make_hub: MakeHub) -> None:
    hub = make_hub(evaluation={"samples": 1})

    async def story() -> None:
        assert (await hub.next_work("w0", 0, (), 1)).evaluate_version == 0
        assert (await hub.next_work("w0", 0, (), 1)).evaluate_version == 0
        assert (await hub.next_work("w1", 0, (), 1)).evaluate_version is None
        await hub.report([EvalReport(0, 4, 2, 0)])
        assert (await hub.next_work("w0", 0, (), 1)).evaluate_version is None

    run(story())


def test_who_joins_late_gets_nothing_before_it_holds_the_weights_of_then(
    make_hub: MakeHub, make_group: MakeGroup
) -> None:
    """With staleness 1 the bound alone would let it start group 2 and 3 at version 0."""
    hub = make_hub()

    async def story() -> None:
        await hub.sit_down(LEARNER, IDENTITY)
        assert await hub.join("first", IDENTITY) == ""
        await work(hub, make_group, 0, "first", max_groups=2)
        await train(hub, 0)
        assert await hub.join("late", IDENTITY) == ""
        nothing = await hub.next_work("late", 0, (), 9)
        assert nothing == Work(waiting_for="version 1 on this worker, which has 0")
        assert await ask(hub, worker="first", max_groups=1) == [Ticket(GroupId(2))]  # it may, it was there before
        await hub.report([sync("late", 1)])
        assert [ticket.group.number for ticket in await ask(hub, 1, "late")] == [3, 4]  # its fair share

    run(story())


def test_workers_share_what_may_start_although_one_is_quicker(make_hub: MakeHub, make_group: MakeGroup) -> None:
    """Of 8 groups each of two gets 4, also when the first asks twice before the second asks once; alone it gets all."""
    hub = make_hub(learner={"steps": 3, "prompts_per_step": 8, "minibatches": 1}, sync={"max_staleness": 0})

    async def story() -> None:
        await hub.sit_down(LEARNER, IDENTITY)
        for worker in ("quick", "slow"):
            assert await hub.join(worker, IDENTITY) == ""
            await hub.report([sync(worker, 0)])
        first = await ask(hub, 0, "quick")
        assert [ticket.group.number for ticket in first] == [0, 1, 2, 3]
        assert (await hub.next_work("quick", 0, first, 9)).tickets == ()
        assert [ticket.group.number for ticket in await ask(hub, 0, "slow", 9)] == [4, 5, 6, 7]
        await hub.leave("slow")
        again = await hub.next_work("quick", 0, first, 9)
        assert [ticket.group.number for ticket in again.tickets] == [4, 5, 6, 7]

    run(story())


def test_who_joins_late_waits_for_a_learner_that_holds_the_weights(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        await hub.sit_down(LEARNER, IDENTITY)
        await work(hub, make_group)
        await train(hub, 0)
        await hub.get_up(LEARNER)
        assert await hub.join("late", IDENTITY) == ""
        work_for_it = await hub.next_work("late", 0, (), 9)
        assert work_for_it.tickets == ()
        assert work_for_it.waiting_for.endswith("has 0; the learner that held it is gone, the next one sends it")
        await hub.sit_down(LEARNER, IDENTITY)
        await hub.publish(LEARNER, publication(1))
        newest = await hub.newer_version(0)
        assert newest is not None
        await hub.report([sync("late", newest.manifest.version)])
        assert await ask(hub, 1, "late", 1) == [Ticket(GroupId(4))]

    run(story())
