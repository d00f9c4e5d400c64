"""One suite for the hub's four seams, over the hub in this process and over its Ray actor."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pytest
from hub_stories import IDENTITY

from shared.config import Config
from shared.errors import ConfigError, HubError, RunFailed, SchemaError
from shared.hub import Hub
from shared.hub_client import AsyncHubClient, LearnerHubClient, report_failure
from shared.hub_start import connect, start_hub
from shared.protocols import GroupSink, GroupSource, Membership, VersionFeed
from shared.records import (
    ClipRange,
    Group,
    GroupId,
    Identity,
    Manifest,
    Mismatch,
    ProbeReport,
    Publication,
    ResumePoint,
    Span,
    StepPlan,
    TensorEntry,
    Ticket,
    Work,
)
from shared.schema import decode_group, encode_group
from shared.stopping import StopRequest

POLL_S = 0.2
LEARNER = "host:1-aa"
T = TypeVar("T")
MakeGroup = Callable[..., Group]


class Sink(GroupSink, Protocol):
    """The learner's seam, and the seat that it is used from."""

    def seated(self, identity: Identity) -> AbstractContextManager[ResumePoint]: ...

    def probes(self, since_version: int) -> list[ProbeReport]: ...


class Loop:
    """An event loop on a thread of its own, as a worker has one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, call: Coroutine[Any, Any, T], timeout_s: float = 20.0) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(timeout_s)


class InProcessSink:
    """GroupSink over a hub on another thread's loop, without Ray."""

    def __init__(self, hub: Hub, loop: Loop, stop: StopRequest) -> None:
        self._hub, self._loop, self._stop = hub, loop, stop

    @contextmanager
    def seated(self, identity: Identity) -> Iterator[ResumePoint]:
        yield self._loop.run(self._hub.sit_down(LEARNER, identity))
        self._loop.run(self._hub.get_up(LEARNER))

    def take(self, step: int) -> list[bytes] | None:
        while (taken := self._loop.run(self._hub.take(LEARNER, step))).groups is None:
            if self._stop:
                return None
        return taken.groups

    def begin_step(self, plan: StepPlan) -> None:
        self._loop.run(self._hub.begin_step(LEARNER, plan))

    def commit_step(self, step: int, weights_digest: str) -> None:
        self._loop.run(self._hub.commit_step(LEARNER, step, weights_digest))

    def publish(self, publication: Publication) -> None:
        self._loop.run(self._hub.publish(LEARNER, publication))

    def probes(self, since_version: int) -> list[ProbeReport]:
        return self._loop.run(self._hub.probes(LEARNER, since_version))


@dataclass
class Seams:
    """The hub as its clients see it. `put` makes a bucket; `fetch` gets its bytes back."""

    source: GroupSource
    members: Membership
    feed: VersionFeed
    sink: Sink
    loop: Loop
    stop: StopRequest
    fail: Callable[[str, str], None]
    put: Callable[[np.ndarray], Any]
    fetch: Callable[[Any], np.ndarray]
    held: dict[str, list[Ticket]] = field(default_factory=dict)

    def ask(
        self, worker: str = "w0", version: int = 0, max_groups: int = 9, holds: Sequence[Ticket] | None = None
    ) -> Work:
        """The worker holds all that it was given, unless told otherwise."""
        held = self.held.setdefault(worker, []) if holds is None else holds
        work = self.loop.run(self.source.next_work(worker, version, tuple(held), max_groups))
        self.held[worker] = [*held, *work.tickets]
        return work

    def submit(self, worker: str, ticket: Ticket, payload: bytes) -> bool:
        return self.loop.run(self.source.submit(worker, ticket, payload))

    def publication(self, version: int) -> Publication:
        tensor = TensorEntry("weight", "uint8", (5,), 0, 0, 5, "digest")
        return Publication(Manifest(version, version, (tensor,)), (self.put(np.full(5, version, np.uint8)),))


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, namespace="tests", log_to_driver=False, object_store_memory=80 << 20)
    yield ray
    ray.shutdown()


@pytest.fixture(params=["in process", "ray"])
def seams(request: pytest.FixtureRequest, make_config: Callable[..., Config], tmp_path: Path) -> Iterator[Seams]:
    name = f"run-{abs(hash(request.node.name))}"
    config, loop, stop = make_config(run={"name": name}), Loop(), StopRequest()
    if request.param == "in process":
        hub = Hub(config, tmp_path, POLL_S)
        sink = InProcessSink(hub, loop, stop)
        yield Seams(hub, hub, hub, sink, loop, stop, lambda *a: loop.run(hub.fail(*a)), lambda a: a, lambda a: a)
        hub.close()
    else:
        ray = request.getfixturevalue("ray_cluster")
        hub = start_hub(config, tmp_path, POLL_S)
        client = AsyncHubClient(name, connect(name, timeout_s=5.0))
        sink = LearnerHubClient(name, hub, stop)
        yield Seams(client, client, client, sink, loop, stop, lambda *a: report_failure(name, *a), ray.put, ray.get)
        ray.kill(hub, no_restart=True)


