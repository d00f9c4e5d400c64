"""Whether the weights that an engine loaded are the learner's, and what may leave the worker until that is known.

The load check: the engine scores the manifest's probe, and the root mean square difference from the learner's own
log-probabilities must not exceed a limit. Every load has one verdict, which exists before the engine resumes. Gate:
tokens are released only if every load that may have sampled them was released. A version may be loaded twice, and its
label does not tell which load a token is of: a request that began before a refused load was followed by another one
counts as sampled under the refused one.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from rollout.segments import Span
from shared.errors import RolloutRejected
from shared.mismatch import measure
from shared.protocols import Engine
from shared.records import Mismatch, ProbeSequence


class Load:
    """One load of weights: its verdict, and the load that came after it. Made by `Verdicts`."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.next: Load | None = None
        self.followed = asyncio.Event()  # the engine has finished the next load
        self._decided = asyncio.Event()
        self._is_released = False

    @property
    def is_refused(self) -> bool:
        return self._decided.is_set() and not self._is_released

    def decide(self, is_released: bool) -> None:
        """Once, and for good."""
        self._is_released = is_released
        self._decided.set()

    async def is_released(self) -> bool:
        """Waits for the verdict."""
        await self._decided.wait()
        return self._is_released

    def onwards(self) -> "Iterator[Load]":
        """This load and all later ones."""
        load: Load | None = self
        while load is not None:
            yield load
            load = load.next


class Verdicts:
    """The loads of one engine. It starts with version 0 from the model's own files, which needs no verdict."""

    def __init__(self) -> None:
        self.current = Load(0)  # the last one that the engine has finished
        self.current.decide(True)

    @contextmanager
    def loading(self, version: int) -> Iterator[Load]:
        """A load whose verdict is open, while the engine does it; refused and forgotten when the engine refuses it."""
        before, load = self.current, Load(version)
        before.next = load
        try:
            yield load
        except BaseException:
            before.next = None
            load.decide(False)
            raise
        self.current = load
        before.followed.set()

    async def begin(self) -> Load:
        """The load that a request starts under. Waits while the engine is known to hold wrong weights."""
        while self.current.is_refused:
            await self.current.followed.wait()
        return self.current

    async def all_released(self, begun: Load) -> bool:
        """Whether no wrong weights were there since a request started under `begun`; waits for the verdicts."""
        return all([await load.is_released() for load in begun.onwards()])

    async def num_released(self, begun: Load, spans: Sequence[Span]) -> int:
        """How many leading tokens of a request may leave the worker; waits for the verdicts that this takes.

        `begun`: the load that the request started under. RolloutRejected on a version that was not loaded since.
        """
        num_tokens = 0
        for version, _, end in spans:
            loads = [load for load in begun.onwards() if load.version == version]
            if not loads:
                raise RolloutRejected(f"tokens of version {version}, which was not loaded while they were sampled.")
            for load in loads:
                if not await load.is_released():
                    return num_tokens
            num_tokens = end
        return num_tokens


@dataclass(frozen=True)
class LoadCheck:
    """The probe's outcome. `fault`: why the weights are refused, with the figures; "" if they are released.

    Where no difference could be measured, `mismatch` is of 0 tokens.
    """

    mismatch: Mismatch
    max_abs: float
    fault: str


async def check_load(engine: Engine, probe: Sequence[ProbeSequence], max_mismatch: float) -> LoadCheck:
    """Score the probe under the engine's active weights, beside whatever else runs.

    `max_mismatch`: the largest root mean square of the difference that is released, nats a token.
    """
    try:
        scores = await asyncio.gather(*[engine.score(p.token_ids.tolist(), p.first) for p in probe])
        d_T = np.concatenate([p.logprobs.astype(np.float64) - s for p, s in zip(probe, scores, strict=True)])
        mismatch, max_abs = measure(d_T), float(np.abs(d_T).max())
    except (RolloutRejected, ValueError) as error:  # a log-probability that is none, on either side
        return LoadCheck(Mismatch(0, 0.0, 0.0, 0.0), 0.0, f"the probe could not be measured: {error}")
    figures = f"rms {mismatch.rms:.3g} nats over {len(d_T)} tokens, limit {max_mismatch:.3g}, largest {max_abs:.3g}"
    return LoadCheck(mismatch, max_abs, "" if mismatch.rms <= max_mismatch else figures)
