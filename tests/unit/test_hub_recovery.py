"""A hub that is killed at any stage comes back from the run directory: nothing is lost, nothing happens twice.

Killing is closing and making it again on the same folder: every change is on disk before its call returns.
"""

import sqlite3
from pathlib import Path

import pandas as pd
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
    sync,
    train,
    work,
)

from shared.errors import RunFailed
from shared.hub import Hub
from shared.hub_state import LearnerOrders
from shared.ledger_rows import GroupState
from shared.records import ClipRange, EvalReport, GroupId, ResumePoint, StepPlan, Ticket, Work
from shared.run_files import read_ledger
from shared.store import Store


async def finish(hub: Hub, make_group: MakeGroup, tmp_path: Path, worker: str = "w9") -> None:
    """Train what is left of the 3 steps of 2 groups; every group is trained once, and its bytes are in one file."""
    for step in range(hub._core.ledger.version, 3):
        hub._core.ledger.check()
        await work(hub, make_group, step, worker)
        await train(hub, step)
    status = await hub.status()
    assert status.finished
    assert status.pending == 0
    assert status.trained == 6
    files = sorted((tmp_path / "trajectories").iterdir())
    numbers = [n for file in files for n in pd.read_parquet(file)["group_number"].unique()]
    assert numbers == list(range(6))
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        assert database.execute("SELECT count(*) FROM payloads").fetchone() == (0,)


def test_killed_while_groups_are_generated(make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path) -> None:
    async def story() -> None:
        zero, one, two = await ask(make_hub(), max_groups=3)
        hub = make_hub()
        assert await submit(hub, make_group, zero)  # the worker did not notice
        assert await ask(hub, holds=[one, two]) == [Ticket(GroupId(3))]
        for ticket in (one, two, Ticket(GroupId(3))):
            assert await submit(hub, make_group, ticket)
        await finish(hub, make_group, tmp_path)

    run(story())


def test_killed_together_with_the_worker(
    make_hub: MakeHub, make_group: MakeGroup, clock: Clock, tmp_path: Path
) -> None:
    """Nobody says that the worker is gone: its lease, which the new hub gives it, runs out."""

    async def story() -> None:
        await ask(make_hub(), worker="dead", max_groups=4)
        hub = make_hub()
        assert (await hub.status()).workers["dead"].num_groups == 4
        clock.sleep(31)
        assert ("lost", "dead") not in events(tmp_path)
        await hub.heartbeat("w9")
        assert ("lost", "dead") in events(tmp_path)
        hub = make_hub()  # that it was lost is known
        await finish(hub, make_group, tmp_path)
        assert hub._core.ledger.row(GroupId(0)).attempt == 1

    run(story())


def test_killed_before_the_answer_left(make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path) -> None:
    async def story() -> None:
        held = await ask(make_hub(), max_groups=1)
        await ask(make_hub(), max_groups=2, holds=held)
        hub = make_hub()
        assert await ask(hub, max_groups=2, holds=held) == [Ticket(GroupId(1), 1), Ticket(GroupId(2), 1)]
        for ticket in (*held, Ticket(GroupId(1), 1), Ticket(GroupId(2), 1)):
            assert await submit(hub, make_group, ticket)
        await finish(hub, make_group, tmp_path)

    run(story())


def test_killed_between_take_and_begin(make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path) -> None:
    async def story() -> None:
        hub = make_hub()
        await work(hub, make_group)
        taken = await plan(hub, 0)
        hub = make_hub()
        assert hub._core.ledger.begun_plan() is None
        await hub.begin_step(LEARNER, taken)
        assert {hub._core.ledger.row(group).state for group in taken.groups} == {GroupState.TAKEN}
        await hub.commit_step(LEARNER, 0, "digest")
        await hub.publish(LEARNER, publication(1))
        await finish(hub, make_group, tmp_path)

    run(story())


