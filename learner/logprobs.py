"""Log-probabilities of completion tokens under a causal language model, without the full [T, V] logits.

The decoder runs once over a micro-batch; the head runs only where a completion token is predicted, in chunks that are
recomputed in the backward pass. At most one chunk of logits is alive: with a vocabulary of 49,152, 256 tokens are
50 MB instead of 800 MB for 4,096.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from learner.packing import MicroBatch


def completion_logprobs(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    temperature: float,
    chunk_tokens: int,
    *,
    float32_head: bool = False,
) -> Tensor:
    """log softmax(logits / temperature)[token] of every completion token, in the micro-batch's order.

    Logits are cast to float32 before the division, as the sampler does it; with `float32_head` they are also computed
    in float32, whatever autocast says. The model's logits must be `lm_head(last hidden state)`, which
    `learner.model_check` verifies at load.

    Returns:
        float32 [T], nats.
    """
    device = model.device
    rows_T, columns_T, sources_T = (torch.from_numpy(a).to(device) for a in micro_batch.target_columns())
    token_ids = torch.from_numpy(micro_batch.token_ids).to(device)
    hidden_TH = _decode(model, micro_batch, token_ids)[rows_T, sources_T]
    targets_T = token_ids[rows_T, columns_T]
    head = model.get_output_embeddings()
    chunks = [
        checkpoint(_chunk_logprobs, head, hidden, targets, temperature, float32_head, use_reentrant=False)
        for hidden, targets in zip(hidden_TH.split(chunk_tokens), targets_T.split(chunk_tokens), strict=True)
    ]
    return torch.cat(chunks)


def _decode(model: PreTrainedModel, micro_batch: MicroBatch, token_ids: Tensor) -> Tensor:
    """Last hidden states [B, L, H]. Padding is on the right, so plain rows need no mask at all."""
    decoder = model.get_decoder()
    if micro_batch.is_plain:
        return decoder(input_ids=token_ids, use_cache=False).last_hidden_state
    return decoder(
        input_ids=token_ids,
        position_ids=torch.from_numpy(micro_batch.position_ids).to(token_ids.device),
        attention_mask=torch.from_numpy(micro_batch.attention_mask()).to(token_ids.device),
        use_cache=False,
    ).last_hidden_state


def _chunk_logprobs(
    head: nn.Module, hidden_TH: Tensor, targets_T: Tensor, temperature: float, float32_head: bool
) -> Tensor:
    if float32_head:
        with torch.autocast(hidden_TH.device.type, enabled=False):
            logits_TV = head(hidden_TH.float()) / temperature
    else:
        logits_TV = head(hidden_TH).float() / temperature
    return torch.log_softmax(logits_TV, dim=-1).gather(1, targets_T[:, None]).squeeze(1)
