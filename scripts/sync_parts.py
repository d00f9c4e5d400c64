"""The measured parts of bench_sync.py. Imports Ray, so it is imported once the cluster is up.

Fetching is timed in a process of its own, as a rollout worker's is.
"""

import asyncio
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray

from learner.main import step_plan
from learner.optim import Optimizer
from learner.policy import Policy
from learner.publish import Publisher
from learner.step import train_step
from rollout.generate import GroupGenerator
from rollout.main import load_tokenizer, vllm_engine
from rollout.prompts import PromptSource
from rollout.receive import Staging, fetch_buckets
from rollout.rewards import load_reward
from rollout.slots import HostSlot
from rollout.verify import check_load
from shared.config import Config
from shared.protocols import Engine
from shared.records import Calibration, Group, GroupId, Publication, Ticket
from shared.spans import Recorder


@ray.remote(num_cpus=0)
class Fetcher:
    """Fetches as a rollout worker does."""

    async def fetch_s(self, publication: Publication) -> float:
        """Seconds until all buckets can be read here."""
        start_s = time.monotonic()
        await fetch_buckets(publication)
        return time.monotonic() - start_s


class Bench:
    """One engine and one policy of a config."""

    def __init__(self, config: Config, engine: Engine, folder: Path) -> None:
        self._config, self._engine = config, engine
        self._staging = Staging.of(folder, HostSlot.claim())
        self._policy = Policy.load(config)
        self._publisher = Publisher(self._policy, config)
        self._fetcher = Fetcher.remote()  # type: ignore[attr-defined]

    async def generate(self) -> tuple[list[Group], float]:
        """The groups of one step, and the seconds they took."""
        config, tokenizer = self._config, load_tokenizer(self._config.model.path)
        prompts, recorder = PromptSource(config, tokenizer), Recorder("bench")
        generator = GroupGenerator(config, self._engine, tokenizer, load_reward(config.reward.function), recorder)
        ids = [GroupId(number) for number in range(config.learner.prompts_per_step)]
        start_s = time.monotonic()
        groups = await asyncio.gather(*[generator.generate(Ticket(g), prompts.training_prompt(g), 0) for g in ids])
        return list(groups), time.monotonic() - start_s

    def train(self, groups: list[Group]) -> float:
        plan = step_plan(self._config, 0, groups, Calibration())
        start_s = time.monotonic()
        train_step(self._policy, Optimizer(self._policy, self._config), groups, plan, self._config)
        return time.monotonic() - start_s

    async def sync(self, version: int, groups: list[Group]) -> dict[str, float]:
        """Publish the policy's weights as `version` and load them; seconds by part, and bytes."""
        start_s = time.monotonic()
        publication: Publication = self._publisher.next(version, groups, changed=True)
        published_s = time.monotonic()
        fetch_s = await self._fetcher.fetch_s.remote(publication)
        buckets = await asyncio.to_thread(ray.get, list(publication.buckets))
        with self._staging.stage(publication.manifest, buckets) as staged:
            parts = await self._engine.load(publication.manifest, staged.files)
        loaded_s = time.monotonic()
        check = await check_load(self._engine, publication.manifest.probe, self._config.max_mismatch)
        if check.fault:
            raise RuntimeError(f"version {version} was refused: {check.fault}")
        return {
            "publish_s": published_s - start_s,
            "fetch_s": fetch_s,
            "digest_s": staged.digest_s,
            "stage_s": staged.stage_s,
            **parts,
            "verdict_s": time.monotonic() - loaded_s,
            "memcpy_s": memcpy_s(buckets),
            "num_bytes": publication.manifest.num_bytes,
            "probe_tokens": check.mismatch.num_tokens,
        }

    def probe_s(self, groups: list[Group]) -> float:
        """Seconds in which the learner makes a probe."""
        start_s = time.monotonic()
        self._publisher.probe(groups)
        return time.monotonic() - start_s


def memcpy_s(buckets: list[Any]) -> float:
    """Seconds to copy the same bytes once within this process."""
    targets = [np.empty_like(bucket) for bucket in buckets]
    for target in targets:
        target.fill(0)  # pages are there before the clock starts
    start_s = time.monotonic()
    for target, bucket in zip(targets, buckets, strict=True):
        np.copyto(target, bucket)
    return time.monotonic() - start_s


async def measure(config: Config, num_syncs: int, folder: Path) -> dict[str, Any]:
    engine = await vllm_engine(config, 0)
    try:
        bench = Bench(config, engine, folder)
        groups, _ = await bench.generate()  # warm
        _, generate_s = await bench.generate()
        train_s = bench.train(groups)
        syncs = [await bench.sync(version, groups) for version in range(1, num_syncs + 1)]
        probe_s = statistics.median(bench.probe_s(groups) for _ in range(num_syncs))
    finally:
        await engine.close()
    median = {key: statistics.median(sync[key] for sync in syncs) for key in syncs[0]}
    paused_s = median["pause_s"] + median["load_s"] + median["resume_s"]
    return {
        "config": basis_of(config),
        "syncs": num_syncs,
        "median": median,
        "paused_s": paused_s,
        "over_memcpy": {
            key: median[key] / median["memcpy_s"] for key in ("fetch_s", "digest_s", "stage_s", "load_s", "publish_s")
        },
        "step": {"generate_s": generate_s, "train_s": train_s, "make_probe_s": probe_s},
        "probe_share": {"engine": median["verdict_s"] / generate_s, "learner": probe_s / train_s},
    }


def basis_of(config: Config) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "model": config.model.path,
        "precision": asdict(config.model.mode),
        "probe_sequences": config.sync.probe_sequences,
        "groups": config.learner.prompts_per_step,
        "group_size": config.sampling.group_size,
    }
