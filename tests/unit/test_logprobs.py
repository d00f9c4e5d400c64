"""Chunked, shared, padded: the same log-probabilities and gradients as plain log_softmax over each sequence alone."""

import numpy as np
import pytest
import torch
from tiny_models import EOS_ID, VOCABULARY, tiny_model
from transformers import PreTrainedModel

from learner.logprobs import completion_logprobs
from learner.packing import PADDING, MicroBatch, pack

Sequences = list[tuple[np.ndarray, np.ndarray]]


def make_sequences() -> Sequences:
    """Two prompts with three completions each; every completion ends by the pad token."""
    generator = np.random.default_rng(3)
    sequences = []
    for prompt_tokens in (4, 7):
        prompt = generator.integers(0, VOCABULARY, prompt_tokens)
        completions = [generator.integers(0, VOCABULARY, size) for size in generator.integers(1, 9, 3)]
        sequences += [(prompt, np.append(completion, EOS_ID)) for completion in completions]
    return sequences


def plain_logprobs(model: PreTrainedModel, sequences: Sequences, temperature: float) -> list[torch.Tensor]:
    result = []
    for prompt, completion in sequences:
        ids = torch.from_numpy(np.concatenate([prompt, completion]))
        logits = model(input_ids=ids[None]).logits[0].float() / temperature
        table = torch.log_softmax(logits, dim=-1)
        result.append(torch.stack([table[t - 1, ids[t]] for t in range(len(prompt), len(ids))]))
    return result


def ours(
    model: PreTrainedModel, sequences: Sequences, batches: list[MicroBatch], **settings: float
) -> list[torch.Tensor]:
    by_index: dict[int, torch.Tensor] = {}
    for batch in batches:
        logprobs_T = completion_logprobs(model, batch, settings["temperature"], int(settings["chunk_tokens"]))
        parts = logprobs_T.split(batch.lengths_S.tolist())
        by_index |= dict(zip(batch.indices_S.tolist(), parts, strict=True))
    return [by_index[i] for i in range(len(sequences))]


def gradients(model: PreTrainedModel, logprobs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    sum((i + 1) * part.sum() for i, part in enumerate(logprobs)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize(("budget", "chunk_tokens", "pad_id"), [(1000, 256, EOS_ID), (40, 5, 0), (17, 1, 60)])
def test_values_and_gradients_equal_plain_log_softmax(
    kind: str, share_prompts: bool, budget: int, chunk_tokens: int, pad_id: int
) -> None:
    model, sequences = tiny_model(kind), make_sequences()
    batches = pack(sequences, budget, share_prompts=share_prompts, pad_id=pad_id)
    got = ours(model, sequences, batches, temperature=0.6, chunk_tokens=chunk_tokens)
    expected = plain_logprobs(model, sequences, 0.6)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-6)
    mine_by_name, theirs_by_name = gradients(model, got), gradients(model, expected)
    for name, theirs in theirs_by_name.items():
        torch.testing.assert_close(mine_by_name[name], theirs, atol=2e-4, rtol=1e-4, msg=name)


def test_sampled_final_eos_is_scored_though_it_is_the_pad_token() -> None:
    sequences = make_sequences()
    lengths = sorted(len(c) for _, c in sequences)
    batches = pack(sequences, 1000, share_prompts=False, pad_id=EOS_ID)
    got = ours(tiny_model(), sequences, batches, temperature=1.0, chunk_tokens=64)
    assert sorted(len(part) for part in got) == lengths


@pytest.mark.parametrize("share_prompts", [True, False])
def test_nan_in_the_padding_changes_nothing(share_prompts: bool) -> None:
    model, sequences = tiny_model(), make_sequences()
    (batch,) = pack(sequences, 1000, share_prompts=share_prompts)
    padding = torch.from_numpy(batch.block_ids == PADDING)
    assert padding.any()
    clean = ours(model, sequences, [batch], temperature=1.0, chunk_tokens=8)
    clean_gradients = gradients(model, clean)

    def spoil(module: torch.nn.Module, arguments: object, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill(padding[..., None], torch.nan)

    model.get_decoder().norm.register_forward_hook(spoil)
    spoiled = ours(model, sequences, [batch], temperature=1.0, chunk_tokens=8)
    spoiled_gradients = gradients(model, spoiled)
    for mine, theirs in zip(spoiled, clean, strict=True):
        assert torch.equal(mine, theirs)
    assert all(torch.equal(spoiled_gradients[name], g) for name, g in clean_gradients.items())


def test_full_logits_never_exist() -> None:
    model, sequences = tiny_model(), make_sequences()
    (batch,) = pack(sequences, 1000, share_prompts=True)
    sizes: list[int] = []
    model.lm_head.register_forward_hook(lambda module, arguments, output: sizes.append(len(output)))
    logprobs_T = completion_logprobs(model, batch, 1.0, chunk_tokens=4)
    logprobs_T.sum().backward()
    assert max(sizes) == 4
    assert sum(sizes) == 2 * len(logprobs_T)  # once forward, once recomputed; never on prompt tokens
