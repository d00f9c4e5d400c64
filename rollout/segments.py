"""Segments: which policy version sampled which tokens, and with what log-likelihood. Pure.

A span is (version, start, end) over completion tokens [start, end). Spans tile [0, T) in order: version 7 for tokens
[0, 57) and 8 for [57, 128) are the segments (7, 57 tokens) and (8, 71 tokens); trained at version 9, the staleness of
that rollout is 9 - 7 = 2.
"""

from collections.abc import Sequence

import numpy as np

from shared.errors import RolloutRejected
from shared.records import Float32Array, Segment

Span = tuple[int, int, int]


def check_spans(spans: Sequence[Span], num_tokens: int) -> None:
    """Raise RolloutRejected unless the spans tile [0, num_tokens) in order with versions that never go back."""
    position, last_version = 0, None
    for version, start, end in spans:
        if start != position or end <= start:
            raise RolloutRejected(f"version spans {list(spans)} do not tile {num_tokens} tokens: gap at {position}.")
        if version < 0 or (last_version is not None and version <= last_version):
            raise RolloutRejected(f"version spans {list(spans)}: version {version} follows {last_version}.")
        position, last_version = end, version
    if position != num_tokens:
        raise RolloutRejected(f"version spans {list(spans)} end at {position}, the completion has {num_tokens} tokens.")


def build_segments(spans: Sequence[Span], logprobs_T: Float32Array) -> tuple[Segment, ...]:
    """One segment per span; `loglik` is the float64 sum of its log-probabilities (nats).

    A switch of weights rebuilds the cache of running requests, so every segment's cache is fresh. RolloutRejected when
    the spans do not tile the tokens or a log-probability is not finite.
    """
    check_spans(spans, len(logprobs_T))
    if not np.isfinite(logprobs_T).all():
        raise RolloutRejected(f"log-probability at token {int(np.argmin(np.isfinite(logprobs_T)))} is not finite.")
    values = np.asarray(logprobs_T, dtype=np.float64)
    return tuple(Segment(version, start, end, float(values[start:end].sum())) for version, start, end in spans)
