"""Scoring completions: the built-in rewards, how a dotted function is found, and what its answer must look like.

A reward function takes the samples of one group and the problem's answer, and returns one value for each sample, in
order: a finite number, or None for "cannot be scored". It never decides what an unscored sample is worth; the learner
leaves it out of mean, spread and loss.
"""

import importlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

from shared.errors import ConfigError, RewardError


@dataclass(frozen=True)
class Sample:
    """A completion as text. `finished`: the model ended it itself, rather than the length limit."""

    text: str
    finished: bool


RewardFunction = Callable[[Sequence[Sample], str], Sequence[float | None]]

_NUMBER = re.compile(r"-?\d+")


def last_number(samples: Sequence[Sample], answer: str) -> list[float | None]:
    """1 if the completion ended by itself and the last number in it is the answer, otherwise 0."""
    return [float(s.finished and _NUMBER.findall(s.text)[-1:] == [answer]) for s in samples]


def exact_match(samples: Sequence[Sample], answer: str) -> list[float | None]:
    """1 if the completion ended by itself and is the answer, spaces around it aside, otherwise 0."""
    return [float(s.finished and s.text.strip() == answer) for s in samples]


def load_reward(path: str) -> RewardFunction:
    """Find "package.module:function". ConfigError says what is missing."""
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module's own errors too
        raise ConfigError(
            f"reward.function = {path!r}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"reward.function = {path!r}: {module_name!r} has no function {function_name!r}")
    return function


def score(function: RewardFunction, samples: Sequence[Sample], answer: str) -> list[float | None]:
    """Call a reward function and check what comes back. RewardError names the function and the fault, also when it
    raises.
    """
    name = f"{function.__module__}:{getattr(function, '__name__', function)}"
    try:
        values = function(samples, answer)
    except Exception as error:
        raise RewardError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)) or len(values) != len(samples):
        got = f"{len(values)} values" if isinstance(values, Sequence) else repr(values)
        raise RewardError(f"{name} returned {got} for {len(samples)} samples; it must return a list, one value each")
    for value in values:
        if value is None:
            continue
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(f"{name} returned {value!r}; each value must be a finite number, or None if unscored")
    return [None if value is None else float(value) for value in values]
