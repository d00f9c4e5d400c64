"""Engines for rollout workers of integration tests; importable in their processes, and light."""

from pathlib import Path

import ray
from fake_engine import FakeEngine

from rollout.receive import staging_root
from shared.config import Config
from shared.protocols import Engine

TOKEN_S = 0.03


async def fake_engine(config: Config, worker_index: int) -> Engine:
    """A deterministic engine; it writes down which Ray node it runs on, and where weights are staged for it."""
    note = Path(config.run.directory) / f"{config.run.name}-worker-{worker_index}"
    note.with_suffix(".node").write_text(ray.get_runtime_context().get_node_id())
    note.with_suffix(".staging").write_text(str(staging_root()))
    return FakeEngine(token_s=TOKEN_S)


async def broken_engine(config: Config, worker_index: int) -> Engine:
    raise RuntimeError("no engine on this host")
