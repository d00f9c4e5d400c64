"""An engine whose reported log-probabilities are off by a known mismatch: for studies of the clip range, never served.

Tokens are drawn as before; what `generate` and `score` report is the true value less d, with d ~ N(-sigma^2 / 2,
sigma^2) for each token, so that E[exp(d)] = 1 as for a real mismatch d = log pi_learner - log pi_engine. As measured
(docs/study_mismatch.md), sure tokens have less of it, which also keeps what is reported below 0: the spread of a token
of probability p is that of an improbable one times min(1, 1.4 (1 - p)). Over a completion of mostly sure tokens the
spread is therefore smaller than `Noise.spread`; the run's metrics say what was measured.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.protocols import Completion, Engine, GenerateRequest, RequestsInLoad
from shared.records import Float32Array, Manifest
from shared.seeds import derive_seed

# Noise in logits moves the log-probability of a sure token by the probability that is left, in two logits.
SURE_TOKEN_SLOPE = 1.4


@dataclass(frozen=True)
class Noise:
    """`spread`: standard deviation of d of an improbable token, nats."""

    spread: float
    seed: int = 0


class NoisyEngine:
    """Implements shared.protocols.Engine around another engine."""

    def __init__(self, engine: Engine, noise: Noise) -> None:
        self._engine, self._noise = engine, noise

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await self._engine.generate(request)
        seed = derive_seed(self._noise.seed, "noise", request.seed)
        return replace(completion, logprobs=perturbed(completion.logprobs, self._noise.spread, seed))

    async def score(self, token_ids: Sequence[int], first: int) -> Float32Array:
        logprobs_T = await self._engine.score(token_ids, first)
        digest = hashlib.blake2b(np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=8).digest()
        seed = derive_seed(self._noise.seed, "score-noise", int.from_bytes(digest))
        return perturbed(logprobs_T, self._noise.spread, seed)

    async def load(
        self, manifest: Manifest, files: Sequence[Path], requests: RequestsInLoad = "recompute"
    ) -> dict[str, float]:
        return await self._engine.load(manifest, files, requests)

    async def close(self) -> None:
        await self._engine.close()


def perturbed(logprobs_T: Float32Array, spread: float, seed: int) -> Float32Array:
    """The log-probabilities less d, whose standard deviation is `spread` times `confidence_factor` of the token."""
    sigma_T = spread * confidence_factor(logprobs_T)
    d_T = sigma_T * np.random.default_rng(seed).standard_normal(len(logprobs_T)) - sigma_T**2 / 2
    return np.minimum(logprobs_T - d_T, 0.0).astype(np.float32)


def confidence_factor(logprobs_T: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """The spread of a token relative to that of an improbable one."""
    p_T = np.exp(np.minimum(np.asarray(logprobs_T, dtype=np.float64), 0.0))
    return np.minimum(1.0, SURE_TOKEN_SLOPE * (1.0 - p_T))
