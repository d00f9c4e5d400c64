"""The model being trained: loading, precision, and the names its weights have outside.

Owns the transformers model (float32 master weights). Everything that would make two forward passes differ is off:
dropout and router noise (evaluation mode), the cache. Nothing is downloaded and no code from a model folder runs.
"""

import logging
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
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
from shared.config import Config, PrecisionMode
from shared.errors import ConfigError

_LOG = logging.getLogger(__name__)
COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja"}


class Policy:
    """A causal language model with float32 weights and how to run it. Made by `Policy.load`."""

    def __init__(self, model: PreTrainedModel, source: Path, mode: PrecisionMode) -> None:
        self.model = model
        self.source = source
        self.mode = mode
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
        if is_emulated(config.model.mode, device):
            _LOG.warning("model.precision = %s: this CPU emulates it, float32 is faster here", config.model.precision)
        return cls(model, source, config.model.mode)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters under transformers' in-memory names; a tied one once."""
        return self.model.named_parameters()

    def autocast(self) -> AbstractContextManager[Any]:
        if self.mode.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.mode.autocast))

    def completion_logprobs(self, micro_batch: MicroBatch, temperature: float, chunk_tokens: int) -> Tensor:
        """`learner.logprobs.completion_logprobs` in this policy's precision: float32 [T], nats."""
        with self.autocast():
            return completion_logprobs(
                self.model, micro_batch, temperature, chunk_tokens, float32_head=self.mode.float32_head
            )

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


def is_emulated(mode: PrecisionMode, device: torch.device) -> bool:
    """Whether the learner's matrix products in this mode are slower than in float32: no hardware multiplies the type.

    CPUs multiply bfloat16 with avx512_bf16 or AMX; then a dense model trains 1.5 to 1.7 times as fast as in float32.
    """
    if mode.autocast is None or device.type != "cpu":
        return False
    if mode.autocast == "float16":
        return not torch.cpu._is_amx_fp16_supported()
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


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
