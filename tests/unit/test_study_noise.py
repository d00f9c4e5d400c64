"""The engine that reports log-probabilities off by a known mismatch."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine

from rollout.completions import MAX_LOGPROB
from shared.mismatch import measure
from shared.protocols import Completion, GenerateRequest
from shared.records import Manifest
from study_noise import Noise, NoisyEngine, confidence_factor, perturbed

PROMPT = (5, 17, 9, 30)


def sample(engine: Any, seed: int) -> Completion:
    return asyncio.run(engine.generate(GenerateRequest(f"r{seed}", PROMPT, 40, 1.0, seed, "0")))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def test_tokens_are_drawn_as_before_and_their_log_probabilities_are_off(engine: FakeEngine) -> None:
    true, noisy = sample(engine, 1), sample(NoisyEngine(engine, Noise(0.05)), 1)
    np.testing.assert_array_equal(noisy.token_ids, true.token_ids)
    assert noisy.version_spans == true.version_spans
    differences = true.logprobs - noisy.logprobs
    assert noisy.logprobs.dtype == np.float32
    assert 0 < np.abs(differences).max() < 0.5


class ConstantEngine(FakeEngine):
    """Says -4 of every token."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return replace(await super().generate(request), token_ids=np.zeros(40, np.int32), logprobs=np.full(40, -4.0))


def test_the_request_decides_the_noise() -> None:
    def reported(seed: int, noise: Noise) -> list[float]:
        return sample(NoisyEngine(ConstantEngine(), noise), seed).logprobs.tolist()

    assert reported(1, Noise(0.05)) == reported(1, Noise(0.05))
    assert not set(reported(1, Noise(0.05))) & set(reported(2, Noise(0.05)))
    assert not set(reported(1, Noise(0.05))) & set(reported(1, Noise(0.05, seed=9)))


def test_scores_are_off_by_the_same_spread(engine: FakeEngine) -> None:
    ids = np.random.default_rng(0).integers(2, 128, 2000).tolist()
    true = asyncio.run(engine.score(ids, 4))
    noisy = asyncio.run(NoisyEngine(engine, Noise(0.05)).score(ids, 4))
    again = asyncio.run(NoisyEngine(engine, Noise(0.05)).score(ids, 4))
    np.testing.assert_array_equal(noisy, again)
    assert (true - noisy).std() == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("spread", [0.06, 0.25])
def test_the_noise_is_a_mismatch_of_the_spread_asked_for(spread: float) -> None:
    """E[exp(d)] = 1, so the mean of d is -k3."""
    logprobs_T = np.full(200_000, -4.0, dtype=np.float32)
    d_T = logprobs_T.astype(np.float64) - perturbed(logprobs_T, spread, seed=3)
    measured = measure(d_T)
    assert measured.spread == pytest.approx(spread, rel=0.02)
    assert np.exp(d_T).mean() == pytest.approx(1.0, abs=3e-3)
    assert d_T.mean() == pytest.approx(-(spread**2) / 2, rel=0.15)


def test_confident_tokens_have_less_of_it_and_none_gets_above_zero() -> None:
    factors = confidence_factor(np.log([0.001, 0.2, 0.5, 0.95, 1.0]))
    assert factors.tolist() == pytest.approx([1.0, 1.0, 0.7, 0.07, 0.0])
    likely = np.full(20_000, np.log(0.95), dtype=np.float32)
    assert (likely - perturbed(likely, 0.25, seed=0)).std() == pytest.approx(0.07 * 0.25, rel=0.05)
    sure = np.log(np.linspace(0.9, 1.0, 10_000)).astype(np.float32)
    assert perturbed(sure, 0.25, seed=0).max() <= MAX_LOGPROB
    assert np.isfinite(perturbed(sure, 0.25, seed=0)).all()


def test_everything_else_is_the_engines(engine: FakeEngine) -> None:
    noisy = NoisyEngine(engine, Noise(0.05))
    asyncio.run(noisy.load(Manifest(3, 3, ()), []))
    assert sample(engine, 1).version_spans[0][0] == 3
    asyncio.run(noisy.close())
    assert engine.closed
