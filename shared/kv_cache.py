"""The size of an engine's KV cache on CPU where `rollout.memory_share` does not say it. Reads config.json only."""

import json
from pathlib import Path

from shared.config import Config
from shared.errors import ConfigError
from shared.weights import DTYPE_BYTES, SAFETENSORS_DTYPES

# vLLM's block on CPU; a sequence fills whole blocks.
BLOCK_TOKENS = 128


def kv_cache_bytes(config: Config) -> int:
    """Room for `rollout.max_num_seqs` sequences of `rollout.max_model_len` tokens, in whole blocks.

    Example: 64 sequences of 128 tokens of SmolLM2-135M in bfloat16 (30 layers, 3 key-value heads of 64): 0.18 GiB.
    ConfigError when the model's config.json does not tell what a token needs.
    """
    blocks = -(-config.rollout.max_model_len // BLOCK_TOKENS)
    return config.rollout.max_num_seqs * blocks * BLOCK_TOKENS * _token_bytes(config)


def _token_bytes(config: Config) -> int:
    path = Path(config.model.path) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        values = values.get("text_config", values)
        heads = values["num_attention_heads"]
        head_dim = values.get("head_dim") or values["hidden_size"] // heads
        kv_heads = values.get("num_key_value_heads") or heads
        num_values = 2 * values["num_hidden_layers"] * kv_heads * head_dim
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} does not tell how large a token's KV cache is ({error}): set rollout.memory_share."
        ) from error
    return int(num_values) * DTYPE_BYTES[SAFETENSORS_DTYPES[config.model.mode.engine]]
