"""What a worker and the learner must have in common, as short digests, and what to say when they do not.

Owns which options both sides must share. Gate: a worker whose identity differs from the learner's is refused
(`check_same`), because its tokens would mean something else: another model, vocabulary, prompt order or distribution.

The digest of a model is that of a *sample*: of every safetensors file the header, the size and `NUM_BLOCKS` evenly
spaced blocks of `BLOCK_BYTES`, the first and the last included; files of up to 4 MiB are read whole. It is fast at any
size and tells apart two checkpoints of one training run, in which nearly every value differs. A few changed bytes
between two blocks go unseen here. It depends on nothing outside the files' contents: not on folder, path or file dates.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from shared.config import Config
from shared.errors import ConfigError
from shared.records import Identity
from shared.schema import SCHEMA_VERSION, fingerprint
from shared.weights import HEADER_LENGTH_BYTES

NUM_BLOCKS = 64
BLOCK_BYTES = 64 << 10
DIGEST_CHARACTERS = 16

# A worker uses it, or it decides which group a number stands for, which groups are dropped or what a token was
# sampled from. Every option is either here or in LOCAL_OPTIONS.
SHARED_OPTIONS = frozenset({
    "run.name",
    "run.seed",
    "model.precision",  # also that of published weights
    "prompts.source",
    "prompts.style",
    "prompts.digits",
    "prompts.num_held_out",
    "reward.function",
    "sampling.group_size",
    "sampling.temperature",
    "sampling.max_tokens",
    "sampling.top_p",
    "sampling.top_k",
    "sampling.min_p",
    "rollout.max_model_len",
    "rollout.payload",
    "rollout.max_attempts",
    "rollout.lease_s",  # a worker's heartbeat follows from it
    "rollout.group_timeout_s",
    "learner.prompts_per_step",
    "sync.max_staleness",
    "sync.probe_sequences",
    "sync.max_mismatch",
    "evaluation.samples",
})  # fmt: skip

# One host's business, or the learner's alone.
LOCAL_OPTIONS = frozenset({
    "run.directory",
    "model.path",  # what lies there is compared, not where
    "rollout.workers",
    "rollout.max_num_seqs",
    "rollout.memory_share",
    "rollout.threads",
    "learner.steps",
    "learner.minibatches",
    "learner.micro_batch_tokens",
    "learner.objective",
    "learner.anchor",
    "learner.lr",
    "learner.warmup_updates",
    "learner.schedule",
    "learner.weight_decay",
    "learner.max_grad_norm",
    "learner.device",
    "learner.activation_checkpointing",
    "learner.logprob_chunk_tokens",
    "learner.threads",
    "learner.checkpoint_steps",
    "learner.keep_checkpoints",
    "clip.low",
    "clip.high",
    "clip.calibration",
    "clip.z",
    "clip.sizing",
    "clip.target",
    "clip.max_scale",
    "sync.bucket_mib",
})  # fmt: skip

_PACKAGES = ("learner", "rollout", "shared")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
)
# Say where a model came from, or repeat what the safetensors headers say: equal models differ in them.
_LABELS = frozenset({"dtype", "torch_dtype", "transformers_version", "name_or_path"})
_MAX_HEADER_BYTES = 100 << 20  # more than safetensors itself accepts

_REMEDIES = {
    "model": "give both the same checkpoint in model.path",
    "tokenizer": "give both the same tokenizer files in model.path",
    "schema": "install the same release of seqrelay on every host",
    "code": "install the same release of seqrelay on every host",
}


def identity_of(config: Config) -> Identity:
    """The identity of a side that runs with this config. Reads a few MiB of the model.

    ConfigError when the folder in model.path has no config.json, no safetensors file or no tokenizer file, or one of
    them cannot be read.
    """
    folder = Path(config.model.path)
    try:
        model, tokenizer = _model_digest(folder), _tokenizer_digest(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {folder}: {error}. Give the folder of a complete checkpoint.") from error
    return Identity(
        model=model,
        tokenizer=tokenizer,
        schema=f"{SCHEMA_VERSION}-{fingerprint()[:DIGEST_CHARACTERS]}",
        code=_code(),
        settings=_settings(config),
    )


def check_same(worker: Identity, learner: Identity) -> None:
    """ConfigError naming all that differs, with both values and what to do about it."""
    differing = [
        f"{name}: the worker has {ours}, the learner {theirs}: {remedy}."
        for name, remedy in _REMEDIES.items()
        if (ours := getattr(worker, name)) != (theirs := getattr(learner, name))
    ]
    for option in sorted(worker.settings.keys() | learner.settings.keys()):
        ours, theirs = (side.settings.get(option, "no such option") for side in (worker, learner))
        if ours != theirs:
            differing.append(f"{option}: the worker has {ours}, the learner {theirs}: give both the same value.")
    if differing:
        raise ConfigError("\n".join(["this worker does not belong to the learner's run:", *differing]))


def _settings(config: Config) -> dict[str, str]:
    options = {f"{section}.{key}": v for section, keys in config.model_dump().items() for key, v in keys.items()}
    return {option: json.dumps(options[option]) for option in sorted(SHARED_OPTIONS)}


def _model_digest(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("no *.safetensors file there")
    parts = [_canonical(_read_json(folder / "config.json"))]
    generation = folder / "generation_config.json"
    if generation.is_file():  # the engine ends a completion at these ids too, and takes nothing else from this file
        parts.append(_canonical({"eos_token_id": _read_json(generation).get("eos_token_id")}))
    for file in files:
        with file.open("rb") as weights:
            parts += _sample(weights, file.stat().st_size)
    return _digest(parts)


def _sample(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """The size, the header and the sampled blocks of one safetensors file."""
    yield str(num_bytes).encode()
    header_bytes = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
    yield file.read(min(header_bytes, _MAX_HEADER_BYTES))
    if num_bytes <= NUM_BLOCKS * BLOCK_BYTES:
        file.seek(0)
        yield file.read()
        return
    for block in range(NUM_BLOCKS):
        file.seek(block * (num_bytes - BLOCK_BYTES) // (NUM_BLOCKS - 1))
        yield file.read(BLOCK_BYTES)


def _tokenizer_digest(folder: Path) -> str:
    found = {file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}
    if not found:
        raise ValueError("no tokenizer file there")
    parts = []
    for name, file in sorted((file.relative_to(folder).as_posix(), file) for file in found):
        labeled = name == "tokenizer_config.json"
        parts += [name.encode(), _canonical(_read_json(file)) if labeled else file.read_bytes()]
    return _digest(parts)


@functools.cache
def _code() -> str:
    """Version and a digest of the Python sources, as they were when this process first asked."""
    root = Path(__file__).resolve().parents[1]
    sources = sorted(
        path.relative_to(root).as_posix() for package in _PACKAGES for path in root.glob(f"{package}/**/*.py")
    )
    parts = (part for name in sources for part in (name.encode(), (root / name).read_bytes()))
    return f"{metadata.version('seqrelay')}-{_digest(parts)}"


def _read_json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return value


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(_without_labels(value), sort_keys=True, separators=(",", ":")).encode()


def _without_labels(value: Any) -> Any:
    if isinstance(value, Mapping):  # a model of several parts nests one config for each
        return {k: _without_labels(v) for k, v in value.items() if k not in _LABELS and not k.startswith("_")}
    return value


def _digest(parts: Iterable[bytes]) -> str:
    """Of the parts in order; their lengths are part of it, so that no two lists run together."""
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return str(hasher.hexdigest(DIGEST_CHARACTERS // 2))
