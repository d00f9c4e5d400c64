"""SIGKILL and SIGSTOP at random moments of a run: real Ray, real processes, a deterministic engine.

Every process of the run is killed ten times. Afterwards no group is lost, none was trained twice, and no version ever
went back; the account on disk is looked at all the time (services.Watcher).
"""

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from services import STOPPED, Run, Service, Site, Watcher, check_finished, open_site, pause, read_trajectories, wait_for

from shared.cluster_processes import is_alive
from shared.ledger_rows import GroupState
from shared.records import GroupId
from shared.run_files import read_spans

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

NUM_KILLS = 10
WORKER = "ray::RolloutWorker"
GROWTH_BYTES = 64 << 20  # of hub and learner over ten deaths of workers
BACK_S = 90.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("kills")) as opened:
        yield opened


@pytest.fixture
def run(site: Site, request: pytest.FixtureRequest) -> Iterator[Run]:
    sections = {"learner": {"steps": 100_000}, "rollout": {"workers": 2}, "sync": {"max_staleness": 1}}
    opened = Run(site, request.node.name.replace("_", "-"), **sections)
    watcher = Watcher(opened)
    watcher.start()
    try:
        yield opened
    finally:
        opened.close()
    watcher.finish()


def test_ten_kills_of_each_process_lose_nothing(run: Run) -> None:
    rollout, learner = run.start_rollout(), run.start_learner()
    run.wait_for_version(2)
    kill_workers(run, learner, random.Random(1))
    with ThreadPoolExecutor() as killers:
        began_s = time.monotonic()
        learners = killers.submit(kill_learners, run, learner, random.Random(2))
        rollouts = killers.submit(kill_rollouts, run, rollout, random.Random(3))
        hubs = killers.submit(kill_hubs, run, random.Random(4))
        hubs.result()
        learner, rollout = learners.result(), rollouts.result()
    run.note(f"30 kills in {time.monotonic() - began_s:.0f} s, at version {run.version()}")
    run.wait_for_version(run.version() + 2)
    for service in (learner, rollout):
        service.terminate()
        run.end(service, STOPPED)
    num_issued, per_step = run.ledger().balance().issued, run.config.learner.prompts_per_step
    run.configure(learner={"steps": -(-num_issued // per_step)})
    rollout, learner = run.start_rollout(), run.start_learner()
    run.end(learner)
    run.end(rollout)
    check_finished(run)
    print(run.story())


def kill_workers(run: Run, learner: Service, rng: random.Random) -> None:
    """Hub and learner live on and do not grow."""
    hub = run.hub()
    assert hub is not None
    watched = {"hub": hub, "learner": psutil.Process(learner.pid)}
    before = {name: process.memory_info().rss for name, process in watched.items()}
    for _ in range(NUM_KILLS):
        num_issued = len(run.rows()[0])
        wait_for(lambda n=num_issued: len(run.rows()[0]) > n, BACK_S, "more groups", run.story)
        pause(rng, 0.0, 2.0)
        run.kill_process(rng.choice(run.site.processes(WORKER)), "worker")
    wait_for(lambda: len(run.site.processes(WORKER)) == 2, BACK_S, "both workers to be back", run.story)
    run.wait_for_version(run.version() + 2)
    growth = {name: process.memory_info().rss - before[name] for name, process in watched.items()}
    run.note("growth in MiB over ten kills of workers: " + str({k: round(v / 2**20, 1) for k, v in growth.items()}))
    assert run.hub() == hub, run.story()
    assert max(growth.values()) < GROWTH_BYTES, run.story()


def kill_learners(run: Run, learner: Service, rng: random.Random) -> Service:
    """Half of them while they start and recover, half of them while they train. Returns the one after the last."""
    for number in range(NUM_KILLS):
        if number % 2:
            version = run.version()
            wait_for(lambda v=version: run.version() > v, BACK_S, "the learner to train", run.story)
            pause(rng, 0.0, 1.0)
        else:
            pause(rng, 0.5, 7.0)
        run.kill(learner)
        learner = run.start_learner()
    return learner


def kill_rollouts(run: Run, rollout: Service, rng: random.Random) -> Service:
    """Its workers end with the service."""
    for _ in range(NUM_KILLS):
        pause(rng, 2.0, 10.0)
        workers = run.site.processes(WORKER)
        run.kill(rollout)
        wait_for(lambda ws=workers: not any(map(is_alive, ws)), 30.0, "its workers to end", run.story)
        rollout = run.start_rollout()
    return rollout


def kill_hubs(run: Run, rng: random.Random) -> None:
    """Ray starts each again, in another process."""
    for _ in range(NUM_KILLS):
        hub = wait_for(run.hub, BACK_S, "the hub", run.story)
        pause(rng, 0.0, 8.0)
        run.kill_process(hub, "hub")
        wait_for(lambda old=hub: run.hub() not in (None, old), BACK_S, "another hub", run.story)


def test_a_worker_that_was_frozen_past_its_lease_comes_back_late(run: Run) -> None:
    run.configure(rollout={"max_num_seqs": 8, "lease_s": 2.0}, learner={"steps": 30})
    rollout, learner = run.start_rollout("slow"), run.start_learner()
    run.wait_for_version(2)
    frozen, worker_id, lost = freeze_one_that_works(run)
    wait_for(lambda: all(is_settled(run, group) for group in lost), BACK_S, "others to make its groups", run.story)
    frozen.send_signal(signal.SIGCONT)
    run.note(f"{worker_id} goes on")
    run.end(learner)
    run.end(rollout)
    check_finished(run)
    rows = read_trajectories(run)
    made = rows[rows.group_number.isin([group.number for group in lost])]
    assert worker_id not in set(made.worker_id)
    assert set(made.attempt) == {1}
    its_spans = (span for span in read_spans(run.directory) if span.lane == worker_id)
    finished_late = {span.detail for span in its_spans if span.name == "generate"}
    assert {str(group) for group in lost} & finished_late, "it had nothing late to hand in"
    assert rows[rows.worker_id == worker_id].group_number.max() > max(group.number for group in lost)


def freeze_one_that_works(run: Run) -> tuple[psutil.Process, str, list[GroupId]]:
    """A worker stopped by SIGSTOP until its lease ran out, its name, and the groups that were taken from it."""
    for process in run.site.processes(WORKER) * 3:
        num_events = len(run.events())
        process.suspend()
        run.note(f"froze worker {process.pid}")
        generating = {row.group: row for row in run.rows()[0] if row.state is GroupState.GENERATING}
        event = wait_for(
            lambda n=num_events: next((e for e in run.events()[n:] if e["name"] == "lost"), None), 30.0, "a lost worker"
        )
        lost = [group for group, row in generating.items() if row.worker_id == event["who"]]
        lost = [group for group in lost if run.ledger().row(group).attempt > 0 or is_waiting(run, group)]
        if lost:
            return process, event["who"], lost
        process.resume()
    pytest.fail("every frozen worker had just handed in all that it held")


def is_waiting(run: Run, group: GroupId) -> bool:
    return run.ledger().row(group).state is GroupState.WAITING


def is_settled(run: Run, group: GroupId) -> bool:
    return run.ledger().row(group).state is GroupState.TRAINED
