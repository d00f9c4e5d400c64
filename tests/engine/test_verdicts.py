"""Wrong weights on a real engine: which check finds them, that no sample of theirs gets out, and that good ones follow.

One worker's weights and generator around the served engine; the hub is a stand-in with a publication and a list.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout.follow import WeightFollower
from rollout.generate import GroupGenerator
from rollout.prompts import Problem, Prompt
from rollout.receive import Staging
from shared.config import Config
from shared.protocols import Completion, GenerateRequest, RequestsInLoad
from shared.records import Group, GroupId, Manifest, ProbeReport, ProbeSequence, Publication, Report, Ticket
from shared.spans import Recorder
from shared.weights import Blob

pytestmark = pytest.mark.engine

PROMPT = tuple(range(40, 52))
NUM_PROBES, PROBE_TOKENS = 4, 24
OLD, NEW = 51, 52  # noise seeds
LIMIT = 1e-4  # of float32, rms in nats a token


@dataclass
class Feed:
    """The hub as a worker's weights see it."""

    current: Publication | None = None
    reports: list[Report] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def newer_version(self, than: int, incarnation: int = 0) -> Publication | None:
        while self.current is None or self.current.manifest.version <= than:
            self.changed.clear()
            await self.changed.wait()
        return self.current

    async def report(self, reports: Sequence[Report]) -> None:
        self.reports += reports

    def publish(self, publication: Publication) -> None:
        self.current = publication
        self.changed.set()

    @property
    def verdicts(self) -> list[tuple[int, bool]]:
        return [(report.version, report.released) for report in self.reports if isinstance(report, ProbeReport)]


class Arriving:
    """A bucket that arrives as the blobs say, one after the other; the last one stays."""

    def __init__(self, *blobs: Blob) -> None:
        self._blobs = list(blobs)

    def __await__(self) -> Generator[Any, None, Blob]:
        yield from asyncio.sleep(0).__await__()
        return self._blobs.pop(0) if len(self._blobs) > 1 else self._blobs[0]


class WatchedEngine:
    """The real engine. `before_load` runs before the next load; no score ends while `scoring` is cleared."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.before_load: Callable[[Manifest, Sequence[Path]], Awaitable[None]] | None = None
        self.loads: list[tuple[int, RequestsInLoad]] = []
        self.asked: list[GenerateRequest] = []
        self.ended: list[str] = []
        self.scoring = asyncio.Event()
        self.scoring.set()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request)
        try:
            return await self._engine.generate(request)
        finally:
            self.ended.append(request.request_id)

    def num_ended(self, group: int) -> int:
        return sum(request_id.startswith(f"{group}-") for request_id in self.ended)

    async def score(self, token_ids: Sequence[int], first: int) -> np.ndarray:
        await self.scoring.wait()
        return await self._engine.score(token_ids, first)

    async def load(
        self, manifest: Manifest, files: Sequence[Path], requests: RequestsInLoad = "recompute"
    ) -> dict[str, float]:
        before, self.before_load = self.before_load, None
        if before is not None:
            await before(manifest, files)
        parts = await self._engine.load(manifest, files, requests)
        self.loads.append((manifest.version, requests))
        return parts

    async def close(self) -> None:
        raise AssertionError("the engine is the session's")


class Story:
    """A worker's weights and generator around a served engine, with the published versions by noise seed.

    `max_tokens` of a sample take some times `head_s` on this model; `made`: publications by noise seed, to use again.
    """

    def __init__(self, served: Any, folder: Path, max_tokens: int, head_s: float, made: dict[int, Publication]) -> None:
        self.served, self.feed, self.engine = served, Feed(), WatchedEngine(served.engine)
        self.max_tokens, self.head_s = max_tokens, head_s
        config = Config.model_validate(
            {
                "model": {"path": str(served.path), "precision": "float32"},
                "sampling": {"group_size": 4, "max_tokens": max_tokens},
            }
        )
        assert config.max_mismatch == LIMIT
        decoder = SimpleNamespace(decode=lambda token_ids, skip_special_tokens: "")
        recorder = Recorder("w0")
        self.generator = GroupGenerator(config, self.engine, decoder, lambda s, _: [0.0] * len(s), recorder)
        staging = Staging("test-verdicts", fallback=folder)
        self.weights = WeightFollower(config, self.feed, self.engine, staging, recorder, self.generator.verdicts)
        self.noises: dict[int, int] = {}
        self._made = made

    def publication(self, noise: int) -> Publication:
        """The next version, with a probe by transformers under exactly its weights."""
        if noise not in self._made:
            self._made[noise] = self._publication(noise)
        version = self.served.next_version()
        self.noises[version] = noise
        made = self._made[noise]
        return replace(made, manifest=replace(made.manifest, version=version, weights_version=version))

    def _publication(self, noise: int) -> Publication:
        manifest, files = self.served.publish(noise)
        blobs = tuple(np.fromfile(file, dtype=np.uint8) for file in files)
        for file in files:
            file.unlink()
        prompts = [list(PROMPT[: 4 + i]) for i in range(NUM_PROBES)]
        drawn = [completion.token_ids for completion in self.served.sample(prompts, PROBE_TOKENS)]
        probe = []
        for prompt, ids in zip(prompts, drawn, strict=True):
            logprobs = self.served.reference(prompt, SimpleNamespace(token_ids=ids)).astype(np.float32)
            probe.append(ProbeSequence(np.asarray([*prompt, *ids], dtype=np.int32), len(prompt), logprobs))
        return Publication(replace(manifest, probe=tuple(probe)), blobs)

    async def group(self, number: int) -> Group:
        prompt = Prompt(Problem(str(number), "", ""), PROMPT)
        return await self.generator.generate(Ticket(GroupId(number)), prompt, self.weights.active_version)

    def largest_error(self, groups: Sequence[Group]) -> float:
        """Of the samples' log-probabilities, against transformers under the right weights of each segment (nats)."""
        largest = 0.0
        for version, noise in self.noises.items():
            parts = [(r, s) for g in groups for r in g.rollouts for s in r.segments if s.policy_version == version]
            if parts:
                self.served.set_noise(noise)
            for rollout, segment in parts:
                expected = self.served.reference(PROMPT, SimpleNamespace(token_ids=rollout.completion_ids))
                error = np.abs(expected - rollout.behavior_logprobs)[segment.start : segment.end]
                largest = max(largest, float(error.max()))
        return largest


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def versions(groups: Sequence[Group]) -> set[int]:
    return {s.policy_version for g in groups for r in g.rollouts for s in r.segments}


