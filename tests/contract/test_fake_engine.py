"""The fake keeps the contract that vLLM keeps, and can be cut at any token."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_contract import PROMPT, EngineContract, request
from fake_engine import EOS_ID, FakeEngine
from safetensors.numpy import save

from shared.errors import RolloutRejected
from shared.records import Manifest
from shared.weights import bucket_entries

TENSORS = {f"layer.{i}.weight": np.full((2, 3), i, dtype=np.float32) for i in range(4)}
Edit = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


class ServedFake:
    tolerance = 1e-6
    eos_id = EOS_ID

    def __init__(self, folder: Path) -> None:
        self.engine = FakeEngine(token_s=0.002, expected={name: tensor.shape for name, tensor in TENSORS.items()})
        self._folder = folder
        self._version = 0

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(coroutine)

    def publish(self, noise: int | None, edit: Edit | None = None) -> tuple[Manifest, list[Path]]:
        self._version += 1
        tensors = {name: tensor + np.float32(noise or 0) for name, tensor in TENSORS.items()}
        file = self._folder / f"v{self._version}.safetensors"
        file.write_bytes(save(dict(edit(tensors) if edit else tensors)))
        entries = bucket_entries(np.fromfile(file, dtype=np.uint8), 0)
        return Manifest(self._version, self._version, entries), [file]


class TestFakeEngine(EngineContract):
    @pytest.fixture
    def served(self, tmp_path: Path) -> ServedFake:
        return ServedFake(tmp_path)


def test_a_completion_cut_at_any_token_continues_as_if_uninterrupted() -> None:
    engine = FakeEngine()
    whole = asyncio.run(engine.generate(request(seed=1, max_tokens=16)))
    for cut in range(1, len(whole.token_ids)):
        head = asyncio.run(engine.generate(request(seed=1, max_tokens=cut)))
        resumed = request(seed=1, max_tokens=16 - cut)
        resumed = type(resumed)(**{**vars(resumed), "prompt_ids": (*PROMPT, *head.token_ids.tolist())})
        tail = asyncio.run(engine.generate(resumed))
        np.testing.assert_array_equal(np.concatenate([head.token_ids, tail.token_ids]), whole.token_ids)
        np.testing.assert_array_equal(np.concatenate([head.logprobs, tail.logprobs]), whole.logprobs)


def test_requests_can_be_rejected() -> None:
    engine = FakeEngine(reject=lambda r: "nan" if r.seed == 7 else None)
    with pytest.raises(RolloutRejected, match="nan"):
        asyncio.run(engine.generate(request(seed=7)))
    asyncio.run(engine.generate(request(seed=8)))
