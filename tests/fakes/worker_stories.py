"""A rollout worker around a deterministic engine, and a learner for it that trains nothing. No Ray, no vLLM."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_engine import FakeEngine, probe_of
from hub_stories import IDENTITY, LEARNER
from safetensors.numpy import save

from rollout.generate import GroupGenerator
from rollout.prompts import PromptSource
from rollout.receive import Staging
from rollout.rewards import Sample
from rollout.worker import Worker
from shared.config import Config
from shared.hub import Hub
from shared.protocols import Completion, GenerateRequest, RequestsInLoad
from shared.records import ClipRange, Float32Array, Group, Manifest, Publication, StepPlan
from shared.schema import decode_group
from shared.spans import Recorder
from shared.weights import bucket_entries, weights_digest

WRONG = "wrong"
TOKENIZER = SimpleNamespace(
    chat_template=None,
    encode=lambda text, add_special_tokens: [ord(c) % 128 for c in text],
    decode=lambda token_ids, skip_special_tokens: "".join(map(chr, token_ids)),
)
SMALL = {
    "prompts": {"style": "plain", "num_held_out": 4},
    "sampling": {"group_size": 4, "max_tokens": 5},
    "learner": {"steps": 3, "prompts_per_step": 2, "minibatches": 1},
    "evaluation": {"samples": 0},
    "sync": {"max_staleness": 0},
}


def length_of(samples: list[Sample], answer: str) -> list[float | None]:
    return [float(len(s.text)) for s in samples]


def small_config(make_config: Callable[..., Config], **sections: dict[str, Any]) -> Config:
    return make_config(**{name: SMALL.get(name, {}) | sections.get(name, {}) for name in SMALL.keys() | sections})


def make_worker(
    config: Config, hub: Any, folder: Path, engine: FakeEngine | None = None, name: str = "w0", reward: Any = length_of
) -> Worker:
    engine, recorder = engine or FakeEngine(), Recorder(name)
    generator = GroupGenerator(config, engine, TOKENIZER, reward, recorder)
    staging = Staging(f"test-{name}", fallback=folder)
    return Worker(config, hub, engine, PromptSource(config, TOKENIZER), generator, recorder, staging)


class WatchedEngine(FakeEngine):
    """Writes down what it is asked for. After its loads `wrong` (counted from 0) it computes with other weights.

    While `scoring` is cleared, no score ends. AssertionError when it is asked for one during a pause, which a real
    engine would answer only after it.
    """

    def __init__(self, token_s: float = 0.0, wrong: Collection[int] = ()) -> None:
        super().__init__(token_s=token_s)
        self._wrong = wrong
        self.asked: list[tuple[int, GenerateRequest]] = []  # the active version, the request
        self.asked_wrong: list[str] = []  # ids of requests that came while it computed with other weights
        self.loads: list[tuple[int, RequestsInLoad]] = []
        self.num_scores = 0
        self.scoring = asyncio.Event()
        self.scoring.set()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append((self._version, request))
        if self._weights == WRONG:
            self.asked_wrong.append(request.request_id)
        return await super().generate(request)

    async def score(self, token_ids: Sequence[int], first: int) -> Float32Array:
        if self.is_paused:
            raise AssertionError("score during a pause")
        self.num_scores += 1
        await self.scoring.wait()
        return await super().score(token_ids, first)

    async def load(
        self, manifest: Manifest, files: Sequence[Path], requests: RequestsInLoad = "recompute"
    ) -> dict[str, float]:
        parts = await super().load(manifest, files, requests)
        if len(self.loads) in self._wrong:
            self._weights = WRONG
        self.loads.append((manifest.version, requests))
        return parts


def weights(version: int, incarnation: int = 0) -> Publication:
    """New weights for every (version, incarnation), in one bucket, which is a plain array, with their probe."""
    blob = np.frombuffer(save({"weight": np.float32([version, incarnation])}), np.uint8)
    manifest = Manifest(version, version, tuple(bucket_entries(blob, 0)), incarnation=incarnation)
    return Publication(replace(manifest, probe=probe_of(manifest)), (blob,))


def largest_error(groups: Sequence[Group]) -> float:
    """Of the groups' log-probabilities (nats), against engines that hold the right weights of each segment."""
    initial = FakeEngine()
    errors = [0.0]
    for group in groups:
        for rollout in group.rollouts:
            ids = [*group.prompt_ids.tolist(), *rollout.completion_ids.tolist()]
            for segment in rollout.segments:
                version = segment.policy_version
                right = FakeEngine(initial_weights=weights_digest(weights(version).manifest)) if version else initial
                for i in range(segment.start, segment.end):
                    at = len(group.prompt_ids) + i
                    expected = right._logprobs(ids[:at], group.temperature)[ids[at]]
                    errors.append(abs(float(rollout.behavior_logprobs[i]) - expected))
    return max(errors)


async def take_groups(hub: Hub, step: int) -> list[Group]:
    while (taken := await hub.take(LEARNER, step)).groups is None:
        pass
    return [decode_group(payload) for payload in taken.groups]


async def train_step(hub: Hub, step: int, publish: bool = True) -> list[Group]:
    groups = await take_groups(hub, step)
    await hub.begin_step(LEARNER, StepPlan(step, tuple(group.group for group in groups), 7, ClipRange(3e-4, 4e-4)))
    await hub.commit_step(LEARNER, step, f"digest-{step}")
    if publish:
        await hub.publish(LEARNER, weights(step + 1))
    return groups


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def start(worker: Worker) -> "asyncio.Task[bool]":
    return asyncio.create_task(worker.run(IDENTITY))


async def end(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
