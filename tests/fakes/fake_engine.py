"""A deterministic stand-in for the rollout engine: a language model made of hashes. NumPy only, importable anywhere.

The logits after a context are a function of the weights' digest and the last few tokens, so log-probabilities are
exact under every version, `score` agrees with `generate`, and new weights change both. The noise of a draw is a
function of the seed and the absolute position: a completion that is cut at any token and continued from prompt plus
tokens with the same seed equals the uninterrupted one. Between tokens the event loop runs, so weights can be swapped
in the middle of a request. A load pauses: meanwhile no token is sampled, and what comes in waits.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from blake3 import blake3

from rollout.coverage import check_coverage
from shared.errors import RolloutRejected, WeightSyncError
from shared.protocols import Completion, GenerateRequest, RequestsInLoad
from shared.records import Float32Array, Manifest, ProbeSequence
from shared.weights import check_manifest, verify_bucket, weights_digest

EOS_ID = 1
CONTEXT_TOKENS = 8


class FakeEngine:
    """Implements shared.protocols.Engine.

    `reject(request)` returns a reason to reject that request, or None. `token_s`: seconds of sleep per token, and of a
    load's pause.
    `expected`: checkpoint name -> shape of a float32 model, to refuse other weights; None accepts any.
    """

    def __init__(
        self,
        vocab_size: int = 128,
        token_s: float = 0.0,
        reject: Callable[[GenerateRequest], str | None] = lambda request: None,
        expected: Mapping[str, tuple[int, ...]] | None = None,
        initial_weights: str = "initial",
    ) -> None:
        self._vocab_size = vocab_size
        self._token_s = token_s
        self._reject = reject
        self._expected = expected
        self._weights = initial_weights
        self._version = 0
        self._num_aborts = 0
        self.is_paused = False
        self.num_loads = 0
        self.closed = False

    async def generate(self, request: GenerateRequest) -> Completion:
        if (reason := self._reject(request)) is not None:
            raise RolloutRejected(reason)
        context, logprobs, versions = list(request.prompt_ids), [], []
        finish_reason: Literal["stop", "length", "abort"] = "length"
        num_aborts = self._num_aborts
        while len(logprobs) < request.max_tokens:
            await self._running()
            if num_aborts != self._num_aborts:
                finish_reason = "abort"
                break
            logprobs_V = self._logprobs(context, request.temperature)
            noise = np.random.default_rng(_seed("draw", request.seed, len(context))).gumbel(size=self._vocab_size)
            token_id = int(np.argmax(logprobs_V + noise))
            context.append(token_id)
            logprobs.append(logprobs_V[token_id])
            versions.append(self._version)
            if token_id == EOS_ID:
                finish_reason = "stop"
                break
        token_ids = np.asarray(context[len(request.prompt_ids) :], dtype=np.int32)
        return Completion(token_ids, np.asarray(logprobs, dtype=np.float32), _spans(versions), finish_reason)

    async def score(self, token_ids: Sequence[int], first: int) -> Float32Array:
        if not 1 <= first <= len(token_ids):
            raise ValueError(f"first = {first}")
        await self._running()
        ids = [int(token_id) for token_id in token_ids]
        values = [self._logprobs(ids[:i], 1.0)[ids[i]] for i in range(first, len(ids))]
        return np.asarray(values, dtype=np.float32)

    async def load(
        self, manifest: Manifest, files: Sequence[Path], requests: RequestsInLoad = "recompute"
    ) -> dict[str, float]:
        self._check(manifest, files)
        self.is_paused = bool(files)
        try:
            if files:
                self._num_aborts += requests == "abort"
                await asyncio.sleep(self._token_s)
                self._weights = weights_digest(manifest)
            self._version = manifest.version
        finally:
            self.is_paused = False
        self.num_loads += 1
        return {"pause_s": 0.0, "load_s": 0.0, "resume_s": 0.0}

    async def close(self) -> None:
        self.closed = True

    async def _running(self) -> None:
        """One token's time, and the rest of a pause."""
        await asyncio.sleep(self._token_s)
        while self.is_paused:
            await asyncio.sleep(self._token_s)

    def _check(self, manifest: Manifest, files: Sequence[Path]) -> None:
        if files:
            check_manifest(manifest)
            if self._expected is not None:
                check_coverage(self._expected, "F32", ((t.name, t.dtype, t.shape) for t in manifest.tensors))
            for number, file in enumerate(files):
                if not file.is_file():
                    raise WeightSyncError(f"{file} is missing")
                blob = np.fromfile(file, dtype=np.uint8)
                verify_bucket(blob, [t for t in manifest.tensors if t.bucket == number])

    def _logprobs(self, context: Sequence[int], temperature: float) -> np.ndarray:
        """float64 [V]: log-probabilities (nats) after `context` at `temperature`."""
        rng = np.random.default_rng(_seed("logits", self._weights, tuple(map(int, context[-CONTEXT_TOKENS:]))))
        logits_V = 2.0 * rng.standard_normal(self._vocab_size) / temperature
        shifted = logits_V - logits_V.max()
        return shifted - np.log(np.exp(shifted).sum())


def probe_of(manifest: Manifest, num_sequences: int = 4, num_tokens: int = 24) -> tuple[ProbeSequence, ...]:
    """Sequences with the log-probabilities of the engine that holds exactly these weights."""
    right = FakeEngine(initial_weights=weights_digest(manifest))
    probe = []
    for number in range(num_sequences):
        ids = np.random.default_rng(number).integers(2, 128, 3 + num_tokens).astype(np.int32)
        logprobs = [right._logprobs(ids[:i].tolist(), 1.0)[ids[i]] for i in range(3, len(ids))]
        probe.append(ProbeSequence(ids, 3, np.float32(logprobs)))
    return tuple(probe)


def _seed(*parts: object) -> int:
    return int.from_bytes(blake3(repr(parts).encode()).digest()[:8], "little")


def _spans(versions: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
    ends = [*starts[1:], len(versions)]
    return tuple((versions[start], start, end) for start, end in zip(starts, ends, strict=True))
