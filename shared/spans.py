"""What happened when: intervals of work, on one time axis for all processes of a host.

Times are Unix seconds that never jump within a process: the wall clock is read once, the rest is monotonic.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shared.records import Span

_UNIX_AT_START_S = time.time() - time.monotonic()


def now_s() -> float:
    """Unix seconds, monotonic within this process."""
    return _UNIX_AT_START_S + time.monotonic()


@dataclass
class Timing:
    """Start and end of a span that is being recorded (Unix seconds)."""

    start_s: float = 0.0
    end_s: float = 0.0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Recorder:
    """Collects the spans of one lane until they are taken and sent."""

    def __init__(self, lane: str, clock: Callable[[], float] = now_s) -> None:
        self.lane = lane
        self._clock = clock
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str, version: int, detail: str = "") -> Iterator[Timing]:
        """Record the body as one span, also when it raises. The yielded timing is complete after the body."""
        timing = Timing(self._clock())
        try:
            yield timing
        finally:
            timing.end_s = self._clock()
            self.add(name, timing.start_s, timing.end_s, version, detail)

    def add(self, name: str, start_s: float, end_s: float, version: int, detail: str = "") -> None:
        self._spans.append(Span(self.lane, name, start_s, end_s, version, detail))

    def take(self) -> list[Span]:
        """All spans since the last call."""
        spans, self._spans = self._spans, []
        return spans


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The time covered by at least one span, as disjoint intervals in order."""
    merged: list[tuple[float, float]] = []
    for start_s, end_s in sorted((s.start_s, s.end_s) for s in spans):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Total seconds of disjoint intervals."""
    return sum(end_s - start_s for start_s, end_s in intervals)


def overlap_s(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Seconds covered by both of two interval lists."""
    total_s, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total_s += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total_s
