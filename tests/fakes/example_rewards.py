"""Reward functions by dotted path, as a user's would be."""

from collections.abc import Sequence

from rollout.rewards import Sample


def even_length(samples: Sequence[Sample], answer: str) -> list[float | None]:
    return [float(len(s.text) % 2 == 0) for s in samples]


def fails_for_odd_sums(samples: Sequence[Sample], answer: str) -> list[float | None]:
    return [] if int(answer) % 2 else [1.0] * len(samples)
