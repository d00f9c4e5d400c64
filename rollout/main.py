"""The rollout service: `python -m rollout.main --config run/config.json --address HOST:PORT`.

Starts one Ray actor for each worker, each around its own vLLM engine, and watches over them (rollout.crew). The first
error of a worker goes to the hub with its traceback, so that the learner stops too, and ends the service.
"""

import asyncio
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.crew import Crew, EngineFactory
from rollout.generate import GroupGenerator
from rollout.prompts import PromptSource
from rollout.receive import Staging, clear_abandoned
from rollout.rewards import load_reward
from rollout.shared_memory import clear_shared_memory, shared_memory_noted
from rollout.slots import HostSlot
from rollout.worker import Worker
from shared.config import Config
from shared.errors import ConfigError
from shared.hub_client import AsyncHubClient
from shared.hub_start import find_hub
from shared.identity import identity_of
from shared.protocols import Engine
from shared.service import run_service
from shared.spans import Recorder
from shared.stopping import StopRequest

_LOG = logging.getLogger(__name__)
_LOOK_AGAIN_S = 1.0
_LOOKS_PER_LINE = 30


async def vllm_engine(config: Config, host_slot: int) -> Engine:
    """The engine of a real run. Imported late: the service process itself does not need vLLM."""
    from rollout.engine import VllmEngine

    return await VllmEngine.create(config, host_slot)


def load_tokenizer(model_path: str) -> Any:
    """The transformers tokenizer in the model's folder. ConfigError when its files cannot be used."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"model.path = {model_path}: its tokenizer cannot be used: {error!r}") from error


class RolloutWorker:
    """The Ray actor: builds a worker from plain values inside its own process and runs it to the end."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._running: asyncio.Task[bool] | None = None
        self._draining = False

    async def run(self, worker_id: str, config: Config, run_directory: Path, engine_factory: EngineFactory) -> bool:
        """True: the run is finished; False: the worker was drained before that."""
        self._running = asyncio.create_task(self._run(worker_id, config, run_directory, engine_factory))
        await asyncio.wait({self._running})
        return not self._running.cancelled() and self._running.result()

    async def drain(self) -> None:
        """Finish what is held, then end."""
        self._draining = True
        if self._worker is not None:
            self._worker.drain()

    async def close(self) -> None:
        """End at once, the engine's processes included."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _run(self, worker_id: str, config: Config, run_directory: Path, engine_factory: EngineFactory) -> bool:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        clear_up()  # before a slot is claimed: what a killed one left in this very slot counts too
        slot = HostSlot.claim()
        tokenizer = load_tokenizer(config.model.path)
        recorder = Recorder(worker_id)
        prompts = PromptSource(config, tokenizer)
        reward = load_reward(config.reward.function)
        identity = identity_of(config)
        if (hub := find_hub(config.run.name)) is not None:  # refused now rather than after the engine's start
            await AsyncHubClient(config.run.name, hub).check(identity)
        staging = Staging.of(run_directory, slot)
        with shared_memory_noted(slot):
            engine = await engine_factory(config, slot.index)
        why = "ended"
        try:
            generator = GroupGenerator(config, engine, tokenizer, reward, recorder)
            client = AsyncHubClient(config.run.name, await self._wait_for_hub(config.run.name))
            self._worker = Worker(config, client, engine, prompts, generator, recorder, staging)
            if self._draining:
                self._worker.drain()
            return await self._worker.run(identity)
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            raise
        finally:
            await engine.close()
            if self._worker is not None:  # only now, with nothing of it left on this host
                await client.leave(worker_id, why)

    async def _wait_for_hub(self, run_name: str) -> Any:
        """The hub, which the learner starts. Waits, and says so; drained meanwhile, it raises CancelledError."""
        looks = 0
        while (hub := find_hub(run_name)) is None:
            if self._draining:
                raise asyncio.CancelledError
            if looks % _LOOKS_PER_LINE == 0:
                _LOG.info("waiting for the learner of run %s, which starts its hub", run_name)
            looks += 1
            await asyncio.sleep(_LOOK_AGAIN_S)
        return hub


def run_workers(
    config: Config,
    run_directory: Path,
    stop: StopRequest,
    engine_factory: EngineFactory = vllm_engine,
    resources: Mapping[str, float] | None = None,
) -> bool:
    """Start `rollout.workers` workers and wait until all have ended: True if the run is finished.

    Raises the first error of any of them. `resources`: custom Ray resources each worker asks for.
    """
    try:
        return Crew(RolloutWorker, config, run_directory, engine_factory, resources or {}).work(stop)
    finally:
        clear_up()


def clear_up() -> None:
    """Remove what killed workers left on this host: staged weights and their engines' shared memory."""
    clear_abandoned()
    clear_shared_memory()


def main(arguments: list[str]) -> int:
    return run_service("rollout", run_workers, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
