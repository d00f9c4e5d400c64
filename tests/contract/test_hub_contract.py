"""One suite for the hub's three seams, over the hub in this process and over its Ray actor."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from shared.config import Config
from shared.errors import HubError, RunFailed, SchemaError
from shared.hub import Hub, start_hub
from shared.hub_client import AsyncHubClient, LearnerHubClient, connect, report_failure
from shared.protocols import GroupSink, GroupSource, VersionFeed
from shared.records import Group, GroupId, Manifest, Publication, Span, StepPlan, TensorEntry, Ticket, Work
from shared.schema import decode_group, encode_group

POLL_S = 0.2
T = TypeVar("T")
MakeGroup = Callable[..., Group]


class Loop:
    """An event loop on a thread of its own, as a worker has one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, call: Coroutine[Any, Any, T], timeout_s: float = 20.0) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(timeout_s)


class InProcessSink:
    """GroupSink over a hub on another thread's loop, without Ray."""

    def __init__(self, hub: Hub, loop: Loop) -> None:
        self._hub, self._loop = hub, loop

    def take(self, step: int) -> list[bytes]:
        while (taken := self._loop.run(self._hub.take(step))).groups is None:
            pass
        return taken.groups

    def begin_step(self, plan: StepPlan) -> None:
        self._loop.run(self._hub.begin_step(plan))

    def commit_step(self, step: int, weights_digest: str) -> None:
        self._loop.run(self._hub.commit_step(step, weights_digest))

    def publish(self, publication: Publication) -> None:
        self._loop.run(self._hub.publish(publication))


@dataclass
class Seams:
    """The hub as its clients see it. `put` makes a bucket; `fetch` gets its bytes back."""

    source: GroupSource
    feed: VersionFeed
    sink: GroupSink
    loop: Loop
    fail: Callable[[str, str], None]
    put: Callable[[np.ndarray], Any]
    fetch: Callable[[Any], np.ndarray]

    def ask(self, worker: str = "w0", version: int = 0, max_groups: int = 9) -> Work:
        return self.loop.run(self.source.next_work(worker, version, max_groups))

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
    config, loop = make_config(run={"name": name}), Loop()
    if request.param == "in process":
        hub = Hub(config, tmp_path, POLL_S)
        yield Seams(
            hub, hub, InProcessSink(hub, loop), loop, lambda *a: loop.run(hub.fail(*a)), lambda a: a, lambda a: a
        )
        hub.close()
    else:
        ray = request.getfixturevalue("ray_cluster")
        owner = start_hub(config, tmp_path, POLL_S)
        handle = connect(name, timeout_s=5.0)
        client = AsyncHubClient(handle)
        yield Seams(
            client, client, LearnerHubClient(handle), loop, lambda *a: report_failure(handle, *a), ray.put, ray.get
        )
        del owner


def generate(seams: Seams, make_group: MakeGroup, version: int = 0) -> list[Ticket]:
    tickets = list(seams.ask(version=version).tickets)
    for ticket in tickets:
        assert seams.submit("w0", ticket, encode_group(make_group(ticket, "w0", spans=((version, 3),))))
    return tickets


def train(seams: Seams, step: int) -> list[GroupId]:
    groups = [decode_group(payload).group for payload in seams.sink.take(step)]
    seams.sink.begin_step(StepPlan(step, tuple(groups), 7, 3e-4, 4e-4))
    seams.sink.commit_step(step, f"digest-{step}")
    seams.sink.publish(seams.publication(step + 1))
    return groups


def test_a_whole_run(seams: Seams, make_group: MakeGroup, tmp_path: Path) -> None:
    for step in range(3):
        generate(seams, make_group, step)
        assert train(seams, step) == [GroupId(2 * step), GroupId(2 * step + 1)]
    assert seams.ask(version=3) == Work(stop=True)
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
    assert seams.ask("w1") == Work()
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
    assert seams.ask() == Work(stop=True)


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


def test_a_hub_that_dies_ends_the_learners_wait(
    ray_cluster: Any, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    owner = start_hub(make_config(run={"name": "dies"}), tmp_path, POLL_S)
    threading.Timer(2 * POLL_S, ray_cluster.kill, (owner,)).start()
    with pytest.raises(HubError, match="the hub is gone"):
        LearnerHubClient(connect("dies")).take(0)
