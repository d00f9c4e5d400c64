"""Workers that fail or die by themselves: which are replaced, and which end the run at once. Real Ray and processes."""

import time
from collections.abc import Iterator

import pytest
from run_account import Watcher, check_finished
from services import Run, Site, open_site, wait_for

from shared.run_files import read_syncs

pytestmark = [pytest.mark.full, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("faults")) as opened:
        yield opened


@pytest.fixture
def run(site: Site, request: pytest.FixtureRequest) -> Iterator[Run]:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name).strip("-")
    opened = Run(site, name, learner={"steps": 6})
    yield opened
    opened.close()


@pytest.mark.parametrize("engine", ["load_fails", "dies_in_load"])
def test_a_worker_lost_in_a_sync_is_replaced_and_the_run_goes_on(run: Run, engine: str) -> None:
    watcher = Watcher(run)
    watcher.start()
    rollout, learner = run.start_rollout(engine), run.start_learner()
    run.end(learner)
    run.end(rollout)
    watcher.finish()
    check_finished(run)
    first, second = [event["who"] for event in run.events() if event["name"] == "joined"]
    left = {event["who"]: event["detail"] for event in run.events() if event["name"] == "left"}
    assert ("WeightsRefused" if engine == "load_fails" else "died: ") in left[first], run.story()
    syncs = [(sync.worker_id, sync.version) for sync in read_syncs(run.directory)]
    assert syncs[0] == (first, 1)
    assert syncs[1:5] == [(second, version) for version in range(2, 6)]  # the run may end before the last one


def test_workers_that_always_die_end_the_run_after_three(run: Run) -> None:
    learner = run.start_learner()
    wait_for(run.hub, 60.0, "the hub", run.story)
    rollout = run.start_rollout("dies_at_start")
    start_s = time.monotonic()
    run.end(rollout, 1)
    assert time.monotonic() - start_s < 60
    assert "died" in run.said(rollout), run.story()
    run.end(learner, 1, timeout_s=10)
    assert "the rollout side of the run failed" in run.said(learner)


def test_workers_whose_weights_are_always_wrong_end_the_run(run: Run) -> None:
    rollout, learner = run.start_rollout("scores_wrong"), run.start_learner()
    run.end(rollout, 1)
    said = run.said(rollout)
    assert "WeightsRefused: worker worker-" in said, run.story()
    assert "version 1 was refused by the load check: the probe could not be measured: " in said
    run.end(learner, 1, timeout_s=10)
    assert [event["name"] for event in run.events()].count("weights_refused") == 6  # three workers, twice each
    assert run.version() == 1


def test_an_engine_that_cannot_be_made_ends_the_run_at_once(run: Run) -> None:
    learner = run.start_learner()
    wait_for(run.hub, 60.0, "the hub", run.story)
    rollout = run.start_rollout("fails_at_start")
    run.end(rollout, 1)
    assert "Traceback" in run.said(rollout)
    assert "no engine on this host" in run.said(rollout)
    run.end(learner, 1, timeout_s=10)
    assert "no engine on this host" in run.said(learner)
