"""What we assume about a model, checked on a few tokens when it is loaded.

Two things are taken on trust nowhere: that its logits are `lm_head(hidden)` with nothing in between (some families cap
or scale them), and that prompts may be shared between completions of one row (needs full causal attention and a model
that honors mask and positions).
"""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from learner.logprobs import completion_logprobs
from learner.packing import MicroBatch, TokenArray, pack
from shared.errors import ConfigError

TOLERANCE_NATS = 1e-4
Sequences = list[tuple[TokenArray, TokenArray]]


@torch.no_grad()
def check_plain_head(model: PreTrainedModel) -> None:
    """ConfigError naming the model type unless our log-probabilities equal those of the model's own logits."""
    sequences = _sequences(model)
    error = _max_error(model, sequences, pack(sequences, 64, share_prompts=False))
    if not error <= TOLERANCE_NATS:
        raise ConfigError(
            f"model.path: logits of model type {model.config.model_type!r} are not lm_head(hidden): log-probabilities "
            f"differ by {error:.1e} nats. Such a head (scaled or capped logits) is not supported; use another model."
        )


@torch.no_grad()
def can_share_prompts(model: PreTrainedModel) -> bool:
    """Whether completions of one prompt may share a row: the same log-probabilities as in rows of their own."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None) is not None:
        return False  # a window or a recurrent state is wider than the few tokens tried here
    if config._attn_implementation != "sdpa":
        return False  # other kernels read a boolean mask differently
    sequences = _sequences(model)
    return _max_error(model, sequences, pack(sequences, 64, share_prompts=True)) <= TOLERANCE_NATS


def _sequences(model: PreTrainedModel) -> Sequences:
    """One prompt of 4 tokens with completions of 5 and 3: ids spread over the vocabulary."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids = (np.arange(1, 13) * 7919) % vocabulary
    return [(ids[:4], ids[4:9]), (ids[:4], ids[9:])]


def _max_error(model: PreTrainedModel, sequences: Sequences, batches: list[MicroBatch]) -> float:
    worst = 0.0
    for batch in batches:
        expected = torch.cat([_reference(model, *sequences[i]) for i in batch.indices_S])
        ours = completion_logprobs(model, batch, temperature=1.0, chunk_tokens=3)
        worst = max(worst, float((ours - expected).abs().max()))
    return worst


def _reference(model: PreTrainedModel, prompt: TokenArray, completion: TokenArray) -> Tensor:
    token_ids = torch.from_numpy(np.concatenate([prompt, completion])).to(model.device)
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0].float()
    targets = token_ids[len(prompt) :, None]
    return torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1).gather(1, targets).squeeze(1)
