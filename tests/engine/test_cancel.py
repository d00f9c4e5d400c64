"""A request whose caller is canceled ends in the engine's own process too, as a group that times out relies on."""

import asyncio
import time
from typing import Any

import pytest
from engine_contract import request

pytestmark = pytest.mark.engine
NUM_REQUESTS = 16
MAX_TOKENS = 450


def test_a_canceled_request_ends_in_the_engine(moe: Any) -> None:
    async def story() -> tuple[list[Any], float]:
        llm = moe.engine._live()
        requests = [request(seed=seed, max_tokens=MAX_TOKENS) for seed in range(NUM_REQUESTS)]
        running = [asyncio.create_task(moe.engine.generate(r)) for r in requests]
        await asyncio.sleep(0.2)
        assert not await llm.reset_prefix_cache(), "the engine resets its cache only while it runs nothing"
        for task in running:
            task.cancel()
        canceled_s = time.monotonic()
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        while not await llm.reset_prefix_cache():
            await asyncio.sleep(0.01)
        return outcomes, time.monotonic() - canceled_s

    outcomes, seconds = moe.run(story())
    num_canceled = sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    print(f"{num_canceled} of {NUM_REQUESTS} requests canceled; the engine was idle {seconds:.3f} s later")
    assert num_canceled > 0
    assert seconds < 0.5
    assert len(moe.run(moe.engine.generate(request(seed=99, max_tokens=4))).token_ids) > 0