def generate(seams: Seams, make_group: MakeGroup, version: int = 0) -> list[Ticket]:
    tickets = list(seams.ask(version=version).tickets)
    for ticket in tickets:
        assert seams.submit("w0", ticket, encode_group(make_group(ticket, "w0", spans=((version, 3),))))
    return tickets


def train(seams: Seams, step: int) -> list[GroupId]:
    groups = [decode_group(payload).group for payload in seams.sink.take(step)]
    seams.sink.begin_step(StepPlan(step, tuple(groups), 7, ClipRange(3e-4, 4e-4)))
    seams.sink.commit_step(step, f"digest-{step}")
    seams.sink.publish(seams.publication(step + 1))
    return groups


def test_a_whole_run(seams: Seams, make_group: MakeGroup, tmp_path: Path) -> None:
    for step in range(3):
        generate(seams, make_group, step)
        assert train(seams, step) == [GroupId(2 * step), GroupId(2 * step + 1)]
    assert seams.ask(version=3) == Work(stop="now")
    assert len(list((tmp_path / "trajectories").glob("*.parquet"))) == 3


def test_take_returns_the_submitted_bytes_in_order_and_waits_for_the_last(seams: Seams, make_group: MakeGroup) -> None:
    tickets = seams.ask(max_groups=2).tickets
    payloads = [encode_group(make_group(ticket, "w0")) for ticket in tickets]
    assert seams.submit("w0", tickets[1], payloads[1])

    def submit_later() -> None:
        time.sleep(2 * POLL_S)  # beyond one long poll
        seams.submit("w0", tickets[0], payloads[0])

    thread = threading.Thread(target=submit_later)
    thread.start()
    assert seams.sink.take(0) == payloads
    thread.join()


def test_a_dropped_group_is_replaced_and_its_late_result_refused(seams: Seams, make_group: MakeGroup) -> None:
    (ticket,) = seams.ask(max_groups=1).tickets
    seams.loop.run(seams.source.give_up("w0", ticket, "reward_error", "three scores for four"))
    assert not seams.submit("w0", ticket, encode_group(make_group(ticket, "w0")))
    assert seams.ask(max_groups=1).tickets == (Ticket(GroupId(0, 1)),)


def test_no_work_and_no_news_are_short_waits(seams: Seams) -> None:
    seams.ask()
    started_s = time.monotonic()
    waiting_for = seams.ask("w1").waiting_for
    assert waiting_for == "the learner (none) to publish version 1: the groups that may start now are shared out"
    assert seams.loop.run(seams.feed.newer_version(0)) is None
    assert 2 * POLL_S <= time.monotonic() - started_s < 5.0


def test_a_publication_arrives_with_its_buckets_while_somebody_waits(seams: Seams, make_group: MakeGroup) -> None:
    generate(seams, make_group)
    thread = threading.Thread(target=lambda: train(seams, 0))
    thread.start()
    newer = None
    while newer is None:
        newer = seams.loop.run(seams.feed.newer_version(0))
    thread.join()
    assert newer.manifest == Manifest(1, 1, (TensorEntry("weight", "uint8", (5,), 0, 0, 5, "digest"),))
    assert [seams.fetch(bucket).tolist() for bucket in newer.buckets] == [[1] * 5]
    assert seams.loop.run(seams.feed.newer_version(1)) is None


def test_a_failure_reaches_the_learner_with_its_traceback_and_stops_the_workers(seams: Seams) -> None:
    started_s = time.monotonic()
    threading.Timer(POLL_S, seams.fail, ("rollout", "Traceback:\nValueError: boom")).start()
    with pytest.raises(RunFailed, match=r"the rollout side of the run failed:\nTraceback:\nValueError: boom"):
        seams.sink.take(0)
    assert time.monotonic() - started_s < 5.0
    said = "the rollout side of the run failed:\nTraceback:\nValueError: boom"
    assert seams.ask() == Work(stop="now", waiting_for=said)


def test_errors_arrive_as_what_they_are(seams: Seams) -> None:
    (ticket,) = seams.ask(max_groups=1).tickets
    for error, call in (
        (HubError, lambda: seams.sink.commit_step(0, "digest")),
        (HubError, lambda: seams.sink.publish(seams.publication(5))),
        (HubError, lambda: seams.ask(version=5)),
        (SchemaError, lambda: seams.submit("w0", ticket, b"junk")),
    ):
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error


def test_reports_are_written(seams: Seams, tmp_path: Path) -> None:
    seams.loop.run(seams.source.report([Span("w0", "load", 1.0, 2.0, 0)]))
    assert '"lane": "w0"' in (tmp_path / "spans.jsonl").read_text()


def test_verdicts_on_weights_reach_the_learner(seams: Seams, tmp_path: Path) -> None:
    reports = [
        ProbeReport("w0", version, Mismatch(96, 0.01, 0.0025, 0.00125), 0.4, 0.2, released=version != 2)
        for version in (1, 2, 3)
    ]
    seams.loop.run(seams.source.report(reports))
    assert seams.sink.probes(2) == reports[1:]
    assert seams.sink.probes(4) == []
    refused = '"name": "weights_refused", "who": "w0", "detail": "version 2 by the load check: rms 0.051 nats over 96'
    assert refused in (tmp_path / "events.jsonl").read_text()


