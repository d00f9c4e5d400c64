"""A rollout service with a deterministic engine in vLLM's place: `python -m service_engines ENGINE --config ...`.

`ENGINE` is the name of one of the factories below. Their processes, and the service's, find this module by name.
"""

import asyncio
import os
import signal
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from fake_engine import FakeEngine

from rollout.main import run_workers
from shared.config import Config
from shared.errors import WeightSyncError
from shared.protocols import Completion, Engine, GenerateRequest, RequestsInLoad
from shared.records import Float32Array, Manifest
from shared.service import run_service
from shared.stopping import StopRequest

TOKEN_S = 0.01
SLOW_TOKEN_S = 0.1
SLOW_S = 1.5
FAULTY_VERSION = 2


@dataclass
class FaultyEngine:
    """The deterministic engine with one fault, by its name here."""

    fault: str
    note: Path
    engine: FakeEngine = field(default_factory=lambda: FakeEngine(token_s=TOKEN_S))
    is_faulty: bool = False

    async def generate(self, request: GenerateRequest) -> Completion:
        if self.fault == "raises":
            raise RuntimeError("the engine has no tokens today")
        if self.fault == "uneven" and zlib.crc32(request.request_id.encode()) % 8 == 0:
            await asyncio.sleep(SLOW_S)
        return await self.engine.generate(request)

    async def score(self, token_ids: Sequence[int], first: int) -> Float32Array:
        if self.fault == "scores_wrong":
            return np.full(len(token_ids) - first, np.nan, dtype=np.float32)
        return await self.engine.score(token_ids, first)

    async def load(
        self, manifest: Manifest, files: Sequence[Path], requests: RequestsInLoad = "recompute"
    ) -> dict[str, float]:
        if self.fault in ("load_fails", "dies_in_load") and manifest.version >= FAULTY_VERSION:
            self.is_faulty = self.is_faulty or self._is_first()
        if self.is_faulty:
            if self.fault == "dies_in_load":
                os.kill(os.getpid(), signal.SIGKILL)
            raise WeightSyncError(f"version {manifest.version} does not fit")
        return await self.engine.load(manifest, files, requests)

    async def close(self) -> None:
        await self.engine.close()

    def _is_first(self) -> bool:
        """Once in a run, whichever worker it is."""
        try:
            self.note.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _faulty(fault: str, config: Config) -> Engine:
    return FaultyEngine(fault, Path(config.run.directory) / f"{config.run.name}.{fault}")


async def steady(config: Config, host_slot: int) -> Engine:
    return FakeEngine(token_s=TOKEN_S)


async def slow(config: Config, host_slot: int) -> Engine:
    return FakeEngine(token_s=SLOW_TOKEN_S)


async def uneven(config: Config, host_slot: int) -> Engine:
    """One completion in eight takes a second and a half more."""
    return _faulty("uneven", config)


async def raises(config: Config, host_slot: int) -> Engine:
    return _faulty("raises", config)


async def scores_wrong(config: Config, host_slot: int) -> Engine:
    return _faulty("scores_wrong", config)


async def load_fails(config: Config, host_slot: int) -> Engine:
    return _faulty("load_fails", config)


async def dies_in_load(config: Config, host_slot: int) -> Engine:
    return _faulty("dies_in_load", config)


async def dies_at_start(config: Config, host_slot: int) -> Engine:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


async def fails_at_start(config: Config, host_slot: int) -> Engine:
    raise RuntimeError("no engine on this host")


FACTORIES = {
    factory.__name__: factory
    for factory in (steady, slow, uneven, raises, scores_wrong, load_fails, dies_in_load, dies_at_start, fails_at_start)
}


def main(name: str, arguments: list[str]) -> int:
    import service_engines  # by its name, which the workers import; this process knows it as __main__

    factory = service_engines.FACTORIES[name]

    def run(config: Config, run_directory: Path, stop: StopRequest) -> bool:
        return run_workers(config, run_directory, stop, factory)

    return run_service("rollout", run, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