def test_killed_between_begin_and_commit(make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path) -> None:
    async def story() -> None:
        hub = make_hub()
        await work(hub, make_group)
        begun = await plan(hub, 0)
        await hub.begin_step(LEARNER, begun)
        hub = make_hub()
        assert await hub.sit_down(LEARNER, IDENTITY) == ResumePoint(0, begun)
        assert await plan(hub, 0) == begun
        hub = make_hub()
        await hub.commit_step(LEARNER, 0, "digest")  # of a learner that went on all the while
        await hub.publish(LEARNER, publication(1))
        await finish(hub, make_group, tmp_path)

    run(story())


def test_killed_between_commit_and_its_file(make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path) -> None:
    async def story() -> None:
        hub = make_hub()
        await work(hub, make_group)
        await hub.begin_step(LEARNER, await plan(hub, 0))
        hub._core.ledger.commit_step(0, "digest-0")
        hub._core.save_step(0)
        assert list((tmp_path / "trajectories").iterdir()) == []
        hub = make_hub()
        assert len(list((tmp_path / "trajectories").iterdir())) == 1
        await hub.commit_step(LEARNER, 0, "digest-0")  # its acknowledgment was lost
        await hub.publish(LEARNER, publication(1))
        await finish(hub, make_group, tmp_path)

    run(story())


def test_killed_between_commit_and_publish(make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path) -> None:
    async def story() -> None:
        hub = make_hub()
        await work(hub, make_group)
        await train(hub, 0, publish=False)
        hub = make_hub()
        status = await hub.status()
        assert (status.version, status.published_version) == (1, 0)
        assert await hub.learner_alive(LEARNER, IDENTITY) == LearnerOrders()  # it is about to publish
        assert await ask(hub) == []  # no room yet
        await hub.publish(LEARNER, publication(1))
        await finish(hub, make_group, tmp_path)

    run(story())


def test_the_weights_that_a_killed_hub_lost_are_sent_again(make_hub: MakeHub, make_group: MakeGroup) -> None:
    async def story() -> None:
        hub = make_hub()
        await work(hub, make_group)
        await train(hub, 0)
        assert not (await hub.learner_alive(LEARNER, IDENTITY)).republish
        hub = make_hub()
        assert await hub.newer_version(0) is None
        assert (await hub.learner_alive(LEARNER, IDENTITY)).republish
        for stale in (publication(0), publication(2)):
            await hub.publish_again(LEARNER, stale)
            assert await hub.newer_version(0) is None
        await hub.publish_again(LEARNER, publication(1))
        assert await hub.newer_version(0) == publication(1)
        assert not (await hub.learner_alive(LEARNER, IDENTITY)).republish
        await hub.publish_again(LEARNER, publication(1, buckets=("older", "call")))
        assert await hub.newer_version(0) == publication(1)
        assert await hub.join("late", IDENTITY) == ""  # the learner's sign of life said who it is

    run(story())


def test_an_evaluation_that_is_done_is_not_handed_out_again(make_hub: MakeHub) -> None:
    async def story() -> None:
        sections = {"evaluation": {"samples": 1}}
        hub = make_hub(**sections)
        assert (await hub.next_work("w0", 0, (), 1)).evaluate_version == 0
        hub = make_hub(**sections)
        assert (await hub.next_work("w1", 0, (), 1)).evaluate_version == 0
        await hub.report([EvalReport(0, 4, 2, 0)])
        hub = make_hub(**sections)
        assert (await hub.next_work("w0", 0, (), 1)).evaluate_version is None

    run(story())


def test_a_finished_run_is_finished_after_a_kill(make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path) -> None:
    async def story() -> None:
        await finish(make_hub(), make_group, tmp_path)
        assert await make_hub().next_work("w0", 3, (), 1) == Work(stop="now")

    run(story())
    assert [name for name, _ in events(tmp_path)] == ["hub_started"] * 2


def test_a_kill_after_every_call_changes_nothing(make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path) -> None:
    async def story() -> None:
        for step in range(3):
            for ticket in await ask(make_hub(), step):
                assert await submit(make_hub(), make_group, ticket, step)
            begun = await plan(make_hub(), step)
            await make_hub().begin_step(LEARNER, begun)
            await make_hub().commit_step(LEARNER, step, f"digest-{step}")
            await make_hub().publish(LEARNER, publication(step + 1))
        await finish(make_hub(), make_group, tmp_path)

    run(story())
    groups, steps = read_ledger(tmp_path)
    assert [row.attempt for row in groups] == [0] * 6
    assert [row.weights_digest for row in steps] == ["digest-0", "digest-1", "digest-2"]


