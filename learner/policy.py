"""The model being trained: loading, precision, and the names its weights have outside.

Owns the transformers model (float32 master weights). Everything that would make two forward passes differ is off:
dropout and router noise (evaluation mode), the cache. Nothing is downloaded and no code from a model folder runs.
"""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from learner.folders import staged_folder
from learner.logprobs import completion_logprobs
from learner.model_check import can_share_prompts, check_plain_head
from learner.packing import MicroBatch
from shared.config import Config
from shared.errors import ConfigError

COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja"}


class Policy:
    """A causal language model with float32 weights and how to run it. Made by `Policy.load`."""

    def __init__(self, model: PreTrainedModel, source: Path, autocast_dtype: torch.dtype | None) -> None:
        self.model = model
        self.source = source
        self.autocast_dtype = autocast_dtype
        check_plain_head(model)
        self.shares_prompts = can_share_prompts(model)

    @classmethod
    def load(cls, config: Config) -> "Policy":
        """Load the model in folder `model.path` (config.json, safetensors) as the `learner` section says.

        Raises:
            ConfigError: no such folder or device, weights missing or quantized, or a model we cannot train.
        """
        source = Path(config.model.path)
        device = choose_device(config.learner.device)
        model_config = _read_config(source)
        model = _read_weights(source, model_config).to(device).eval()
        if config.learner.activation_checkpointing:
            _enable_checkpointing(model)
        return cls(model, source, choose_autocast(config.learner.autocast, device, model_config))

    @property
    def device(self) -> torch.device:
        return self.model.device

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters under transformers' in-memory names; a tied one once."""
        return self.model.named_parameters()

    def autocast(self) -> AbstractContextManager[Any]:
        enabled = self.autocast_dtype is not None
        return torch.autocast(self.device.type, dtype=self.autocast_dtype or torch.bfloat16, enabled=enabled)

    def completion_logprobs(self, micro_batch: MicroBatch, temperature: float, chunk_tokens: int) -> Tensor:
        """`learner.logprobs.completion_logprobs` in this policy's precision: float32 [T], nats."""
        with self.autocast():
            return completion_logprobs(self.model, micro_batch, temperature, chunk_tokens)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, float32 tensor) as `save_pretrained` would write them; tied weights once, experts one by one.

        transformers 5 fuses the experts of a layer in memory (`experts.gate_up_proj`); checkpoints and vLLM name each
        one (`experts.0.gate_proj.weight`). Its own save-time conversion is used. Tensors may be views of the weights.
        """
        tensors = remove_tied_weights_from_state_dict(self.model.state_dict(), self.model)
        for name, tensor in revert_weight_conversion(self.model, tensors).items():
            yield name, tensor.detach()

    def save(self, path: str | Path) -> None:
        """Write a folder that transformers and vLLM load: float32 safetensors, config, tokenizer files of the source.

        The folder appears under its name only when it is complete. An existing one is moved aside and then removed.
        """
        with staged_folder(Path(path)) as staging:
            self.model.save_pretrained(staging)
            for file in self.source.iterdir():
                wanted = file.suffix in COPIED_SUFFIXES and not file.name.endswith(".index.json")
                if wanted and not (staging / file.name).exists():
                    shutil.copyfile(file, staging / file.name)


def choose_device(setting: str) -> torch.device:
    """`learner.device` as a device; "auto" is the first GPU, or the CPU without one. ConfigError if it is not there."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "auto":
        return torch.device("cuda:0" if num_gpus else "cpu")
    device = torch.device(setting)
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ConfigError(
            f"learner.device = {setting}: this host has {num_gpus} GPUs. Use a lower number, cpu or auto."
        )
    return device


def choose_autocast(setting: str, device: torch.device, model_config: Any) -> torch.dtype | None:
    """The autocast type for `learner.autocast`, None for plain float32.

    "auto" takes bfloat16 where the hardware multiplies it: on such CPUs (avx512_bf16, AMX) a dense model trains 1.5
    to 1.7 times as fast on one core as in float32; without, bfloat16 is emulated. MoE models stay float32 on a CPU.
    """
    if setting == "bfloat16":
        return torch.bfloat16
    if setting == "off":
        return None
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_bf16 and num_experts(model_config) <= 1 else None


def num_experts(model_config: Any) -> int:
    """Experts per layer by the names model configurations use; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return max(int(getattr(model_config, name, None) or 0) for name in names)


def _read_config(source: Path) -> Any:
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"model.path = {source}: no config.json there. Give a local folder as save_pretrained writes it."
        )
    try:
        model_config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"model.path = {source}: its config.json cannot be used: {error}") from error
    if getattr(model_config, "quantization_config", None) is not None:
        raise ConfigError(f"model.path = {source}: the weights are quantized. Training needs the unquantized model.")
    return model_config


def _read_weights(source: Path, model_config: Any) -> PreTrainedModel:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=model_config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"model.path = {source}: the model cannot be loaded: {error}") from error
    # transformers fills what is missing with random numbers and goes on.
    if absent := sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])}):
        raise ConfigError(f"model.path = {source}: {len(absent)} tensors are missing or misshapen, first {absent[0]}.")
    return model


def _enable_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass, with dropout still off.

    Layers recompute only in training mode, which would also switch dropout on; so only their own flag is set.
    """
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"learner.activation_checkpointing: model type {model.config.model_type!r} does not support it. Set false."
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
