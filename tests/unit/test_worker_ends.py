"""What is left when an engine or a rollout worker ends in the middle of a load. No vLLM, no Ray cluster."""

import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from tiny_models import tiny_config, tiny_model

import rollout.engine
import rollout.main
from rollout.engine import VllmEngine
from rollout.receive import ROOT_VARIABLE, Staging
from rollout.slots import HostSlot
from shared.errors import EngineDied, WeightSyncError
from shared.records import Manifest


def test_a_load_during_which_the_engine_dies_fails_instead_of_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model().save_pretrained(tmp_path)
    monkeypatch.setattr(rollout.engine, "ALIVE_POLL_S", 0.01)

    async def story() -> None:
        llm = SimpleNamespace(errored=False, update_weight_version=lambda label: asyncio.Event().wait())
        engine = VllmEngine(tiny_config(tmp_path))
        engine._llm = llm
        loading = asyncio.create_task(engine.load(Manifest(1, 0, ()), []))
        await asyncio.sleep(0.1)
        assert not loading.done()
        llm.errored = True
        with pytest.raises(EngineDied, match="ended during a load"):
            await asyncio.wait_for(loading, timeout=5)

    asyncio.run(story())


@pytest.mark.parametrize("died", [True, False])
def test_a_load_that_fails_because_the_engine_died_says_so(tmp_path: Path, died: bool) -> None:
    tiny_model().save_pretrained(tmp_path)

    async def story() -> None:
        llm = SimpleNamespace(errored=False)

        async def fail(label: str) -> None:
            llm.errored = died
            raise WeightSyncError("no answer")

        llm.update_weight_version = fail
        engine = VllmEngine(tiny_config(tmp_path))
        engine._llm = llm
        with pytest.raises(EngineDied if died else WeightSyncError):
            await engine.load(Manifest(1, 0, ()), [])

    asyncio.run(story())


def test_staged_weights_of_workers_that_died_are_removed_when_the_service_ends(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    left = Staging.of(tmp_path, HostSlot(3))._folders[0] / "v3"
    left.mkdir(parents=True)
    (left / "bucket-0.safetensors").write_bytes(b"weights")
    with patch.object(rollout.main, "Crew", side_effect=SystemExit(143)), pytest.raises(SystemExit):
        rollout.main.run_workers(make_config(), tmp_path, stop=SimpleNamespace())
    assert not left.exists()