@pytest.fixture(scope="module")
def made() -> dict[str, dict[int, Publication]]:
    return {"dense": {}, "moe": {}}


@pytest.fixture(params=[pytest.param("dense", marks=pytest.mark.full), "moe"])
def story(request: pytest.FixtureRequest, made: Any, tmp_path: Path) -> Story:
    max_tokens, head_s = {"dense": (24, 0.4), "moe": (64, 0.1)}[request.param]
    return Story(request.getfixturevalue(request.param), tmp_path, max_tokens, head_s, made[request.param])


@pytest.fixture
def moe_story(moe: Any, made: Any, tmp_path: Path) -> Story:
    return Story(moe, tmp_path, 64, 0.1, made["moe"])


def changed(publication: Publication, name: str) -> list[Blob]:
    """The buckets with one bit of one tensor changed."""
    (entry,) = [entry for entry in publication.manifest.tensors if entry.name == name]
    blobs = [blob.copy() for blob in publication.buckets]
    blobs[entry.bucket][entry.start] ^= 1
    return blobs


def refused_in_transport(story: Story, first: Publication, arrives: list[Blob], good: Publication) -> list[Group]:
    """`first` is active, then `good` is published and arrives wrong once: the groups of before and after."""
    pairs = zip(arrives, good.buckets, strict=True)
    second = replace(good, buckets=tuple(Arriving(wrong, right) for wrong, right in pairs))

    async def told() -> list[Group]:
        following = asyncio.create_task(story.weights.run())
        story.feed.publish(first)
        await until(lambda: len(story.feed.verdicts) == 1)
        old = asyncio.create_task(story.group(0))
        await until(lambda: len(story.engine.asked) == 4)
        story.feed.publish(second)
        await until(lambda: len(story.feed.verdicts) == 2)
        groups = [await old, await story.group(1)]
        assert not following.done()
        following.cancel()
        return groups

    groups = story.served.run(told())
    old_version, new_version = first.manifest.version, good.manifest.version
    assert story.feed.verdicts == [(old_version, True), (new_version, True)]
    assert story.engine.loads == [(old_version, "recompute"), (new_version, "recompute")]
    assert len(story.engine.asked) == 8, "a running request was ended"
    assert versions(groups[1:]) == {new_version}
    assert story.largest_error(groups) < 1e-4
    return groups


def test_the_transport_check_finds_one_changed_tensor(story: Story, caplog: pytest.LogCaptureFixture) -> None:
    first, good = story.publication(OLD), story.publication(NEW)
    name = "model.layers.2.self_attn.v_proj.weight"
    refused_in_transport(story, first, changed(good, name), good)
    assert f"refused by the transport check: tensor {name!r}: digest" in caplog.text


def test_the_transport_check_finds_one_wrong_expert(moe_story: Story, caplog: pytest.LogCaptureFixture) -> None:
    first, good = moe_story.publication(OLD), moe_story.publication(NEW)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    refused_in_transport(moe_story, first, changed(good, name), good)
    assert f"refused by the transport check: tensor {name!r}: digest" in caplog.text


