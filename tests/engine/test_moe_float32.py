"""A small MoE in float32: the engine contract, agreement with transformers, refusals, and recovery."""

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_contract import EngineContract

from rollout.engine import sampling_params
from shared.errors import WeightSyncError
from shared.protocols import GenerateRequest

pytestmark = pytest.mark.engine

PROMPTS = [list(range(2, 2 + length)) for length in (1, 3, 8, 21, 40, 64)]
LAYER = "model.layers.1."


class TestVllmEngine(EngineContract):
    @pytest.fixture
    def served(self, moe: Any) -> Any:
        return moe


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_without_an_update_every_ratio_is_one(moe: Any, temperature: float) -> None:
    moe.load(None)
    completions = moe.sample(PROMPTS, 80, temperature)
    assert moe.worst_log_ratio(PROMPTS, completions, temperature) <= 1.0


def test_ratios_are_one_after_three_syncs_with_changed_weights(moe: Any) -> None:
    for noise in (11, 12, 13):
        moe.load(noise)
        completions = moe.sample(PROMPTS, 80)
        assert moe.worst_log_ratio(PROMPTS, completions) <= 1.0


def test_pushing_the_same_experts_again_changes_nothing(moe: Any) -> None:
    moe.load(None)
    completions = moe.sample(PROMPTS[:3], 40)
    tokens = [[*prompt, *c.token_ids.tolist()] for prompt, c in zip(PROMPTS, completions, strict=False)]
    for _ in range(3):
        moe.load(None)
        for prompt, ids, completion in zip(PROMPTS, tokens, completions, strict=False):
            scored = moe.run(moe.engine.score(ids, len(prompt)))
            np.testing.assert_allclose(scored, completion.logprobs, atol=5e-6, rtol=0)


def test_prompts_of_different_lengths_align_token_by_token(moe: Any) -> None:
    moe.load(None)
    for prompt, completion in zip(PROMPTS, moe.sample(PROMPTS, 60), strict=True):
        np.testing.assert_allclose(completion.logprobs, moe.reference(prompt, completion), atol=2e-5, rtol=0)


def test_more_prompts_at_once_than_one_engine_step_can_prefill(moe: Any) -> None:
    """A seeded prompt that is prefilled in two parts ends vLLM 0.32 on CPU."""
    moe.load(None)
    prompts = [[2 + (i + j) % 90 for j in range(100)] for i in range(48)]
    completions = moe.sample(prompts, 4)
    assert moe.worst_log_ratio(prompts, completions) <= 1.0


def test_a_cached_prompt_is_computed_again_under_new_weights(moe: Any) -> None:
    prompt = [2 + i % 90 for i in range(300)]
    moe.load(None)
    moe.sample([prompt], 4)
    params = sampling_params(GenerateRequest("", prompt, 4, 1.0, 1, ""))
    assert moe.run(moe.engine._run("cached", prompt, params, "s")).num_cached_tokens > 0, "the test needs a cache hit"
    moe.load(21)
    completion = moe.sample([prompt], 30)[0]  # the same salt: only the reset separates the versions
    np.testing.assert_allclose(completion.logprobs, moe.reference(prompt, completion), atol=1e-4, rtol=0)


def test_the_models_generation_defaults_do_not_reach_the_sampler(moe: Any) -> None:
    """The model's folder says top_p 0.8, top_k 5, temperature 0.3 and more (and the ratios above are 1)."""
    assert json.loads((moe.path / "generation_config.json").read_text())["top_p"] == 0.8
    assert moe.engine._llm.vllm_config.model_config.get_diff_sampling_param() == {}
    moe.load(None)
    completions = moe.sample([PROMPTS[1]] * 24, 60)
    sampled = np.concatenate([moe.reference(PROMPTS[1], c) for c in completions])
    assert np.exp(sampled).min() < 0.01, "tokens that top_p or min_p would have removed are sampled"
    assert len({token for c in completions for token in c.token_ids.tolist()}) > 60


def renamed(old: str, new: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    return lambda tensors: {new if name == old else name: value for name, value in tensors.items()}


def dropped(name: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    return lambda tensors: {n: value for n, value in tensors.items() if n != name}


DOWN_3 = LAYER + "mlp.experts.3.down_proj.weight"
V = LAYER + "self_attn.v_proj.weight"


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (dropped(DOWN_3), DOWN_3),
        (renamed(DOWN_3, LAYER + "mlp.experts.3.w2.weight"), "experts.3.w2"),
        (dropped(V), V),
        (lambda tensors: {**tensors, V: torch.zeros(3, 128)}, V),
        (lambda tensors: {**tensors, V: tensors[V].bfloat16()}, V),
    ],
    ids=["dropped expert", "renamed expert", "q and k without v", "wrong shape", "wrong dtype"],
)
@pytest.mark.parametrize("by", ["the engine", "the receiver"])
def test_incomplete_weights_are_refused_by_name_and_the_old_version_stays(
    moe: Any, monkeypatch: pytest.MonkeyPatch, edit: Any, name: str, by: str
) -> None:
    moe.load(None)
    before = moe.sample(PROMPTS[:2], 20)
    if by == "the receiver":  # the check inside vLLM's own process, which also covers other tools that call it
        monkeypatch.setattr("rollout.engine.check_coverage", lambda *_: None)
    with pytest.raises(WeightSyncError, match=name.replace(".", r"\.")):
        moe.load(31, edit)
    moe.set_noise(None)
    for prompt, completion in zip(PROMPTS, before, strict=False):
        scored = moe.run(moe.engine.score([*prompt, *completion.token_ids.tolist()], len(prompt)))
        np.testing.assert_allclose(scored, completion.logprobs, atol=5e-6, rtol=0)
    after = moe.sample(PROMPTS[:2], 20)
    assert [c.version_spans[0][0] for c in after] == [c.version_spans[0][0] for c in before]
    assert moe.worst_log_ratio(PROMPTS[:2], after) <= 1.0


def break_second_file(files: list[Path]) -> None:
    """Leave a hole in front of the last tensor's bytes: its header entry is valid, safetensors refuses the file."""
    raw = files[1].read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    last = max((v for k, v in header.items() if k != "__metadata__"), key=lambda v: v["data_offsets"][1])
    last["data_offsets"] = [offset + 4 for offset in last["data_offsets"]]
    encoded = json.dumps(header).encode()
    files[1].write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw[8 + length :] + bytes(4))


def test_a_load_that_fails_half_way_stops_serving_until_one_succeeds(moe: Any) -> None:
    moe.load(None)
    manifest, files = moe.publish(41)
    break_second_file(files)

    async def load_while_running() -> list[Any]:
        running = asyncio.create_task(moe.engine.generate(GenerateRequest("running", PROMPTS[2], 300, 1.0, 1, "s")))
        await asyncio.sleep(0.05)
        return await asyncio.gather(moe.engine.load(manifest, files), running, return_exceptions=True)

    refused, running = moe.run(load_while_running())
    assert isinstance(refused, WeightSyncError)
    assert "half-written" in str(refused)
    assert isinstance(running, WeightSyncError), "tokens of a half-written model must not leave the engine"
    with pytest.raises(WeightSyncError, match="serves nothing"):
        moe.sample(PROMPTS[:1], 4)
    with pytest.raises(WeightSyncError, match="serves nothing"):
        moe.run(moe.engine.load(moe.publish(41)[0], []))
    moe.load(42)
    assert moe.worst_log_ratio(PROMPTS, moe.sample(PROMPTS, 60)) <= 1.0