async def train_first(hub: Hub) -> None:
    await hub.begin_step(LEARNER, StepPlan(0, (GroupId(0), GroupId(1)), 7, ClipRange(3e-4, 4e-4)))
    await hub.commit_step(LEARNER, 0, "digest-0")
    await hub.publish(LEARNER, publication(1))


@pytest.mark.parametrize("write", ["save_groups", "save_ready", "save_step", "save_published", "payloads"])
def test_after_a_write_that_failed_the_next_learner_starts_from_the_disk(
    make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    """The disk was full, and is not any more; the hub is the same process."""
    hub, last = make_hub(), Ticket(GroupId(3))

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    async def call_that_writes() -> None:
        if write == "save_groups":
            await hub.give_up("w0", last, "timeout", "")
        elif write == "save_ready":
            await submit(hub, make_group, last)
        else:
            await train_first(hub)

    async def story() -> None:
        await hub.sit_down(LEARNER, IDENTITY)
        for ticket in (await ask(hub))[:3]:
            await submit(hub, make_group, ticket)
        with monkeypatch.context() as patch:
            patch.setattr(Store, write, full)
            with pytest.raises(OSError, match="No space"):
                await call_that_writes()
        with pytest.raises(RunFailed, match="the hub side of the run failed"):
            await hub.take(LEARNER, hub._core.ledger.version)
        await hub.get_up(LEARNER)
        point = await hub.sit_down(LEARNER, IDENTITY)
        assert hub._core.ledger.row(last.group).state is GroupState.GENERATING
        assert await submit(hub, make_group, last)
        if point.version == 1:
            await hub.publish(LEARNER, publication(1))
        await finish(hub, make_group, tmp_path, "w0")

    run(story())


# ---- other weights for a version that is out already


def test_a_new_incarnation_is_newer_than_the_version_it_replaces(make_hub: MakeHub, make_group: MakeGroup) -> None:
    hub = make_hub()

    async def story() -> None:
        for step in range(2):
            await work(hub, make_group, step)
            await train(hub, step)
        assert await hub.newer_version(2, 0) is None
        assert await hub.replace_weights(LEARNER, "other") == 1
        await hub.publish(LEARNER, publication(2, incarnation=1))
        assert await hub.newer_version(2, 0) == publication(2, incarnation=1)
        assert await hub.newer_version(1, 0) == publication(2, incarnation=1)
        assert await hub.newer_version(2, 1) is None
        assert await hub.newer_version(3, 0) is None  # an older version is never newer, whatever its incarnation

    run(story())


def test_an_incarnation_survives_and_older_steps_keep_theirs(
    make_hub: MakeHub, make_group: MakeGroup, tmp_path: Path
) -> None:
    async def story() -> None:
        hub = make_hub()
        for step in range(2):
            await work(hub, make_group, step)
            await train(hub, step)
        assert await hub.replace_weights(LEARNER, "other") == 1
        hub = make_hub()
        assert await hub.sit_down(LEARNER, IDENTITY) == ResumePoint(2, incarnation=1)
        assert (await hub.status()).incarnation == 1
        assert await hub.replace_weights(LEARNER, "other again") == 2
        await hub.publish(LEARNER, publication(2, incarnation=2))
        await hub.report([sync("w0", 2, 2)])
        await finish(make_hub(), make_group, tmp_path, "w0")

    run(story())
    _, steps = read_ledger(tmp_path)
    found = [(row.weights_digest, row.incarnation, row.published) for row in steps]
    assert found == [("digest-0", 0, True), ("other again", 2, True), ("digest-2", 2, True)]
    assert [row["detail"] for row in rows(tmp_path / "events.jsonl") if row["name"] == "new_incarnation"] == [
        "1 from version 2",
        "2 from version 2",
    ]
