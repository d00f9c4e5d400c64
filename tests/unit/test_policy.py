"""Loading, precision, checkpoint names, saving: and models we cannot train are refused by name."""

import json
from pathlib import Path
from typing import Any

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

from learner.policy import Policy, choose_autocast, choose_device
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
def test_autocast_is_decided_by_hardware_and_kind(monkeypatch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    dense, moe = tiny_model().config, tiny_model("moe").config
    cpu = torch.device("cpu")
    assert choose_autocast("auto", cpu, dense) == (torch.bfloat16 if has_bf16 else None)
    assert choose_autocast("auto", cpu, moe) is None
    assert choose_autocast("bfloat16", cpu, moe) == torch.bfloat16
    assert choose_autocast("off", cpu, dense) is None


def test_master_weights_are_float32_whatever_the_file_holds(tmp_path: Path) -> None:
    tiny_model().bfloat16().save_pretrained(tmp_path)
    policy = Policy.load(tiny_config(tmp_path, autocast="bfloat16"))
    assert {p.dtype for _, p in policy.named_parameters()} == {torch.float32}
