"""Loading, precision, checkpoint names, saving: and models we cannot train are refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, tiny_config, tiny_model, tiny_policy
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from learner.packing import pack
from learner.policy import Policy, choose_device, is_emulated
from shared.config import PRECISIONS
from shared.errors import ConfigError

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "head_dim": 8,
}


@pytest.mark.parametrize(("kind", "tied"), [("dense", True), ("dense", False), ("moe", False), ("moe", True)])
def test_checkpoint_tensors_are_those_save_pretrained_writes(tmp_path: Path, kind: str, tied: bool) -> None:
    policy, _ = tiny_policy(tmp_path / "source", kind, tied=tied)
    written = load_file(tmp_path / "source" / "model.safetensors")
    pairs = list(policy.checkpoint_tensors())
    assert len(pairs) == len(dict(pairs))
    assert {name: tensor.shape for name, tensor in pairs} == {name: t.shape for name, t in written.items()}
    assert all(torch.equal(tensor, written[name]) for name, tensor in pairs)
    assert ("lm_head.weight" in written) is not tied
    if kind == "moe":
        assert "model.layers.1.mlp.experts.3.up_proj.weight" in written


def test_checkpoint_tensors_follow_the_weights(tmp_path: Path) -> None:
    policy, _ = tiny_policy(tmp_path, "moe")
    name = "model.layers.0.mlp.experts.2.gate_proj.weight"
    before = dict(policy.checkpoint_tensors())[name].clone()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(dict(policy.checkpoint_tensors())[name], before + 1.0)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_saved_folder_loads_in_plain_transformers(tmp_path: Path, kind: str) -> None:
    policy, _ = tiny_policy(tmp_path / "source", kind, tied=kind == "dense")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    for _ in range(2):  # the second time the folder exists
        policy.save(tmp_path / "saved")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved", "source"]
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for (name, ours), theirs in zip(policy.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_failed_save_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _ = tiny_policy(tmp_path / "source")
    policy.save(tmp_path / "saved")
    (tmp_path / "saved" / "mark").touch()

    def fail(path: Path) -> None:
        path.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(policy.model, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        policy.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "mark").exists()


def test_dropout_is_off_also_with_checkpointing(tmp_path: Path) -> None:
    tiny_model(attention_dropout=0.5).save_pretrained(tmp_path)
    policy = Policy.load(tiny_config(tmp_path, activation_checkpointing=True))
    token_ids = torch.arange(12)[None]
    first, second = (policy.model.model(input_ids=token_ids).last_hidden_state for _ in range(2))
    assert torch.equal(first, second)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path = .*nowhere: no config\.json"):
        Policy.load(tiny_config(tmp_path / "nowhere"))


def test_missing_tensor_is_refused_not_made_up(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 tensors are missing.*model\.layers\.1\.mlp\.up_proj\.weight"):
        Policy.load(tiny_config(tmp_path))


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Policy.load(tiny_config(tmp_path))


def test_unknown_model_type_and_quantized_weights_are_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "unheard_of"}))
    with pytest.raises(ConfigError, match="unheard_of"):
        Policy.load(tiny_config(tmp_path))
    quantized = values | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ConfigError, match="quantized"):
        Policy.load(tiny_config(tmp_path))


@pytest.mark.parametrize(
    ("model_class", "model_config"),
    [
        (Gemma2ForCausalLM, Gemma2Config(**SHAPE, final_logit_softcapping=5.0)),
        (GraniteForCausalLM, GraniteConfig(**SHAPE, logits_scaling=8.0)),
    ],
)
def test_heads_that_cap_or_scale_are_refused_by_model_type(tmp_path: Path, model_class: Any, model_config: Any) -> None:
    torch.manual_seed(0)
    model_class(model_config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{model_config.model_type}.*not lm_head"):
        Policy.load(tiny_config(tmp_path))


def test_prompts_are_shared_only_under_full_attention(tmp_path: Path) -> None:
    policy, _ = tiny_policy(tmp_path / "llama")
    assert policy.shares_prompts
    MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16)).save_pretrained(tmp_path / "mistral")
    assert not Policy.load(tiny_config(tmp_path / "mistral")).shares_prompts


def test_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.device = cuda:99"):
        choose_device("cuda:99")
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_mode_that_this_hardware_emulates_is_told(monkeypatch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    assert is_emulated(PRECISIONS["bfloat16"], cpu) == (not has_bf16)
    assert is_emulated(PRECISIONS["float16"], cpu)
    assert not is_emulated(PRECISIONS["float32"], cpu)
    assert not is_emulated(PRECISIONS["float16"], gpu)


def test_precision_modes_differ_where_they_say(tmp_path: Path) -> None:
    """Against float32: the types round, and a float32 head takes away the part that the logits' rounding adds."""
    tiny_model(initializer_range=0.4, hidden_size=256, intermediate_size=256, vocab_size=4096).save_pretrained(tmp_path)
    ids = np.arange(3, 15)
    batch = pack([(ids[:4], ids[4:])], 64, share_prompts=False)[0]

    def logprobs(precision: str) -> torch.Tensor:
        policy = Policy.load(tiny_config(tmp_path, precision=precision))
        with torch.no_grad():
            values = policy.completion_logprobs(batch, 0.7, 3)
        assert values.dtype == torch.float32
        return values

    exact = logprobs("float32")
    error = {p: float((logprobs(p) - exact).abs().mean()) for p in PRECISIONS}
    assert error["float32"] == 0.0
    assert 0 < error["float16"] < error["bfloat16"] / 2
    assert 0 < error["bfloat16-float32-head"] < error["bfloat16"]


def test_master_weights_are_float32_whatever_the_file_holds(tmp_path: Path) -> None:
    tiny_model().bfloat16().save_pretrained(tmp_path)
    policy = Policy.load(tiny_config(tmp_path, precision="bfloat16"))
    assert {p.dtype for _, p in policy.named_parameters()} == {torch.float32}
