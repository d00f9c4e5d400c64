"""The rollout service: `python -m rollout.main --config run/config.json --address HOST:PORT`.

Starts one Ray actor for each worker, each around its own vLLM engine, and waits for them. The first error of a worker
goes to the hub with its traceback, so that the learner stops too, and ends the service.
"""

import os
import sys
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from rollout.generate import GroupGenerator
from rollout.prompts import PromptSource
from rollout.receive import Staging
from rollout.rewards import load_reward
from rollout.worker import Worker
from shared.config import Config
from shared.errors import ConfigError
from shared.hub_client import AsyncHubClient, connect
from shared.protocols import Engine
from shared.service import run_service
from shared.spans import Recorder

EngineFactory = Callable[[Config, int], Awaitable[Engine]]


async def vllm_engine(config: Config, worker_index: int) -> Engine:
    """The engine of a real run. Imported late: the service process itself does not need vLLM."""
    from rollout.engine import VllmEngine

    return await VllmEngine.create(config, worker_index)


def load_tokenizer(model_path: str) -> Any:
    """The transformers tokenizer in the model's folder. ConfigError when its files cannot be used."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"model.path = {model_path}: its tokenizer cannot be used: {error!r}") from error


class RolloutWorker:
    """The Ray actor: builds a worker from plain values inside its own process and runs it to the end."""

    async def run(self, config: Config, index: int, run_directory: Path, engine_factory: EngineFactory) -> None:
        tokenizer = load_tokenizer(config.model.path)
        recorder = Recorder(f"worker-{index}-{os.getpid()}")
        prompts = PromptSource(config, tokenizer)
        reward = load_reward(config.reward.function)
        hub = AsyncHubClient(connect(config.run.name))
        engine = await engine_factory(config, index)
        try:
            generator = GroupGenerator(config, engine, tokenizer, reward, recorder)
            staging = _staging(run_directory, index)
            await Worker(config, hub, engine, prompts, generator, recorder, staging).run()
        finally:
            await engine.close()


def run_workers(
    config: Config,
    run_directory: Path,
    engine_factory: EngineFactory = vllm_engine,
    resources: Mapping[str, float] | None = None,
) -> None:
    """Start `rollout.workers` actors and wait until all have ended. Raises the first error of any of them.

    `resources`: custom Ray resources each actor asks for, which decides the nodes it may run on.
    """
    actor = ray.remote(RolloutWorker).options(num_cpus=0, max_restarts=0, resources=dict(resources or {}))
    workers = [actor.remote() for _ in range(config.rollout.workers)]
    pending: list[Any] = [
        worker.run.remote(config, index, run_directory, engine_factory) for index, worker in enumerate(workers)
    ]
    try:
        while pending:
            done, pending = ray.wait(pending, num_returns=1)
            ray.get(done)
    finally:
        for index, worker in enumerate(workers):
            ray.kill(worker)  # a worker that is ended in the middle of a load cannot tidy up
            _staging(run_directory, index).clear()


def _staging(run_directory: Path, index: int) -> Staging:
    """Its name is that of every life of a worker, so that a killed one's files are cleared; unique on the host."""
    name = f"{run_directory.name}-{zlib.crc32(str(run_directory).encode()):08x}-{index}"
    return Staging(name, fallback=run_directory / "staging")


def main(arguments: list[str]) -> int:
    return run_service("rollout", run_workers, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
