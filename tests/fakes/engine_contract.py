"""What every implementation of the `Engine` protocol must do. Run over the fake and over vLLM.

A test class derives from `EngineContract` and provides the fixture `served`: an engine with its weights (`Served`).
"""

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from shared.errors import WeightSyncError
from shared.protocols import Completion, Engine, GenerateRequest
from shared.records import Manifest

PROMPT = (5, 17, 9, 30)


class Served(Protocol):
    """An engine and the means to give it other weights. `tolerance`: nats between two ways to score one token."""

    engine: Engine
    tolerance: float
    eos_id: int

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any: ...

    def publish(self, noise: int | None, edit: Any = None) -> tuple[Manifest, list[Path]]:
        """Staged weights with the next version number: the initial ones, or those of noise seed `noise`.

        `edit` maps the named tensors (name -> float32 array) to those that are sent instead.
        """
        ...


def request(seed: int = 0, max_tokens: int = 24, temperature: float = 1.0, salt: str = "a") -> GenerateRequest:
    return GenerateRequest(f"r{seed}-{max_tokens}-{np.random.default_rng().integers(2**62)}", PROMPT, max_tokens,
                           temperature, seed, salt)  # fmt: skip


def sample(served: Served, **fields: Any) -> Completion:
    return served.run(served.engine.generate(request(**fields)))


def score(served: Served, completion: Completion) -> np.ndarray:
    return served.run(served.engine.score([*PROMPT, *completion.token_ids.tolist()], len(PROMPT)))


def load(served: Served, noise: int | None, edit: Any = None) -> int:
    manifest, files = served.publish(noise, edit)
    served.run(served.engine.load(manifest, files))
    return manifest.version


class EngineContract:
    def test_completions_are_whole(self, served: Served) -> None:
        version = load(served, None)
        for seed in range(8):
            completion = sample(served, seed=seed, max_tokens=12)
            num_tokens = len(completion.token_ids)
            assert completion.token_ids.dtype == np.int32
            assert completion.logprobs.dtype == np.float32
            assert len(completion.logprobs) == num_tokens
            assert np.isfinite(completion.logprobs).all()
            assert completion.version_spans == ((version, 0, num_tokens),)
            assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == served.eos_id)
            assert num_tokens == 12 or completion.finish_reason == "stop"

    def test_the_seed_decides_the_draw(self, served: Served) -> None:
        first, again, other = (sample(served, seed=seed) for seed in (3, 3, 4))
        np.testing.assert_array_equal(first.token_ids, again.token_ids)
        assert first.token_ids.tolist() != other.token_ids.tolist()

    def test_scoring_agrees_with_sampling(self, served: Served) -> None:
        completion = sample(served, seed=5)
        np.testing.assert_allclose(score(served, completion), completion.logprobs, atol=served.tolerance, rtol=0)

    def test_scoring_needs_a_token_to_predict_from(self, served: Served) -> None:
        for first in (0, 4):
            with pytest.raises(ValueError, match="first"):
                served.run(served.engine.score([1, 2, 3], first))

    def test_new_weights_change_the_distribution_and_the_label(self, served: Served) -> None:
        load(served, None)
        before = sample(served, seed=6)
        version = load(served, 1)
        assert np.abs(score(served, before) - before.logprobs).max() > 10 * served.tolerance
        assert [span[0] for span in sample(served, seed=6).version_spans] == [version]
        load(served, None)
        np.testing.assert_allclose(score(served, before), before.logprobs, atol=served.tolerance, rtol=0)

    def test_without_files_only_the_label_moves(self, served: Served) -> None:
        before = sample(served, seed=7)
        manifest, _ = served.publish(1)
        parts = served.run(served.engine.load(manifest, []))
        assert set(parts) == {"pause_s", "load_s", "resume_s"}
        after = sample(served, seed=7, salt="b")
        assert [span[0] for span in after.version_spans] == [manifest.version]
        np.testing.assert_allclose(score(served, before), before.logprobs, atol=served.tolerance, rtol=0)

    def test_a_switch_in_mid_request_is_exact_segment_by_segment(self, served: Served) -> None:
        old_version = load(served, None)
        manifest, files = served.publish(2)

        async def switch_while_running() -> list[Completion]:
            requests = [request(seed=20 + i, max_tokens=120) for i in range(6)]
            running = [asyncio.create_task(served.engine.generate(r)) for r in requests]
            await asyncio.sleep(0.1)
            await served.engine.load(manifest, files)
            return await asyncio.gather(*running)

        switched = [c for c in served.run(switch_while_running()) if len(c.version_spans) == 2]
        assert switched, "no request was running during the switch"
        cuts = [completion.version_spans[0][2] for completion in switched]
        assert all([v for v, _, _ in c.version_spans] == [old_version, manifest.version] for c in switched)
        for completion, cut in zip(switched, cuts, strict=True):
            error = np.abs(score(served, completion) - completion.logprobs)[cut:]
            assert error.max() <= served.tolerance
        load(served, None)
        for completion, cut in zip(switched, cuts, strict=True):
            error = np.abs(score(served, completion) - completion.logprobs)
            assert error[:cut].max() <= served.tolerance
            assert error[cut:].max() > 10 * served.tolerance

    def test_a_load_that_ends_requests_returns_what_they_have(self, served: Served) -> None:
        old_version = load(served, None)
        manifest, files = served.publish(2)

        async def end_while_running() -> tuple[list[Completion], list[Completion]]:
            before = [request(seed=30 + i, max_tokens=120) for i in range(6)]
            running = [asyncio.create_task(served.engine.generate(r)) for r in before]
            await asyncio.sleep(0.1)
            loading = asyncio.create_task(served.engine.load(manifest, files, "abort"))
            late = []
            for seed in range(40, 46):  # some before the pause, some in it
                late.append(asyncio.create_task(served.engine.generate(request(seed=seed, max_tokens=6))))
                await asyncio.sleep(0.005)
            await loading
            return await asyncio.gather(*running), await asyncio.gather(*late)

        completions, late = served.run(end_while_running())
        ended = [c for c in completions if c.finish_reason == "abort"]
        assert ended, "no request was running during the load"
        for completion in ended:
            num_tokens = len(completion.token_ids)
            assert 0 < num_tokens < 120
            assert completion.version_spans == ((old_version, 0, num_tokens),)
        for completion in late:
            num_tokens, version = len(completion.token_ids), manifest.version
            if completion.finish_reason == "abort":
                assert completion.version_spans == (((old_version, 0, num_tokens),) if num_tokens else ())
            else:
                assert completion.version_spans in (((old_version, 0, num_tokens),), ((version, 0, num_tokens),))
        assert any(c.version_spans and c.version_spans[0][0] == manifest.version for c in late)
        load(served, None)
        for completion in ended:
            np.testing.assert_allclose(score(served, completion), completion.logprobs, atol=served.tolerance, rtol=0)

    def test_refused_weights_leave_the_old_version(self, served: Served) -> None:
        version = load(served, None)
        before = sample(served, seed=8)

        def without_last(tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
            return dict(list(tensors.items())[:-1])

        with pytest.raises(WeightSyncError, match="was not sent"):
            load(served, 3, without_last)
        after = sample(served, seed=8)
        assert [span[0] for span in after.version_spans] == [version]
        np.testing.assert_array_equal(after.token_ids, before.token_ids)
        np.testing.assert_allclose(after.logprobs, before.logprobs, atol=served.tolerance, rtol=0)
