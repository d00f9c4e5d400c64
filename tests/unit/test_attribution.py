"""What log-ratios are made of, on rollouts whose causes are known because they were put there."""

from collections.abc import Sequence

import numpy as np
import pytest

from learner.attribution import ScoredRollout, attribute, measured_by_worker, measured_mismatch, zero_lag
from shared.mismatch import measure
from shared.records import KvState, Mismatch, Rollout, Segment

SIGMA, LAG, CACHE = 0.06, 0.03, -0.05
STEP = 7
RNG = np.random.default_rng(0)


def scored(
    length: int,
    versions: Sequence[int] = (STEP,),
    kv: KvState = "fresh",
    lag: float = 0.0,
    with_logprobs: bool = True,
    worker: str = "w0",
) -> ScoredRollout:
    """Equal segments of these versions; d = mismatch (E[exp d] = 1), plus `lag` on all tokens not of STEP."""
    behavior = -RNG.exponential(1.0, length).astype(np.float32)
    edges = np.linspace(0, length, len(versions) + 1).astype(int)
    shift = np.zeros(length)
    segments = []
    for version, start, end in zip(versions, edges[:-1], edges[1:], strict=True):
        segments.append(Segment(version, int(start), int(end), float(behavior[start:end].sum(dtype=np.float64)), kv))
        shift[start:end] = lag if version != STEP else 0.0
    learner = behavior + RNG.normal(-(SIGMA**2) / 2, SIGMA, length) + shift
    rollout = Rollout(np.zeros(length, np.int32), behavior if with_logprobs else None, tuple(segments), "stop", 1.0)
    return ScoredRollout(worker, rollout, 1.0, learner.astype(np.float32))


KNOWN = measure(RNG.normal(-(SIGMA**2) / 2, SIGMA, 5000))


def lengths(num: int) -> list[int]:
    return RNG.integers(8, 40, num).tolist()


def test_only_tokens_of_the_trained_version_with_their_own_cache_are_measured() -> None:
    fresh = [scored(n) for n in lengths(60)]
    others = [scored(20, (STEP - 1,), lag=1.0), scored(20, (STEP - 1, STEP), lag=1.0), scored(20, kv="kept")]
    assert zero_lag([*fresh, *others], STEP) == fresh
    found = measured_mismatch([*fresh, *others], STEP)
    assert found.num_tokens == sum(s.rollout.num_tokens for s in fresh)
    assert found.spread == pytest.approx(SIGMA, rel=0.1)
    assert measured_mismatch(others, STEP) is None


def test_each_worker_is_measured_for_itself() -> None:
    batch = [scored(n, worker=worker) for n in lengths(20) for worker in ("w0", "w1")] + [
        scored(20, (STEP - 1,), worker="w2")
    ]
    found = measured_by_worker(batch, STEP)
    assert found.keys() == {"w0", "w1"}
    assert found["w1"] == measured_mismatch([s for s in batch if s.worker_id == "w1"], STEP) != found["w0"]


def test_sequence_payload_is_measured_too() -> None:
    found = measured_mismatch([scored(n, with_logprobs=False) for n in lengths(400)], STEP)
    assert found.num_tokens == 400  # a spread from 400 values is no better known than that
    assert found.spread == pytest.approx(SIGMA, rel=0.1)
    assert measured_mismatch([scored(9, with_logprobs=False)], STEP) is None


def test_lag_and_mismatch_are_told_apart() -> None:
    batch = [scored(n, (STEP - 1,), lag=LAG) for n in lengths(400)]
    parts = attribute(batch, KNOWN)
    error = 2 * SIGMA * np.sqrt(np.mean([1 / s.rollout.num_tokens for s in batch]) / len(batch))
    assert parts.mean_mismatch == pytest.approx(-(SIGMA**2) / 2, abs=error)
    assert parts.mean_lag == pytest.approx(LAG, abs=error)
    assert parts.variance_mismatch == pytest.approx(parts.variance, rel=0.2)  # the lag is the same for all
    assert abs(parts.variance_lag) < 0.2 * parts.variance
    assert parts.mean_stale_cache is parts.variance_stale_cache is None


def test_parts_add_up() -> None:
    batch = [scored(n, (STEP - 1,), lag=LAG) for n in lengths(50)] + [
        scored(n, (STEP - 1,), kv="kept", lag=LAG + CACHE) for n in lengths(50)
    ]
    parts = attribute(batch, KNOWN)
    assert parts.mean_mismatch + parts.mean_stale_cache + parts.mean_lag == pytest.approx(parts.mean)
    assert parts.variance_mismatch + parts.variance_stale_cache + parts.variance_lag == pytest.approx(parts.variance)


def test_a_stale_cache_is_what_kept_sequences_have_beyond_fresh_ones() -> None:
    batch = [scored(n, (STEP - 1,), lag=LAG) for n in lengths(300)] + [
        scored(n, (STEP - 1,), kv="kept", lag=LAG + CACHE) for n in lengths(100)
    ]
    parts = attribute(batch, KNOWN)
    assert parts.mean_stale_cache == pytest.approx(CACHE / 4, abs=2e-3)  # a quarter of the sequences
    assert parts.mean_lag == pytest.approx(LAG, abs=2e-3)


def test_without_a_measurement_or_rollouts_there_is_less_to_say() -> None:
    assert attribute([], KNOWN) is None
    parts = attribute([scored(20)], None)
    assert parts.mean_mismatch is None
    assert parts.mean_lag == parts.mean
    assert Mismatch(0, 0, 0, 0).spread == 0.0
