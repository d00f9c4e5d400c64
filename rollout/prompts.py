"""Which prompt a group number stands for. Pure but for the tokenizer, and the same on every worker.

The training order is a fixed function of (seed, number), so the data a run sees never depends on timing: epoch e is
the e-th seeded shuffle of the training problems, and group n is problem n modulo their number in epoch n divided by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from shared.config import Config, PromptsConfig
from shared.errors import ConfigError
from shared.records import GroupId

# The split must not follow the run's seed: held-out problems stay the same in every run that is compared.
_SPLIT_SEED = 20250725


@dataclass(frozen=True)
class Problem:
    """A question with its answer. `prompt_id` names the problem in the data, not the group."""

    prompt_id: str
    question: str
    answer: str


@dataclass(frozen=True)
class Prompt:
    """A problem as the engine sees it."""

    problem: Problem
    token_ids: tuple[int, ...]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> Any: ...


class PromptSource:
    """The problems of a run, split into training and held-out ones, in their seeded order."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        training, held_out = split_sums(config.prompts)
        self._seed = config.run.seed
        self._training = [_tokenize(problem, config, tokenizer) for problem in training]
        self.held_out = [_tokenize(problem, config, tokenizer) for problem in held_out]

    def training_prompt(self, group: GroupId) -> Prompt:
        """The prompt of a group; a replacement gets another problem than the group it replaces."""
        epoch, index = divmod(group.number, len(self._training))
        order = _shuffled(self._seed, epoch, len(self._training))
        return self._training[order[(index + group.replacement) % len(order)]]


def split_sums(config: PromptsConfig) -> tuple[list[Problem], list[Problem]]:
    """(training, held out): all sums of the configured digits, `num_held_out` of them never trained on."""
    terms = range(1, 10) if config.digits == 1 else range(100)
    pairs = [(a, b) for a in terms for b in terms]
    candidates = pairs if config.digits == 1 else [pair for pair in pairs if kept_from_warm_up(*pair)]
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(candidates))
    held_out = {candidates[i] for i in order[: config.num_held_out]}
    training = [_sum_problem(config, *pair) for pair in pairs if pair not in held_out]
    return training, [_sum_problem(config, *pair) for pair in pairs if pair in held_out]


def kept_from_warm_up(a: int, b: int) -> bool:
    """One two-digit sum in seven, never shown when the tiny example model is warmed up: what a run holds out is new.

    The divisor shares no factor with 10, so every pair of last digits is met in other sums.
    """
    return (a * 100 + b) % 7 == 0


def _sum_problem(config: PromptsConfig, a: int, b: int) -> Problem:
    if config.style == "chat":
        question = f"What is {a} + {b}? Answer with only the number."
    else:
        question = f"{a:0{config.digits}d}+{b:0{config.digits}d}="
    return Problem(prompt_id=f"{a}+{b}", question=question, answer=str(a + b))


def _tokenize(problem: Problem, config: Config, tokenizer: Tokenizer) -> Prompt:
    if config.prompts.style == "plain":
        ids = tokenizer.encode(problem.question, add_special_tokens=False)
    else:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"prompts.style = 'chat' needs a tokenizer with a chat template, and the one in model.path = "
                f"{config.model.path!r} has none. Set prompts.style = 'plain'."
            )
        conversation = [{"role": "user", "content": problem.question}]
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
    longest = config.rollout.max_model_len - config.sampling.max_tokens
    if not 0 < len(ids) <= longest:
        raise ConfigError(
            f"prompt {problem.prompt_id!r} has {len(ids)} tokens; rollout.max_model_len = "
            f"{config.rollout.max_model_len} less sampling.max_tokens = {config.sampling.max_tokens} leaves {longest}. "
            f"Raise the first or lower the second."
        )
    return Prompt(problem, tuple(ids))


@lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, num_problems: int) -> Sequence[int]:
    return [int(i) for i in np.random.default_rng([seed, epoch]).permutation(num_problems)]
