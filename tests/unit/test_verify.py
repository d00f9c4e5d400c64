"""What is kept of a group when weights are refused, and the load check that refuses them. No engine, no hub."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import EOS_ID, FakeEngine, probe_of

from rollout.generate import GroupGenerator
from rollout.prompts import Problem, Prompt
from rollout.rewards import Sample
from rollout.verify import Load, Verdicts, check_load
from shared.config import Config
from shared.errors import RolloutRejected, WeightSyncError
from shared.protocols import Completion, GenerateRequest
from shared.records import Float32Array, Group, GroupId, Manifest, Rollout, TensorEntry, Ticket
from shared.spans import Recorder
from shared.weights import weights_digest

PROMPT = Prompt(Problem("3+4", "3+4=", "7"), (5, 17, 9))
DECODER = SimpleNamespace(decode=lambda token_ids, skip_special_tokens: "".join(map(chr, token_ids)))
NUM_MEMBERS = 4


def lengths(samples: Sequence[Sample], answer: str) -> list[float | None]:
    return [float(len(s.text)) for s in samples]


async def generate(generator: GroupGenerator, number: int) -> Group:
    return await generator.generate(Ticket(GroupId(number)), PROMPT, 0)


class Loads:
    """Loads one engine and decides the verdicts, as a worker does; `good` and `bad` hold other weights."""

    def __init__(self, engine: FakeEngine, verdicts: Verdicts) -> None:
        self._engine, self._verdicts = engine, verdicts

    def load(self, version: int, weights: str) -> Load:
        with self._verdicts.loading(version) as load:
            self._engine._weights, self._engine._version = weights, version
        return load

    def reload(self, version: int, weights: str) -> Load:
        """Ends the requests that run."""
        self._engine._num_aborts += 1
        return self.load(version, weights)


class Watching(FakeEngine):
    """Writes down what it is asked for; a token takes a turn of the event loop."""

    def __init__(self) -> None:
        super().__init__(token_s=0.001)
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request)
        return await super().generate(request)


def scored(group: Group, rollout: Rollout, weights: str) -> np.ndarray:
    ids = [*group.prompt_ids.tolist(), *rollout.completion_ids.tolist()]
    return asyncio.run(FakeEngine(initial_weights=weights).score(ids, len(group.prompt_ids)))


def logprobs_of(rollout: Rollout) -> Float32Array:
    assert rollout.behavior_logprobs is not None
    return rollout.behavior_logprobs


MAX_TOKENS = 60


@pytest.fixture
def long_groups(make_config: Callable[..., Config]) -> Callable[..., GroupGenerator]:
    def make(engine: FakeEngine) -> GroupGenerator:
        config = make_config(sampling={"group_size": NUM_MEMBERS, "max_tokens": MAX_TOKENS})
        return GroupGenerator(config, engine, DECODER, lengths, Recorder("w"))

    return make


def test_tokens_under_refused_weights_are_cut_off_and_the_rest_goes_on(
    long_groups: Callable[..., GroupGenerator],
) -> None:
    engine = Watching()
    generator = long_groups(engine)
    loads = Loads(engine, generator.verdicts)

    async def story() -> Group:
        making = asyncio.create_task(generate(generator, 0))
        await asyncio.sleep(0.02)
        bad = loads.load(1, "bad")
        await asyncio.sleep(0.02)
        assert not making.done()
        bad.decide(False)
        await asyncio.sleep(0.01)
        good = loads.reload(1, "good")
        await asyncio.sleep(0.005)
        good.decide(True)
        return await making

    group = asyncio.run(story())
    undisturbed = asyncio.run(generate(long_groups(FakeEngine()), 0))
    cut = 0
    for rollout, other in zip(group.rollouts, undisturbed.rollouts, strict=True):
        first = rollout.segments[0]
        assert [s.policy_version for s in rollout.segments] in ([0], [0, 1])
        np.testing.assert_array_equal(rollout.completion_ids[: first.end], other.completion_ids[: first.end])
        np.testing.assert_array_equal(logprobs_of(rollout)[: first.end], logprobs_of(other)[: first.end])
        if len(rollout.segments) == 2:
            cut += 1
            good = scored(group, rollout, "good")[first.end :]
            np.testing.assert_allclose(logprobs_of(rollout)[first.end :], good, atol=1e-6, rtol=0)
        assert rollout.num_tokens <= MAX_TOKENS
        assert (rollout.finish_reason == "stop") == (rollout.completion_ids[-1] == EOS_ID)
        assert rollout.finish_reason == "stop" or rollout.num_tokens == MAX_TOKENS
        assert rollout.reward == rollout.num_tokens  # of the text of all ids together
    assert cut > 0
    assert group.num_rejected == 0
    seeds = [request.seed for request in engine.asked]
    assert len(set(seeds)) == len(seeds) == NUM_MEMBERS + cut
    for request in engine.asked[NUM_MEMBERS:]:
        member = int(request.request_id.split("-")[-2])
        kept = group.rollouts[member].segments[0].end
        assert request.max_tokens == MAX_TOKENS - kept
        ids = group.rollouts[member].completion_ids[:kept].tolist()
        assert list(request.prompt_ids) == [*PROMPT.token_ids, *ids]


def test_a_rollout_without_a_token_that_may_stay_starts_again(long_groups: Callable[..., GroupGenerator]) -> None:
    engine = Watching()
    generator = long_groups(engine)
    loads = Loads(engine, generator.verdicts)

    async def story() -> Group:
        bad = loads.load(1, "bad")
        making = asyncio.create_task(generate(generator, 0))
        await asyncio.sleep(0.2)  # all of it was sampled
        assert not making.done()
        bad.decide(False)
        await asyncio.sleep(0.05)
        assert len(engine.asked) == NUM_MEMBERS  # nobody samples under weights that are known to be wrong
        loads.load(1, "good").decide(True)
        return await making

    group = asyncio.run(story())
    for rollout in group.rollouts:
        assert [s.policy_version for s in rollout.segments] == [1]
        np.testing.assert_allclose(logprobs_of(rollout), scored(group, rollout, "good"), atol=1e-6, rtol=0)
    assert len({request.seed for request in engine.asked}) == 2 * NUM_MEMBERS
    assert {request.max_tokens for request in engine.asked} == {MAX_TOKENS}


def test_what_wrong_weights_make_untrustworthy_does_not_count_as_rejected(
    long_groups: Callable[..., GroupGenerator],
) -> None:
    class Broken(Watching):
        async def generate(self, request: GenerateRequest) -> Completion:
            completion = await super().generate(request)
            if self._weights == "bad":
                raise RolloutRejected("log-probability nan")
            return completion

    engine = Broken()
    generator = long_groups(engine)
    loads = Loads(engine, generator.verdicts)

    async def story() -> Group:
        bad = loads.load(1, "bad")
        making = asyncio.create_task(generate(generator, 0))
        await asyncio.sleep(0.2)
        bad.decide(False)
        await asyncio.sleep(0.01)
        loads.load(1, "good").decide(True)
        return await making

    group = asyncio.run(story())
    assert group.num_rejected == 0
    assert len(engine.asked) == 2 * NUM_MEMBERS


def test_completions_of_released_weights_need_no_second_request(long_groups: Callable[..., GroupGenerator]) -> None:
    engine = Watching()
    generator = long_groups(engine)
    loads = Loads(engine, generator.verdicts)

    async def story() -> Group:
        loads.load(1, "good").decide(True)
        making = asyncio.create_task(generate(generator, 0))
        group = await making
        loads.load(2, "bad").decide(False)
        return group

    asyncio.run(asyncio.wait_for(story(), timeout=20))
    assert len(engine.asked) == NUM_MEMBERS


def test_a_label_that_was_loaded_twice_is_trusted_only_from_requests_of_the_second_load() -> None:
    verdicts = Verdicts()

    async def story() -> None:
        before = await verdicts.begin()
        with verdicts.loading(1) as bad:
            pass
        between = await verdicts.begin()
        bad.decide(False)
        with verdicts.loading(1) as good:
            good.decide(True)
        after = await verdicts.begin()
        assert await verdicts.num_released(before, [(0, 0, 4), (1, 4, 9)]) == 4
        assert await verdicts.num_released(between, [(1, 0, 9)]) == 0
        assert await verdicts.num_released(after, [(1, 0, 9)]) == 9
        with pytest.raises(RolloutRejected, match="version 0, which was not loaded"):
            await verdicts.num_released(after, [(0, 0, 9)])

    asyncio.run(story())


def test_a_load_that_the_engine_refused_is_forgotten() -> None:
    verdicts = Verdicts()

    async def story() -> None:
        begun = await verdicts.begin()
        with pytest.raises(WeightSyncError), verdicts.loading(1):
            raise WeightSyncError("no room")
        assert verdicts.current is begun
        with verdicts.loading(1) as good:
            good.decide(True)
        assert await verdicts.num_released(begun, [(0, 0, 4), (1, 4, 9)]) == 9
        begun = await verdicts.begin()
        with pytest.raises(WeightSyncError), verdicts.loading(1):  # another incarnation of the same version
            raise WeightSyncError("no room")
        assert await verdicts.num_released(begun, [(1, 0, 5)]) == 5

    asyncio.run(story())


PROBED = Manifest(1, 1, (TensorEntry("weight", "F32", (1,), 0, 0, 4, "digest"),))


@pytest.mark.parametrize(
    ("weights", "shift", "fault"),
    [
        (weights_digest(PROBED), 0.0, ""),
        (weights_digest(PROBED), 0.2, ""),
        (weights_digest(PROBED), 0.3, "rms 0.3 nats over 96 tokens, limit 0.25, largest 0.3"),
        (weights_digest(PROBED), np.nan, "the probe could not be measured: 96 differences, all finite: False"),
        (weights_digest(PROBED), 1e6, "rms 100 nats over 96 tokens, limit 0.25, largest 1e+06"),
        ("wrong", 0.0, "rms 2"),
    ],
)
def test_the_load_check_compares_the_probe(weights: str, shift: float, fault: str) -> None:
    probe = [replace(p, logprobs=p.logprobs + np.float32(shift)) for p in probe_of(PROBED)]
    check = asyncio.run(check_load(FakeEngine(initial_weights=weights), probe, 0.25))
    assert check.fault.startswith(fault)
    assert bool(check.fault) == bool(fault)
    if np.isfinite(shift):
        assert check.mismatch.num_tokens == 96
        assert np.isfinite([check.mismatch.k3, check.max_abs]).all()  # JSON has no infinity
        assert check.mismatch.rms == pytest.approx(min(shift, 100.0), abs=1e-4) or weights == "wrong"


def test_a_probe_that_the_engine_cannot_score_is_a_fault() -> None:
    class Nan(FakeEngine):
        async def score(self, token_ids: Sequence[int], first: int) -> Float32Array:
            raise RolloutRejected("log-probability nan for token 3 (id 7)")

    check = asyncio.run(check_load(Nan(), probe_of(PROBED), 0.25))
    assert check.fault == "the probe could not be measured: log-probability nan for token 3 (id 7)"
    assert check.mismatch.num_tokens == 0
