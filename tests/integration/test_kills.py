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
from run_account import Watcher, check_finished, read_trajectories
from services import STOPPED, Run, Service, Site, open_site, pause, wait_for

from shared.cluster_processes import is_alive
from shared.ledger_rows import GroupState
from shared.records import GroupId
from shared.run_files import read_spans

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

NUM_KILLS = 10
WORKER = "ray::RolloutWorker"
GROWTH_BYTES = 64 << 20  # of hub and learner over ten deaths of workers
BACK_S = 150.0
REISSUE_S = 5.0


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
        wait_for_groups(run)
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
            run.wait_for_version(run.version() + 1)
            pause(rng, 0.0, 1.0)
        else:
            pause(rng, 0.5, 7.0)
        run.kill(learner)
        learner = run.start_learner()
    return learner


def kill_rollouts(run: Run, rollout: Service, rng: random.Random) -> Service:
    """Half of them while it starts its workers, half of them while these work. They end with the service."""
    for number in range(NUM_KILLS):
        if number % 2:
            wait_for_groups(run)
            pause(rng, 0.0, 1.0)
        else:
            pause(rng, 0.5, 7.0)
        workers = run.site.processes(WORKER)
        run.kill(rollout)
        wait_for_end(run, workers)
        rollout = run.start_rollout()
    return rollout


def wait_for_groups(run: Run) -> None:
    """Until more groups are issued than are now."""
    num_issued = len(run.rows()[0])
    wait_for(lambda: len(run.rows()[0]) > num_issued, BACK_S, "more groups", run.story)


def wait_for_end(run: Run, processes: list[psutil.Process]) -> None:
    wait_for(lambda: not any(map(is_alive, processes)), 30.0, "workers to end with their service", run.story)


def wait_for_another_hub(run: Run, old: psutil.Process) -> None:
    wait_for(lambda: run.hub() not in (None, old), BACK_S, "another hub", run.story)


def wait_for_loss(run: Run, num_events: int) -> str:
    """The name of the worker that is lost next, after this many events."""

    def lost() -> str | None:
        return next((event["who"] for event in run.events()[num_events:] if event["name"] == "lost"), None)

    return str(wait_for(lost, 30.0, "a lost worker", run.story))


def kill_hubs(run: Run, rng: random.Random) -> None:
    """Half of them at any time, half of them while groups are made. Ray starts each again, in another process."""
    for number in range(NUM_KILLS):
        hub = wait_for(run.hub, BACK_S, "the hub", run.story)
        if number % 2:
            wait_for_groups(run)
        pause(rng, 0.0, 3.0)
        run.kill_process(hub, "hub")
        wait_for_another_hub(run, hub)


def test_a_worker_that_was_frozen_past_its_lease_comes_back_late(run: Run) -> None:
    run.configure(rollout={"max_num_seqs": 8, "lease_s": 2.0}, learner={"steps": 30})
    rollout, learner = run.start_rollout("slow"), run.start_learner()
    run.wait_for_version(2)
    frozen, worker_id, lost = freeze_one_that_works(run)
    frozen.send_signal(signal.SIGCONT)  # it is nearly done with them, and those who have them now have just begun
    run.note(f"{worker_id} goes on; {', '.join(map(str, lost))} are with others now")
    run.end(learner)
    run.end(rollout)
    check_finished(run)
    rows = read_trajectories(run)
    made = rows[rows.group_number.isin([group.number for group in lost])]
    assert worker_id not in set(made.worker_id), run.story()
    assert set(made.attempt) == {1}, run.story()
    its_spans = (span for span in read_spans(run.directory) if span.lane == worker_id)
    finished_late = {span.detail for span in its_spans if span.name == "generate"}
    assert {str(group) for group in lost} <= finished_late, run.story()
    assert rows[rows.worker_id == worker_id].group_number.max() > max(group.number for group in lost)


def freeze_one_that_works(run: Run) -> tuple[psutil.Process, str, list[GroupId]]:
    """A worker stopped by SIGSTOP until its lease ran out, its name, and groups of it that others generate now."""
    for process in run.site.processes(WORKER) * 3:
        num_events = len(run.events())
        process.suspend()
        run.note(f"froze worker {process.pid}")
        generating = [row for row in run.rows()[0] if row.state is GroupState.GENERATING]
        worker_id = wait_for_loss(run, num_events)
        held = {row.group for row in generating if row.worker_id == worker_id}
        deadline_s = time.monotonic() + REISSUE_S
        while held and time.monotonic() < deadline_s:
            again = [row for row in run.rows()[0] if row.group in held and row.attempt == 1]
            if lost := [row.group for row in again if row.state is GroupState.GENERATING]:
                return process, worker_id, lost
        process.resume()
    pytest.fail(f"every frozen worker had just handed in all that it held\n{run.story()}")
