"""The tiny Qwen3-MoE of make_tiny_moe.py: its tokenizer, its shape, the sums it is warmed up on, and the warm-up."""

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

from rollout.prompts import kept_from_warm_up

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
VOCABULARY = {token: i for i, token in enumerate([PAD, EOS, BOS, *map(chr, range(32, 127)), "\n"])}

PROMPT_TOKENS = 6  # "12+34="
MAX_ANSWER_TOKENS = 4  # "198" and the end token
BATCH_SUMS = 128
CHECK_SUMS = 512
MAX_STEPS = 4000
LEARNING_RATE = 2e-3

Pair = tuple[int, int]
ALL_PAIRS: list[Pair] = [(a, b) for a in range(100) for b in range(100)]
WARM_UP_PAIRS = [pair for pair in ALL_PAIRS if not kept_from_warm_up(*pair)]
HELD_OUT_PAIRS = [pair for pair in ALL_PAIRS if kept_from_warm_up(*pair)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=EOS, bos_token=BOS)


def make_model() -> Any:
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY[PAD],
        eos_token_id=VOCABULARY[EOS],
        bos_token_id=VOCABULARY[BOS],
        router_aux_loss_coef=0.01,
        output_router_logits=True,  # adds the load-balancing loss of the router; off again in the saved configuration
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def encode(a: int, b: int) -> tuple[list[int], list[int]]:
    """Token ids of prompt and answer; the answer ends with the end token."""
    answer = [*str(a + b), EOS]
    return [VOCABULARY[c] for c in f"{a:02d}+{b:02d}="], [VOCABULARY[c] for c in answer]


def training_batch(pairs: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded ids and labels; prompt and padding carry no label."""
    shape = len(pairs), PROMPT_TOKENS + MAX_ANSWER_TOKENS
    ids, labels = torch.full(shape, VOCABULARY[PAD]), torch.full(shape, -100)
    for row, (a, b) in enumerate(pairs):
        prompt, answer = encode(a, b)
        end = PROMPT_TOKENS + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, PROMPT_TOKENS:end] = torch.tensor(answer)
    return ids, labels


@torch.no_grad()
def pass_rate(model: Any, pairs: list[Pair], generator: torch.Generator) -> float:
    """Share of sums whose answer, one sample each at temperature 1, is right and ended by the end token."""
    model.eval()
    encoded = [encode(a, b) for a, b in pairs]
    ids = torch.tensor([prompt for prompt, _ in encoded])
    for _ in range(MAX_ANSWER_TOKENS):
        probabilities = model(ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    model.train()
    sampled = ids[:, PROMPT_TOKENS:].tolist()
    return sum(row[: len(answer)] == answer for row, (_, answer) in zip(sampled, encoded, strict=True)) / len(pairs)


def steps_to_next_check(rate: float, target: float) -> int:
    """Past about 30 % the pass rate doubles within seconds: look more often the closer it is."""
    return 50 if rate < target / 4 else 20 if rate < target / 2 else 5


def warm_up(model: Any, target: float, seed: int) -> None:
    """Supervised steps until the measured pass rate on sums of the warm-up reaches `target`."""
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    model.train()
    next_check = 50
    for step in range(1, MAX_STEPS + 1):
        ids, labels = training_batch(pick.choices(WARM_UP_PAIRS, k=BATCH_SUMS))
        model(ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == next_check:
            rate = pass_rate(model, pick.choices(WARM_UP_PAIRS, k=CHECK_SUMS), generator)
            print(f"step {step}: pass rate {rate:.3f} of {target}", flush=True)
            if rate >= target:
                held_out = pass_rate(model, pick.choices(HELD_OUT_PAIRS, k=CHECK_SUMS), generator)
                print(f"pass rate on sums it never saw: {held_out:.3f}", flush=True)
                return
            next_check += steps_to_next_check(rate, target)
    raise RuntimeError(f"pass rate {target} not reached in {MAX_STEPS} steps; try another --seed")


def write_model(out: Path, target: float, seed: int) -> None:
    torch.set_num_threads(1)  # sums in a fixed order
    torch.manual_seed(seed)
    model = make_model()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    if target > 0:
        warm_up(model, target, seed)
    model.config.output_router_logits = False
    model.save_pretrained(out)
    make_tokenizer().save_pretrained(out)
