"""Tiny random models, policies and groups for learner tests. Everything float32 on the CPU, made in milliseconds."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from learner.policy import Policy
from shared.config import Config
from shared.records import ClipRange, Group, GroupId, Rollout, Segment, StepPlan

VOCABULARY = 61
EOS_ID = 2


def tiny_model(kind: str = "dense", *, tied: bool = False, **overrides: Any) -> PreTrainedModel:
    """`kind`: "dense" (Llama) or "moe" (Qwen3-MoE, 4 experts, top 2). Pad id = eos id, as many models have it."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,  # sharp enough that a wrong position or mask shows
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
    } | overrides
    if kind == "dense":
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)).eval()


def tiny_config(path: Path, num_groups: int = 2, precision: str = "float32", **learner: Any) -> Config:
    values = {"prompts_per_step": num_groups, "minibatches": 1, "steps": 4, "lr": 1e-3} | learner
    lengths = {"sampling": {"max_tokens": 8}, "rollout": {"max_model_len": 16}}
    lengths |= {"sync": {"max_mismatch": 1e6}}  # made-up rollouts, which no engine sampled
    return Config.model_validate({"model": {"path": str(path), "precision": precision}, "learner": values} | lengths)


def tiny_policy(path: Path, kind: str = "dense", *, tied: bool = False, **learner: Any) -> tuple[Policy, Config]:
    """A policy loaded from a folder `path` made here."""
    tiny_model(kind, tied=tied).save_pretrained(path)
    config = tiny_config(path, **learner)
    return Policy.load(config), config


def tiny_group(
    number: int,
    rewards: list[float | None],
    lengths: list[int] | None = None,
    *,
    with_logprobs: bool = True,
    temperature: float = 1.0,
) -> Group:
    """One rollout per reward; behavior log-probabilities near those of a uniform model."""
    generator = np.random.default_rng(number)
    sizes = lengths or generator.integers(1, 9, len(rewards)).tolist()
    rollouts = []
    for size, reward in zip(sizes, rewards, strict=True):
        logprobs = (-np.log(VOCABULARY) + generator.normal(0, 0.5, size)).astype(np.float32)
        segments = (Segment(0, 0, size, float(logprobs.sum(dtype=np.float64))),) if size else ()
        ids = generator.integers(0, VOCABULARY, size).astype(np.int32)
        rollouts.append(Rollout(ids, logprobs if with_logprobs else None, segments, "stop", reward))
    prompt = generator.integers(0, VOCABULARY, int(generator.integers(3, 8))).astype(np.int32)
    return Group(GroupId(number), 0, "worker-0", f"prompt-{number}", prompt, temperature, tuple(rollouts))


def plan_for(groups: list[Group], clip_low: float = 0.2, clip_high: float = 0.27, seed: int = 5) -> StepPlan:
    return StepPlan(0, tuple(g.group for g in groups), seed, ClipRange(clip_low, clip_high))
