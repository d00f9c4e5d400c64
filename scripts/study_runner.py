"""Training runs of a study: in one process, without Ray or hub, many arms on one engine.

An arm begins by loading the model's own weights as version 0, so arms that share model, precision and engine options
share an engine. Finished runs are found again (study_results); `run_arms` makes the others.
"""

import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from shared.config import Config
from shared.errors import ConfigError
from shared.protocols import Engine
from study_loop import Loop, Row
from study_noise import Noise, NoisyEngine
from study_results import Results, Run

EngineFactory = Callable[[Config], Awaitable[Engine]]


@dataclass(frozen=True)
class Arm:
    """One training run of a study."""

    name: str
    config: Config
    noise: Noise | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the run, as plain data: of the config what its file and the study say.

        A new option, or another default, keeps the runs that were made; raise the study's version if it changes them.
        """
        return {
            "config": self.config.model_dump(mode="json", exclude_unset=True),
            "noise": asdict(self.noise) if self.noise else None,
        }


async def vllm_engine(config: Config) -> Engine:
    """A real engine on the first core, one thread in each of its processes."""
    from rollout.engine import VllmEngine

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return await VllmEngine.create(config)


@asynccontextmanager
async def engine_running(config: Config, make_engine: EngineFactory = vllm_engine) -> AsyncIterator[Engine]:
    """An engine for the block; all its processes end with it."""
    engine = await make_engine(config)
    try:
        yield engine
    finally:
        await engine.close()


async def run_arms(
    arms: Sequence[Arm],
    results: Results,
    progress: Callable[[str, int, int], None],
    make_engine: EngineFactory = vllm_engine,
) -> list[Run]:
    """Every arm's finished run, in order; those that are not there yet are made. `progress`: arm, steps done, steps."""
    missing: dict[str, list[Arm]] = {}
    for arm in arms:
        if results.find(arm.name, arm.settings) is None:
            missing.setdefault(engine_needed(arm.config), []).append(arm)
    for sharing in missing.values():
        async with engine_running(sharing[0].config, make_engine) as engine:
            for arm in sharing:
                rows: list[Row] = []
                async for row in run_training(engine, arm.config, arm.noise):
                    rows.append(row)
                    progress(arm.name, len(rows), arm.config.learner.steps)
                results.write(arm.name, arm.settings, pa.Table.from_pylist(rows))
    runs = [results.find(arm.name, arm.settings) for arm in arms]
    return [run for run in runs if run is not None]


def engine_needed(config: Config) -> str:
    """Arms for which this is equal can share an engine."""
    rollout = config.rollout
    options = (rollout.max_model_len, rollout.max_num_seqs, rollout.memory_share, rollout.threads)
    return json.dumps([config.model.path, config.model.mode.engine, *options])


async def run_training(engine: Engine, config: Config, noise: Noise | None = None) -> AsyncIterator[Row]:
    """Train `learner.steps` steps from the model's own weights; one row a step.

    A row is the record of shared.metrics, with generate_s (of the step's own groups), check_s (the sampling check of
    step 0), load_s (weights copied out, staged and swapped) and probe_s beside it; with `evaluation.samples` also
    held_out_before in the first row and held_out_after in the last. `noise` perturbs what the engine reports.

    Raises:
        ConfigError: `sync.max_staleness` above 1.
        RunFailed: the sampling check, or the load check of a version, refuses the engine's numbers.
    """
    if config.sync.max_staleness > 1:
        raise ConfigError(f"sync.max_staleness = {config.sync.max_staleness}: a study's loop knows 0 and 1.")
    last = config.learner.steps - 1
    with tempfile.TemporaryDirectory(prefix="seqrelay-study-") as folder:
        loop = Loop(NoisyEngine(engine, noise) if noise else engine, config, Path(folder))
        try:
            await loop.load(0, (), changed=True)
            before = await loop.held_out(0)
            for step in range(last + 1):
                row = await loop.step(step)
                after = await loop.held_out(step + 1) if step == last else None
                yield row | {"held_out_before": None if step else before, "held_out_after": after}
        finally:
            await loop.close()