def test_what_the_worker_does_not_hold_is_issued_again(seams: Seams) -> None:
    first = seams.ask(max_groups=2).tickets
    again = seams.ask(max_groups=2, holds=first[:1]).tickets
    assert again == (Ticket(GroupId(1), 1), Ticket(GroupId(2)))


def test_members_come_stay_and_go(seams: Seams, make_group: MakeGroup) -> None:
    run, members = seams.loop.run, seams.members
    assert (
        run(members.check(IDENTITY))
        == run(members.join("w0", IDENTITY))
        == "this run's learner, which has not come yet"
    )
    with seams.sink.seated(IDENTITY) as point:
        assert point == ResumePoint(0)
        assert run(members.check(IDENTITY)) == run(members.join("w0", IDENTITY)) == ""
        other = replace(IDENTITY, model="model-2")
        for call in (members.check(other), members.join("w1", other)):
            with pytest.raises(ConfigError, match="model: the worker has model-2, the learner model-1"):
                run(call)
        tickets = seams.ask().tickets
        run(members.heartbeat("w0"))
        run(members.leave("w0", "drained"))
        assert not seams.submit("w0", tickets[0], encode_group(make_group(tickets[0], "w0")))
        assert seams.ask("w1").tickets == tuple(Ticket(ticket.group, 1) for ticket in tickets)


def test_a_learner_that_is_to_stop_waits_no_longer(seams: Seams) -> None:
    threading.Timer(POLL_S, seams.stop.set).start()
    started_s = time.monotonic()
    assert seams.sink.take(0) is None
    assert time.monotonic() - started_s < 5.0


def test_many_long_polls_wait_at_once(seams: Seams) -> None:
    async def many() -> list[Publication | None]:
        return await asyncio.gather(*(seams.feed.newer_version(0) for _ in range(200)))

    started_s = time.monotonic()
    assert seams.loop.run(many()) == [None] * 200
    assert time.monotonic() - started_s < 5.0


def test_a_hub_that_is_not_there_is_named(ray_cluster: Any) -> None:
    with pytest.raises(HubError, match=r"no hub of run 'nowhere' in this Ray cluster after 0.3 s; check run\.name"):
        connect("nowhere", timeout_s=0.3)


def test_a_hub_that_cannot_start_says_why(ray_cluster: Any, make_config: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_text("this is no database, but long enough to be looked at by SQLite as one")
    with pytest.raises(HubError, match="the hub of run 'broken' did not start.*(?s:.*)not a database"):
        start_hub(make_config(run={"name": "broken"}), tmp_path)


def test_a_hub_that_is_gone_for_good_ends_the_learners_wait(
    ray_cluster: Any, make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.hub_client.HUB_BACK_S", 1.0)
    hub = start_hub(make_config(run={"name": "dies"}), tmp_path, POLL_S)
    threading.Timer(2 * POLL_S, ray_cluster.kill, (hub,)).start()
    with pytest.raises(HubError, match="the hub of run 'dies' is gone for 1 s; start the learner again with --resume"):
        LearnerHubClient("dies", hub, StopRequest()).take(0)


def test_a_hub_that_is_killed_is_back_and_its_clients_notice_nothing(
    ray_cluster: Any, make_config: Callable[..., Config], make_group: MakeGroup, tmp_path: Path
) -> None:
    hub, loop, stop = start_hub(make_config(run={"name": "killed"}), tmp_path, POLL_S), Loop(), StopRequest()
    worker, learner = AsyncHubClient("killed", hub), LearnerHubClient("killed", hub, stop)
    seams = Seams(worker, worker, worker, learner, loop, stop, print, ray_cluster.put, ray_cluster.get)
    with learner.seated(IDENTITY):
        generate(seams, make_group)
        train(seams, 0)
        ray_cluster.kill(hub, no_restart=False)
        while seams.loop.run(worker.join("late", IDENTITY)):  # the learner's sign of life brings its identity back
            pass
        newer = None
        while newer is None:  # and the weights, too
            newer = loop.run(worker.newer_version(0))
        assert [seams.fetch(bucket).tolist() for bucket in newer.buckets] == [[1] * 5]
        for step in (1, 2):
            generate(seams, make_group, step)
            train(seams, step)
        assert learner.wait_finished()
    assert loop.run(worker.newer_version(0)) is None
    ray_cluster.kill(hub, no_restart=True)


def test_a_run_of_the_same_name_in_another_folder_is_refused(
    ray_cluster: Any, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
        (folder / "run.id").write_text(folder.name)
    config = make_config(run={"name": "taken"})
    hub = start_hub(config, folders[0], POLL_S)
    with pytest.raises(ConfigError, match=r"run\.name = 'taken' is taken in this Ray cluster"):
        start_hub(config, folders[1], POLL_S)
    assert ray_cluster.get(hub.config.remote())[0] == "here"  # and it lives on
    ray_cluster.kill(hub, no_restart=True)
