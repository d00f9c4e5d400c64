"""A run that is killed or stopped anywhere and goes on is the same run: real Ray and processes, deterministic engine.

At staleness 0 that engine's tokens follow from the weights alone, so an undisturbed run has to be met byte for byte.
"""

import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from run_account import Outcome, Watcher, check_finished, replay
from services import STOPPED, Run, Site, open_site, pause

from shared.run_files import read_metrics

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

STEPS = 8

# Where the learner is killed in steps 0, 1, ...; there is a checkpoint after every second step.
POINTS = [
    "before_begin", "after_begin", "between_minibatches", "in_checkpoint",
    "before_commit", "after_commit", "before_log",
]  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("resume")) as opened:
        yield opened


@contextmanager
def watched(run: Run) -> Iterator[Run]:
    watcher = Watcher(run)
    watcher.start()
    try:
        yield run
    finally:
        run.close()
    watcher.finish()


def finish(run: Run, engine: str = "steady") -> None:
    """Both services from here to the end of the run."""
    rollout, learner = run.start_rollout(engine), run.start_learner()
    run.end(learner)
    run.end(rollout)


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> Outcome:
    with watched(Run(site, "undisturbed")) as run:
        finish(run)
    assert len({step.weights_digest for step in run.rows()[1]}) == STEPS, "every step must move the weights"
    replay(run)
    return check_finished(run)


def test_a_learner_killed_in_every_part_of_a_step_ends_with_the_same_weights(site: Site, undisturbed: Outcome) -> None:
    with watched(Run(site, "killed")) as run:
        rollout = run.start_rollout()
        for step, point in enumerate(POINTS):
            run.end(run.start_learner("killed_learner", point, str(step)), -signal.SIGKILL)
            committed = step + (point in ("after_commit", "before_log", "in_checkpoint"))
            assert (run.version(), len(run.rows()[1])) == (committed, step + (point != "before_begin")), run.story()
            num_logged = len(read_metrics(run.directory))
            assert num_logged == step + (point == "in_checkpoint"), run.story()
        run.end(run.start_learner())
        run.end(rollout)
    assert check_finished(run).difference(undisturbed) == "", run.story()
    replay(run)


def test_a_run_that_is_stopped_and_resumed_is_the_run_that_never_stopped(site: Site, undisturbed: Outcome) -> None:
    with watched(Run(site, "stopped", learner={"checkpoint_steps": 100})) as run:  # but for the stop there is none
        rollout, learner = run.start_rollout(), run.start_learner()
        run.wait_for_version(STEPS // 2)
        for service in (learner, rollout):
            service.terminate()
            run.end(service, STOPPED)
        assert STEPS // 2 <= run.version() < STEPS
        assert (run.directory / "checkpoints" / f"step-{run.version():06d}").is_dir(), run.story()
        finish(run)
    assert check_finished(run).difference(undisturbed) == "", run.story()


def test_a_finished_run_made_longer_is_the_longer_run(site: Site, undisturbed: Outcome) -> None:
    with watched(Run(site, "longer", learner={"steps": STEPS // 2})) as run:
        finish(run)
        assert run.ledger().finished
        run.configure(learner={"steps": STEPS})
        finish(run)
    assert check_finished(run).difference(undisturbed) == "", run.story()


def test_forty_prompts_and_five_stops_train_each_once_the_slow_ones_too(site: Site) -> None:
    rng = random.Random(7)
    with watched(Run(site, "forty", learner={"steps": 20, "prompts_per_step": 2}, sync={"max_staleness": 1})) as run:
        for killed in ("learner", "rollout", "both", "neither", "learner"):
            rollout, learner = run.start_rollout("uneven"), run.start_learner()
            version = run.version()
            run.wait_for_version(version + 1)
            pause(rng, 0.0, 1.0)
            for side, service in {"rollout": rollout, "learner": learner}.items():
                if killed in (side, "both"):
                    run.kill(service)
                else:
                    service.terminate()
            for side, service in {"rollout": rollout, "learner": learner}.items():
                if killed not in (side, "both"):
                    run.end(service, STOPPED)
            assert not run.ledger().finished, "the run must outlast its stops"
        finish(run, "uneven")
    check_finished(run)
    assert run.ledger().balance().issued == 40


def test_a_second_learner_is_refused_and_the_first_goes_on(site: Site) -> None:
    with watched(Run(site, "two-learners", learner={"steps": 1000})) as run:
        rollout, first = run.start_rollout(), run.start_learner()
        run.wait_for_version(1)
        second = run.start_learner()
        run.end(second, 2)
        assert f"process {first.pid} " in run.said(second)
        version = run.version()
        run.wait_for_version(version + 3)
        for service in (first, rollout):
            service.terminate()
            run.end(service, STOPPED)


def test_a_producer_that_raises_stops_the_learner_with_its_traceback(site: Site) -> None:
    with closing(Run(site, "raises")) as run:
        rollout, learner = run.start_rollout("raises"), run.start_learner()
        run.end(rollout, 1)
        start_s = time.monotonic()
        run.end(learner, 1)
        assert time.monotonic() - start_s < 10
        assert "Traceback" in run.said(learner)
        assert "the engine has no tokens today" in run.said(learner)
