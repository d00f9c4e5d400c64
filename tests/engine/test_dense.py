"""SmolLM2, a dense model with tied embeddings and a real tokenizer: float32 is exact, bfloat16 is close and alive."""

from typing import Any

import numpy as np
import pytest

from shared.protocols import Completion

pytestmark = pytest.mark.engine

QUESTIONS = ["What is 7 + 5? Answer with only the number.", "Hi!", "Name three rivers and one lake.", "1+2=3\n"]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path, local_files_only=True)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Four chat prompts of different lengths."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_without_an_update_every_ratio_is_one(dense: Any, prompts: list[list[int]], temperature: float) -> None:
    dense.load(None)
    completions = dense.sample(prompts, 24, temperature)
    assert dense.worst_log_ratio(prompts, completions, temperature) <= 1.0
    for prompt, completion in zip(prompts, completions, strict=True):
        reference = dense.reference(prompt, completion, temperature)
        np.testing.assert_allclose(completion.logprobs, reference, atol=2e-4, rtol=0)


def test_ratios_are_one_after_three_syncs_with_changed_weights(dense: Any, prompts: list[list[int]]) -> None:
    for noise in (1, 2, 3):
        dense.load(noise)
        assert dense.worst_log_ratio(prompts[:3], dense.sample(prompts[:3], 12)) <= 1.0


def test_pushing_the_same_weights_again_changes_nothing(dense: Any, prompts: list[list[int]]) -> None:
    dense.load(None)
    completion = dense.sample(prompts[:1], 16)[0]
    for _ in range(3):
        dense.load(None)
        scored = dense.run(dense.engine.score([*prompts[0], *completion.token_ids.tolist()], len(prompts[0])))
        np.testing.assert_allclose(scored, completion.logprobs, atol=1e-4, rtol=0)


def test_a_changed_embedding_changes_the_tied_head_too(dense: Any, prompts: list[list[int]]) -> None:
    dense.load(None)
    before = dense.sample(prompts[:2], 8)
    for noise in (7, 8):
        dense.load(noise, only="embed_tokens")
        assert dense.worst_log_ratio(prompts[:2], dense.sample(prompts[:2], 8)) <= 1.0
        assert dense.worst_log_ratio(prompts[:2], before) > 100, "the noise must be visible"


def test_ids_are_those_that_were_sampled(dense: Any, prompts: list[list[int]], tokenizer: Any) -> None:
    """Some samples at temperature 1 change when they are decoded and encoded again: ids never make that detour."""
    dense.load(None)
    completions = dense.sample([prompts[1]] * 24, 16)

    def survives(completion: Completion) -> bool:
        ids = completion.token_ids.tolist()
        return tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids

    changed = [completion for completion in completions if not survives(completion)]
    assert 0 < len(changed) < 24
    assert dense.worst_log_ratio([prompts[1]] * len(changed[:4]), changed[:4]) <= 1.0


def test_the_final_eos_is_part_of_the_completion(dense: Any, prompts: list[list[int]]) -> None:
    """pad = eos = 2 here: only lengths can say what is real."""
    dense.load(None)
    completions = dense.sample([prompts[0]] * 8, 32)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == dense.eos_id == 2
        assert dense.eos_id not in completion.token_ids[:-1]
        assert len(completion.logprobs) == len(completion.token_ids)
    assert dense.worst_log_ratio([prompts[0]] * len(stopped[:2]), stopped[:2]) <= 1.0


def test_bfloat16_is_close_before_and_after_a_sync(dense_bf16: Any, prompts: list[list[int]]) -> None:
    for noise in (None, 5):
        dense_bf16.load(noise)
        completions = dense_bf16.sample(prompts[:3], 16)
        pairs = zip(prompts[:3], completions, strict=True)
        errors = np.concatenate([np.abs(dense_bf16.reference(p, c) - c.logprobs) for p, c in pairs])
        assert errors.mean() < 0.1
        assert errors.max() < 1.0
