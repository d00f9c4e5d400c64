"""Learner, hub, workers and rollout services with real vLLM engines, killed while they work."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_account import Watcher, check_finished
from services import Run, Site, open_site, wait_for

from shared.ledger_rows import GroupState

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]
ENGINE_START_S = 180.0  # three of them on two cores
MINUTE_S = 60.0
NEVER = 100_000


@pytest.fixture
def site(moe_path: Path, tmp_path: Path) -> Iterator[Site]:
    with open_site(tmp_path, moe_path) as site:
        yield site


def joined(run: Run) -> list[str]:
    return [event["who"] for event in run.events() if event["name"] == "joined"]


def generating(run: Run) -> dict[str, list[tuple[int, int]]]:
    """Groups by the worker that holds them."""
    held: dict[str, list[tuple[int, int]]] = {}
    for row in run.rows()[0]:
        if row.state is GroupState.GENERATING:
            held.setdefault(row.worker_id, []).append((row.group.number, row.group.replacement))
    return held


def kill_a_worker_that_generates(run: Run) -> list[tuple[int, int]]:
    """SIGKILL it while it holds groups; returns those that were issued again because of it."""
    processes = run.site.processes("ray::RolloutWorker")
    before = generating(run)
    run.kill_process(random.Random(len(run.events())).choice(processes), "worker")
    wait_for(lambda: any(e["name"] in ("left", "lost") and "died" in e["detail"] for e in run.events()), 15.0, "a loss")
    lost = {e["who"] for e in run.events() if e["name"] in ("left", "lost")}
    return [group for worker in lost for group in before.get(worker, [])]


def test_every_part_is_killed_twice_and_nothing_is_lost(site: Site) -> None:
    run = Run(
        site,
        "fire",
        reward={"function": "rollout.rewards:exact_match"},
        rollout={"workers": 2, "max_num_seqs": 64, "lease_s": 10.0},
        sampling={"group_size": 8, "max_tokens": 6},
        learner={"steps": NEVER, "prompts_per_step": 16, "minibatches": 2, "checkpoint_steps": 5, "lr": 1e-4},
        sync={"max_staleness": 1},
    )
    try:
        rollout = run.start_rollout("vllm")  # the workers come first and wait
        learner = run.start_learner()
        watcher = Watcher(run)
        run.wait_for_version(2, ENGINE_START_S)
        watcher.start()

        run.configure(rollout={"workers": 1})
        third = run.start_rollout("vllm")
        wait_for(lambda: len(joined(run)) == 3, ENGINE_START_S, "the third worker", run.story)
        newcomer = joined(run)[-1]
        wait_for(lambda: newcomer in {r.worker_id for r in run.rows()[0]}, MINUTE_S, "its first group", run.story)

        held: list[tuple[int, int]] = []
        for _ in range(2):
            held += kill_a_worker_that_generates(run)
            hub = run.hub()
            assert hub is not None
            run.kill_process(hub, "hub")
            run.wait_for_version(run.version() + 1)
            run.kill(learner)
            learner = run.start_learner()
            run.kill(third)
            third = run.start_rollout("vllm")
            run.wait_for_version(run.version() + 3, ENGINE_START_S)

        for service in (rollout, third, learner):
            service.terminate()
        for service in (rollout, third, learner):
            run.end(service, 3)
        watcher.finish()
        run.configure(learner={"steps": run.version() + 2})
        learner, rollout = run.start_learner(), run.start_rollout("vllm")
        run.end(learner, timeout_s=ENGINE_START_S)
        run.end(rollout)
        check_finished(run)
        trained = {(r.group.number, r.group.replacement) for r in run.rows()[0] if r.state is GroupState.TRAINED}
        assert held, run.story()
        assert set(held) <= trained, run.story()
    finally:
        run.close()