def test_the_transport_check_finds_the_buckets_of_an_old_version(
    story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    first, good = story.publication(OLD), story.publication(NEW)
    refused_in_transport(story, first, list(first.buckets), good)
    assert f"version {good.manifest.version} was refused by the transport check: tensor 'model." in caplog.text


def put_back(first: Publication, name: str, manifest: Manifest, files: Sequence[Path]) -> None:
    """Give one tensor in the staged files the bytes that it had in `first`: a fault after the transport."""
    (old,) = [entry for entry in first.manifest.tensors if entry.name == name]
    (entry,) = [entry for entry in manifest.tensors if entry.name == name]
    with files[entry.bucket].open("r+b") as file:
        file.seek(entry.start)
        file.write(first.buckets[old.bucket][old.start : old.end].tobytes())


def refused_by_the_probe(story: Story, first: Publication, good: Publication, name: str) -> None:
    """`good` arrives, and one tensor of it is spoiled after that, once.

    Group 0 runs during the load, 1 is sampled after it, and 2 runs when the probe is scored.
    """
    engine, feed, new_version = story.engine, story.feed, good.manifest.version

    async def told() -> list[Group]:
        following = asyncio.create_task(story.weights.run())
        feed.publish(first)
        await until(lambda: len(feed.verdicts) == 1)
        tasks: list[asyncio.Task[Group]] = []

        async def spoil(manifest: Manifest, files: Sequence[Path]) -> None:
            put_back(first, name, manifest, files)
            tasks.append(asyncio.create_task(story.group(0)))
            await asyncio.sleep(story.head_s)

        engine.before_load = spoil
        engine.scoring.clear()
        feed.publish(good)
        await until(lambda: len(engine.loads) == 2)
        tasks.append(asyncio.create_task(story.group(1)))
        await until(lambda: engine.num_ended(group=1) == 4)
        tasks.append(asyncio.create_task(story.group(2)))
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks), "a sample was released before the verdict"
        engine.scoring.set()
        await until(lambda: len(feed.verdicts) == 2)
        assert not any(task.done() for task in tasks), "a sample of refused weights was released"
        groups = [*await asyncio.gather(*tasks), await story.group(3)]
        assert not following.done()
        following.cancel()
        return groups

    groups = story.served.run(told())
    error = story.largest_error(groups)
    probes = [report for report in feed.reports if isinstance(report, ProbeReport)]
    figures = ", ".join(
        f"{p.mismatch.rms:.1e} (largest {p.max_abs:.1e}, {p.mismatch.num_tokens:g} tokens)" for p in probes
    )
    print(f"rms of the probe, before, wrong, right: {figures}; largest error of samples {error:.1e}")
    assert [released for _, released in feed.verdicts] == [True, False, True]
    assert engine.loads[1:] == [(new_version, "recompute"), (new_version, "abort")]
    assert versions(groups[:1]) == {first.manifest.version, new_version}, "group 0 was to be cut"
    assert versions(groups[1:]) == {new_version}
    assert error < 1e-4
    assert max(r.num_tokens for g in groups for r in g.rollouts) <= story.max_tokens
    seeds = [request.seed for request in engine.asked]
    assert len(set(seeds)) == len(seeds)
    assert probes[1].mismatch.rms > 3 * LIMIT
    assert max(probes[0].mismatch.rms, probes[2].mismatch.rms) < LIMIT / 3


def test_the_load_check_finds_one_wrong_tensor(story: Story) -> None:
    first, good = story.publication(OLD), story.publication(NEW)
    refused_by_the_probe(story, first, good, "model.layers.2.self_attn.v_proj.weight")


def test_the_load_check_finds_one_wrong_expert_that_the_probe_meets(moe_story: Story) -> None:
    first, good = moe_story.publication(OLD), moe_story.publication(NEW)
    expert = most_met_expert(moe_story, good, layer=1)
    refused_by_the_probe(moe_story, first, good, f"model.layers.1.mlp.experts.{expert}.down_proj.weight")


def most_met_expert(story: Story, publication: Publication, layer: int) -> int:
    """By the probe's tokens under the new weights."""
    import torch

    story.served.set_noise(NEW)
    counts = np.zeros(story.served.model.config.num_experts, dtype=int)
    for sequence in publication.manifest.probe:
        with torch.no_grad():
            output = story.served.model(torch.tensor(sequence.token_ids[None]).long(), output_router_logits=True)
        chosen = output.router_logits[layer].topk(story.served.model.config.num_experts_per_tok).indices
        counts += np.bincount(chosen.flatten().numpy(), minlength=len(counts))
    return int(counts.argmax())
