"""One group: what ends it in time, and that nothing of a group that was given up holds up the next one."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine

from rollout.generate import GroupGenerator
from rollout.prompts import Problem, Prompt
from rollout.rewards import Sample
from shared.config import Config
from shared.errors import GroupTimeout, RewardError, RolloutRejected
from shared.protocols import Completion, GenerateRequest
from shared.records import Group, GroupId, Ticket
from shared.spans import Recorder

PROMPT = Prompt(Problem("3+4", "3+4=", "7"), (5, 17, 9))
DECODER = SimpleNamespace(decode=lambda token_ids, skip_special_tokens: "".join(map(chr, token_ids)))
NUM_MEMBERS = 4


class StuckEngine(FakeEngine):
    """Never finishes member 2 of group 0; knows which requests run."""

    def __init__(self, reject: Callable[[GenerateRequest], str | None] = lambda request: None) -> None:
        super().__init__(reject=reject)
        self.running: set[str] = set()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.running.add(request.request_id)
        try:
            if request.request_id.startswith("0-") and request.request_id.endswith("-2-0"):
                await asyncio.Event().wait()
            return await super().generate(request)
        finally:
            self.running.discard(request.request_id)


def lengths(samples: list[Sample], answer: str) -> list[float | None]:
    return [float(len(s.text)) for s in samples]


@pytest.fixture
def generator(make_config: Callable[..., Config]) -> Callable[..., GroupGenerator]:
    def make(engine: Any = None, reward: Any = lengths, limit_s: float = 0.2) -> GroupGenerator:
        config = make_config(
            sampling={"group_size": NUM_MEMBERS, "max_tokens": 5}, rollout={"group_timeout_s": limit_s}
        )
        return GroupGenerator(config, engine or FakeEngine(), DECODER, reward, Recorder("w"))

    return make


async def generate(generator: GroupGenerator, number: int) -> Group:
    return await generator.generate(Ticket(GroupId(number)), PROMPT, 0)


def test_a_member_that_never_ends_times_out_and_ends_its_requests(generator: Callable[..., GroupGenerator]) -> None:
    engine = StuckEngine()
    stuck = generator(engine)

    async def story() -> None:
        late, fine = await asyncio.gather(generate(stuck, 0), generate(stuck, 1), return_exceptions=True)
        assert isinstance(late, GroupTimeout)
        assert str(late) == (
            "group 0.0 took longer than rollout.group_timeout_s = 0.2: 3 of 4 completions were finished. "
            "Raise it if they need longer."
        )
        assert isinstance(fine, Group)
        assert engine.running == set()
        assert len((await generate(stuck, 2)).rollouts) == NUM_MEMBERS

    asyncio.run(story())


def test_the_first_error_ends_the_group_and_its_requests(generator: Callable[..., GroupGenerator]) -> None:
    engine = StuckEngine(lambda request: "no log-probabilities" if request.request_id.split("-")[-2] == "1" else None)

    async def story() -> None:
        with pytest.raises(RolloutRejected, match="no log-probabilities"):
            await generate(generator(engine, limit_s=60.0), 0)
        assert engine.running == set()

    asyncio.run(asyncio.wait_for(story(), timeout=20))


def test_rewards_that_never_end_do_not_hold_up_later_groups(generator: Callable[..., GroupGenerator]) -> None:
    released = threading.Event()
    num_stuck = 2 * min(32, (os.cpu_count() or 1) + 4)  # twice the threads of asyncio's pool

    def hang_at_first(samples: list[Sample], answer: str) -> list[float | None]:
        if hung < num_stuck:
            released.wait(30)
        return lengths(samples, answer)

    hung = 0
    scored = generator(reward=hang_at_first)

    async def story() -> Group:
        nonlocal hung
        late = await asyncio.gather(*[generate(scored, n) for n in range(num_stuck)], return_exceptions=True)
        assert {type(error) for error in late} == {GroupTimeout}
        assert "4 of 4 completions were finished, their rewards were not" in str(late[0])
        assert "reward.function = rollout.rewards:last_number" in str(late[0])
        hung = num_stuck
        return await generate(scored, num_stuck)

    try:
        assert len(asyncio.run(story()).rollouts) == NUM_MEMBERS
    finally:
        released.set()


def test_a_group_in_time_is_whole_and_an_error_stays_what_it_is(generator: Callable[..., GroupGenerator]) -> None:
    group = asyncio.run(generate(generator(limit_s=60.0), 3))
    assert [r.reward for r in group.rollouts] == [float(r.num_tokens) for r in group.rollouts]

    def fails(samples: list[Sample], answer: str) -> list[float | None]:
        raise TimeoutError("the reward's own")

    with pytest.raises(RewardError, match="the reward's own"):
        asyncio.run(generate(generator(reward=fails), 3))

    class SlowEngine(FakeEngine):
        async def generate(self, request: GenerateRequest) -> Completion:
            raise TimeoutError("the engine's own")

    with pytest.raises(TimeoutError, match="the engine's own"):
        asyncio.run(generate(generator(SlowEngine()), 3))


ABANDONS_A_REWARD = """
import asyncio, time
from rollout.generate import _in_own_thread

async def main():
    try:
        await asyncio.wait_for(_in_own_thread(lambda: time.sleep(300)), 0.1)
    except TimeoutError:
        print("abandoned", flush=True)

asyncio.run(main())
"""


def test_a_process_ends_although_a_reward_does_not() -> None:
    run = subprocess.run([sys.executable, "-c", ABANDONS_A_REWARD], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "abandoned\n", "")


def test_an_abandoned_reward_that_ends_later_disturbs_nobody(
    generator: Callable[..., GroupGenerator], recwarn: Any, caplog: Any
) -> None:
    released, ended = threading.Event(), threading.Event()

    def late(samples: list[Sample], answer: str) -> list[float | None]:
        released.wait(30)
        ended.set()
        raise ValueError("too late")

    with pytest.raises(GroupTimeout):
        asyncio.run(generate(generator(reward=late), 0))
    released.set()
    assert ended.wait(30)
    for thread in threading.enumerate():
        if thread.name == "reward":
            thread.join(30)
    assert [record.getMessage() for record in caplog.records] == []
