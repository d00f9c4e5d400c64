"""A worker's loop with the hub in this process and a deterministic engine: no Ray, no vLLM."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from hub_stories import IDENTITY, LEARNER
from worker_stories import end, make_worker, small_config, start, take_groups

from shared.config import Config
from shared.hub import Hub
from shared.protocols import GenerateRequest
from shared.records import Group
from shared.run_files import read_evaluations, read_spans


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return small_config(make_config, evaluation={"samples": 1})


@pytest.fixture
def hub(config: Config, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(config, tmp_path, poll_s=0.2)
    yield hub
    hub.close()


def take(config: Config, hub: Hub, folder: Path, reject: Any = lambda request: None) -> list[Group]:
    """The first step's groups, made by one worker."""

    async def story() -> list[Group]:
        await hub.sit_down(LEARNER, IDENTITY)
        running = start(make_worker(config, hub, folder, FakeEngine(reject=reject)))
        taking = asyncio.create_task(take_groups(hub, 0))
        try:
            await asyncio.wait({running, taking}, return_when=asyncio.FIRST_COMPLETED)
            assert taking.done(), running.result()
            return taking.result()
        finally:
            await end(running, taking)

    return asyncio.run(asyncio.wait_for(story(), timeout=30))


def test_groups_arrive_in_order_scored_with_their_segments(config: Config, hub: Hub, tmp_path: Path) -> None:
    groups = take(config, hub, tmp_path)
    assert [group.group.number for group in groups] == [0, 1]
    for group in groups:
        assert [len(r.completion_ids) for r in group.rollouts] == [int(r.reward) for r in group.rollouts]
        assert {s.policy_version for r in group.rollouts for s in r.segments} == {0}
        assert group.num_rejected == 0
    assert {"generate", "reward", "evaluate"} <= {span.name for span in read_spans(tmp_path)}
    assert [e.num_samples for e in read_evaluations(tmp_path)] == [4]


def test_a_completion_without_trusted_logprobs_is_sampled_again_and_counted(
    config: Config, hub: Hub, tmp_path: Path
) -> None:
    def first_try_of_member_2(request: GenerateRequest) -> str | None:
        return "log-probability nan" if request.request_id.endswith("-2-0") else None

    groups = take(config, hub, tmp_path, first_try_of_member_2)
    assert [group.num_rejected for group in groups] == [1, 1]
    assert [len(group.rollouts) for group in groups] == [4, 4]


def test_a_group_whose_completions_are_never_trusted_is_dropped_and_replaced(
    config: Config, hub: Hub, tmp_path: Path
) -> None:
    def all_of_group_1(request: GenerateRequest) -> str | None:
        return "no log-probabilities" if request.request_id.startswith("1-0-") else None

    groups = take(config, hub, tmp_path, all_of_group_1)
    assert [str(group.group) for group in groups] == ["0.0", "1.1"]
    status = asyncio.run(hub.status())
    assert status.dropped == {"untrusted_logprobs": 1}
    assert status.issued == status.trained + 1 + status.pending


def test_an_evaluation_never_bears_the_label_of_another_version(config: Config, hub: Hub, tmp_path: Path) -> None:
    late = make_worker(config, hub, tmp_path)
    asyncio.run(late._evaluate(1))
    assert read_evaluations(tmp_path) == []
