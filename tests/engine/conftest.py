"""Real engines for the tests of this folder: one per session for each model and precision, each with its own loop.

`moe` and `dense` compute in float32, where engine and transformers agree to rounding; `dense_bf16` in bfloat16. The
MoE model is a small random one, saved with a generation_config.json full of sampling settings that must not matter.
SmolLM2 comes from `make models`.
"""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from shared.config import Config
from shared.protocols import Completion, GenerateRequest
from shared.records import Manifest
from shared.weights import bucket_entries

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2-135m"
NUM_BUCKETS = 3
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ServedVllm:
    """An engine in a background loop, beside the same model in transformers (float32)."""

    def __init__(self, path: Path, dtype: str, folder: Path, noise_scale: float, **rollout: Any) -> None:
        from transformers import AutoModelForCausalLM

        from rollout.engine import VllmEngine

        self.path = path
        self.dtype = getattr(torch, dtype)
        self.tolerance = 1e-4 if dtype == "float32" else 0.25
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
        self.eos_id = self.model.config.eos_token_id
        self._initial = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._noise_scale, self._folder = noise_scale, folder
        self._version = self._num_requests = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        config = {"model": {"path": str(path), "precision": dtype}, "rollout": rollout}
        self.engine = self.run(VllmEngine.create(Config.model_validate(config)))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=240)

    def close(self) -> None:
        self.run(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def sample(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float = 1.0, salt: str = "s"
    ) -> list[Completion]:
        """One completion per prompt, all at once."""

        async def together() -> list[Completion]:
            return await asyncio.gather(*map(self.engine.generate, requests))

        requests = []
        for prompt in prompts:
            self._num_requests += 1
            name = f"t{self._num_requests}"
            requests.append(GenerateRequest(name, prompt, max_tokens, temperature, self._num_requests, salt))
        return self.run(together())

    @torch.no_grad()
    def set_noise(self, noise: int | None, only: str = "") -> None:
        """Give the transformers model its initial weights, plus noise of this seed on those whose name has `only`."""
        self.model.load_state_dict(self._initial)
        if noise is None:
            return
        generator = torch.Generator().manual_seed(noise)
        for name, value in self.model.named_parameters():
            if only in name:
                scale = self._noise_scale * (value.std() + 0.01)
                value.add_(scale * torch.randn(value.shape, generator=generator))

    def next_version(self) -> int:
        """A version that this engine has not held."""
        self._version += 1
        return self._version

    def publish(self, noise: int | None, edit: Edit | None = None, only: str = "") -> tuple[Manifest, list[Path]]:
        """Stage weights as the next version: the model's own with this noise, or what `edit` makes of them."""
        self.set_noise(noise, only)
        version = self.next_version()
        tensors = dict(edit(self.tensors()) if edit else self.tensors())
        names = list(tensors)
        size = -(-len(names) // NUM_BUCKETS)
        entries, files = [], []
        for number, first in enumerate(range(0, len(names), size)):
            file = self._folder / f"v{version}-{number}.safetensors"
            file.write_bytes(save({name: tensors[name] for name in names[first : first + size]}))
            entries += bucket_entries(np.fromfile(file, dtype=np.uint8), number)
            files.append(file)
        return Manifest(version, version, tuple(entries)), files

    def load(self, noise: int | None, edit: Edit | None = None, only: str = "") -> dict[str, float]:
        manifest, files = self.publish(noise, edit, only)
        try:
            return self.run(self.engine.load(manifest, files))
        finally:
            for file in files:
                file.unlink()

    def tensors(self) -> Tensors:
        """The transformers model's weights by checkpoint name, experts apart, tied head left out."""
        tensors: Tensors = {}
        for name, value in self.model.state_dict().items():
            value = value.to(self.dtype)
            base, _, last = name.rpartition("experts.")
            if base and last == "gate_up_proj":
                for e, expert in enumerate(value):
                    gate, up = expert.chunk(2)
                    tensors[f"{base}experts.{e}.gate_proj.weight"] = gate.contiguous()
                    tensors[f"{base}experts.{e}.up_proj.weight"] = up.contiguous()
            elif base and last == "down_proj":
                for e, expert in enumerate(value):
                    tensors[f"{base}experts.{e}.down_proj.weight"] = expert.contiguous()
            elif not (name == "lm_head.weight" and self.model.config.tie_word_embeddings):
                tensors[name] = value
        return tensors

    @torch.no_grad()
    def reference(self, prompt: Sequence[int], completion: Completion, temperature: float = 1.0) -> np.ndarray:
        """float64 [T]: transformers' log-probabilities of the completion's tokens under the model's present weights."""
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
        rows = torch.arange(len(completion.token_ids))
        return logits.log_softmax(-1)[rows, ids[0, len(prompt) :]].numpy()

    def worst_log_ratio(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], temperature: float = 1.0
    ) -> float:
        """Largest |log s| relative to max(1e-5, 6e-5 / sqrt(T)), log s the mean log-ratio per token (GSPO eq. 7)."""
        worst = largest = 0.0
        for prompt, completion in zip(prompts, completions, strict=True):
            difference = self.reference(prompt, completion, temperature) - completion.logprobs
            bound = max(1e-5, 6e-5 / np.sqrt(len(difference)))
            log_ratio = abs(float(difference.mean()))
            worst, largest = max(worst, log_ratio / bound), max(largest, log_ratio)
        print(f"largest |log s| {largest:.1e} over {len(completions)} sequences: {worst:.3f} of the bound")
        return worst


def make_random_moe(folder: Path) -> Path:
    """A Qwen3-MoE of 1 M random parameters with a character tokenizer and misleading generation defaults."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

    torch.manual_seed(0)
    vocabulary = {"<pad>": 0, "<eos>": 1} | {chr(32 + i): 2 + i for i in range(95)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.mul_(2.0)  # sharper than fresh weights, so that temperature and filters matter
    model.save_pretrained(folder)
    defaults = {
        "top_p": 0.8,
        "top_k": 5,
        "temperature": 0.3,
        "repetition_penalty": 1.5,
        "min_p": 0.2,
        "do_sample": True,
    }
    (folder / "generation_config.json").write_text(json.dumps(defaults | {"eos_token_id": 1, "pad_token_id": 0}))
    return folder


def _serve(path: Path, dtype: str, folder: Path, noise_scale: float, **rollout: Any) -> Iterator[ServedVllm]:
    served = ServedVllm(path, dtype, folder, noise_scale, **rollout)
    yield served
    served.close()


@pytest.fixture(scope="session")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_moe(tmp_path_factory.mktemp("moe-model"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    path = Path(os.environ.get("SEQRELAY_TEST_SMOLLM2", SMOLLM2))
    if not (path / "config.json").is_file():
        pytest.fail(f"{path} is not there; run `make models`")
    return path


@pytest.fixture(scope="session")
def moe(moe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedVllm]:
    yield from _serve(moe_path, "float32", tmp_path_factory.mktemp("moe"), 0.3)


@pytest.fixture(scope="session")
def dense(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedVllm]:
    yield from _serve(smollm2_path, "float32", tmp_path_factory.mktemp("dense"), 0.05)


@pytest.fixture(scope="session")
def dense_bf16(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedVllm]:
    yield from _serve(smollm2_path, "bfloat16", tmp_path_factory.mktemp("dense-bf16"), 0.05)
