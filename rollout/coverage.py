"""Whether a set of weights is the whole model: compared by name, dtype and shape before anything is loaded. Pure.

The truth is what the model's own safetensors files hold, in checkpoint names (`experts.3.down_proj.weight`, separate
q, k and v), less what is never sent: an output head tied to the embedding, and buffers. vLLM fuses these into fewer
parameters, and a loader that gets q and k but no v keeps the old v without a word; so nothing may be missing.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from shared.errors import WeightSyncError
from shared.weights import bucket_layout

Shape = tuple[int, ...]
Tensor = tuple[str, str, Shape]  # name, safetensors dtype, shape

BUFFER_SUFFIXES = (".rotary_emb.inv_freq",)
TIED_HEAD = "lm_head.weight"


def model_tensors(model_dir: Path) -> dict[str, Shape]:
    """Checkpoint name -> shape of every tensor the model consists of, read from the headers of its safetensors files.

    WeightSyncError when the folder has none: other formats cannot be checked.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise WeightSyncError(
            f"model.path = {model_dir} holds no *.safetensors file; save the model with save_pretrained."
        )
    shapes = {name: shape for file in files for name, _, shape in file_tensors(file)}
    if _embeddings_are_tied(model_dir):
        shapes.pop(TIED_HEAD, None)
    return {name: shape for name, shape in shapes.items() if not name.endswith(BUFFER_SUFFIXES)}


def file_tensors(file: Path) -> list[Tensor]:
    """(name, dtype, shape) of every tensor of a safetensors file, in file order."""
    blob = np.memmap(file, dtype=np.uint8, mode="r")
    return [(name, dtype, shape) for name, dtype, shape, _, _ in bucket_layout(blob)]


def check_coverage(expected: Mapping[str, Shape], dtype: str, sent: Iterable[Tensor]) -> None:
    """Raise WeightSyncError naming the tensor unless `sent` is every expected tensor exactly once, in `dtype`.

    The dtype must be the engine's own: the engine would round anything else, and then serve other weights than those
    the learner measured itself by.
    """
    seen: set[str] = set()
    for name, sent_dtype, shape in sent:
        if name in seen:
            raise WeightSyncError(f"tensor {name!r} was sent twice; publish every tensor once.")
        seen.add(name)
        if name not in expected:
            raise WeightSyncError(f"tensor {name!r} is unknown to this model; send checkpoint names, tied ones once.")
        if shape != tuple(expected[name]):
            raise WeightSyncError(f"tensor {name!r} has shape {list(shape)}, the model {list(expected[name])}.")
        if sent_dtype != dtype:
            raise WeightSyncError(f"tensor {name!r} is {sent_dtype}, the engine computes in {dtype}; publish in that.")
    if missing := sorted(expected.keys() - seen):
        raise WeightSyncError(
            f"tensor {missing[0]!r} was not sent ({len(missing)} missing of {len(expected)}); send the whole model."
        )


def _embeddings_are_tied(model_dir: Path) -> bool:
    config = json.loads((model_dir / "config.json").read_text())
    return bool(config.get("tie_word_embeddings", False))
