"""The objective against an independent float64 reference, by value, by gradient and by count."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.objectives import LOG_RATIO_CEILING, ObjectiveMetrics, gspo, sum_sequences
from shared.records import ClipRange

sys.path.insert(0, str(Path(__file__).parent))
import reference

LOW, HIGH = 0.03, 0.04
FIXED = ClipRange(LOW, HIGH)


def run(
    sequences: list[np.ndarray],
    behavior: list[float],
    advantages: list[float],
    n: int | None = None,
    clip: ClipRange = FIXED,
) -> tuple[float, list[np.ndarray], ObjectiveMetrics]:
    """Loss, gradient by sequence, metrics; default denominators and the clip range of this file."""
    logprobs_T = torch.tensor(np.concatenate(sequences), dtype=torch.float32, requires_grad=True)
    lengths = [len(s) for s in sequences]
    loss, metrics = gspo(
        logprobs_T,
        None,
        torch.tensor(behavior, dtype=torch.float64),
        torch.tensor(lengths),
        torch.tensor(advantages, dtype=torch.float64),
        clip=clip,
        num_sequences=n or len(sequences),
    )
    loss.backward()
    assert logprobs_T.grad is not None
    return float(loss.detach()), [g.numpy() for g in logprobs_T.grad.split(lengths)], metrics


def random_sequences(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [-generator.exponential(1.0, n).astype(np.float32) for n in lengths]


def behavior_for(sequences: list[np.ndarray], log_ratios: list[float]) -> list[float]:
    """Behavior log-likelihoods that make log s what is asked."""
    return [float(s.sum(dtype=np.float64)) - r * len(s) for s, r in zip(sequences, log_ratios, strict=True)]


def check(sequences: list[np.ndarray], behavior: list[float], advantages: list[float]) -> ObjectiveMetrics:
    loss, gradients, metrics = run(sequences, behavior, advantages)
    values = [s.tolist() for s in sequences]
    assert loss == pytest.approx(reference.loss(values, behavior, advantages, LOW, HIGH), rel=1e-9, abs=1e-12)
    expected = reference.gradient(values, behavior, advantages, LOW, HIGH)
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)
    return metrics


@pytest.mark.parametrize("length", [1, 4096])
@pytest.mark.parametrize("advantage", [1.7, -0.6])
@pytest.mark.parametrize("log_ratio", [-0.5, -0.01, 0.01, 0.5])
def test_each_sign_is_clipped_on_its_side_only(length: int, advantage: float, log_ratio: float) -> None:
    sequences = random_sequences([length, 3])
    metrics = check(sequences, behavior_for(sequences, [log_ratio, 0.0]), [advantage, 1.0])
    assert metrics.num_clipped_positive == (advantage > 0 and log_ratio == 0.5)
    assert metrics.num_clipped_negative == (advantage < 0 and log_ratio == -0.5)
    assert (metrics.num_positive, metrics.num_negative) == ((2, 0) if advantage > 0 else (1, 1))
    assert metrics.num_tokens == length + 3


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.floats(-0.2, 0.2), st.sampled_from([-2.0, -0.3, 0.0, 0.4, 2.5])),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_batch_equals_the_reference_and_its_parts_add_up(rows: list[tuple[int, float, float]]) -> None:
    lengths, log_ratios, advantages = (list(column) for column in zip(*rows, strict=True))
    sequences = random_sequences(lengths)
    behavior = behavior_for(sequences, log_ratios)
    metrics = check(sequences, behavior, advantages)
    assert metrics.num_zero == advantages.count(0.0)
    assert metrics.sum_log_ratio == pytest.approx(sum(log_ratios), abs=1e-9)
    assert metrics.sum_sq_log_ratio == pytest.approx(sum(r * r for r in log_ratios), abs=1e-9)
    assert metrics.max_abs_log_ratio == pytest.approx(max(map(abs, log_ratios)), abs=1e-9)

    whole = run(sequences, behavior, advantages)
    parts = [run([s], [b], [a], n=len(rows)) for s, b, a in zip(sequences, behavior, advantages, strict=True)]
    assert sum(p[0] for p in parts) == pytest.approx(whole[0], abs=1e-12)
    added = sum((p[2] for p in parts), ObjectiveMetrics())
    assert added.clip_fraction == whole[2].clip_fraction
    assert added.num_sequences == len(rows)


def test_ratio_one_is_the_plain_policy_gradient() -> None:
    sequences = random_sequences([2, 5, 1, 9])
    advantages = [1.5, -0.5, 0.0, -1.0]
    _, gradients, metrics = run(sequences, behavior_for(sequences, [0.0] * 4), advantages)
    assert metrics.clip_fraction == 0
    for gradient, advantage, sequence in zip(gradients, advantages, sequences, strict=True):
        np.testing.assert_allclose(gradient, -advantage / len(sequence) / 4, rtol=1e-6)


def test_shift_of_the_behavior_likelihood_moves_the_loss_as_the_equation_says() -> None:
    sequences = random_sequences([2, 5, 11])
    advantages = [1.5, -0.5, 1.0]
    behavior = behavior_for(sequences, [0.01, -0.02, 0.2])  # the last one is clipped: it must not move
    before, after = (run(sequences, [b + shift for b in behavior], advantages)[0] for shift in (0.0, 1e-3))
    moved = 1.5 * np.exp(0.01) * np.expm1(-1e-3 / 2) - 0.5 * np.exp(-0.02) * np.expm1(-1e-3 / 5)
    assert after - before == pytest.approx(-moved / 3, rel=1e-7)


def test_gradient_equals_finite_differences() -> None:
    lengths = torch.tensor([2, 1, 3, 2])
    logprobs_T = torch.tensor(np.concatenate(random_sequences(lengths.tolist())), dtype=torch.float64)
    log_ratios = torch.tensor([0.01, 0.5, -0.5, -0.01], dtype=torch.float64)
    behavior_S = sum_sequences(logprobs_T, lengths) - log_ratios * lengths
    advantages_S = torch.tensor([1.0, -2.0, -1.0, 0.5], dtype=torch.float64)

    def loss(values_T: torch.Tensor) -> torch.Tensor:
        return gspo(values_T, None, behavior_S, lengths, advantages_S, clip=FIXED, num_sequences=4)[0]

    assert torch.autograd.gradcheck(loss, logprobs_T.requires_grad_())


@pytest.mark.parametrize("log_ratio", [200.0, 800.0, 1e30])
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_huge_ratio_without_gradient_leaves_the_others_alone(log_ratio: float, advantage: float) -> None:
    sequences = [np.zeros(1, np.float32)] * 3
    loss, gradients, _ = run(sequences, [0.0, 0.0, -log_ratio], [1.0, 1.0, advantage], n=2)
    assert np.isfinite(loss)
    assert [float(g[0]) for g in gradients] == [-0.5, -0.5, 0.0]


@pytest.mark.parametrize("log_ratio", [21.0, 200.0, 800.0])
def test_huge_ratio_of_a_bad_sequence_is_pushed_down_with_a_finite_gradient(log_ratio: float) -> None:
    sequences = [np.zeros(1, np.float32)] * 3
    loss, gradients, _ = run(sequences, [0.0, 0.0, -log_ratio], [1.0, 1.0, -1.0], n=2)
    assert np.isfinite(loss)
    assert [float(g[0]) for g in gradients[:2]] == [-0.5, -0.5]
    assert float(gradients[2][0]) == pytest.approx(np.exp(LOG_RATIO_CEILING) / 2)


def test_long_sums_keep_their_digits() -> None:
    total = sum_sequences(torch.full((4096,), -0.37), torch.tensor([4096]))
    assert float(total) == pytest.approx(-1515.52, abs=1e-3)


@pytest.mark.parametrize(
    ("lengths", "num_behavior", "message"),
    [([2, 1], 2, "sums to 3"), ([4, 0], 2, "empty sequence"), ([4], 2, "2, 1 and 1 entries")],
)
def test_shapes_that_do_not_belong_together_are_refused(lengths: list[int], num_behavior: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gspo(
            torch.zeros(4),
            None,
            torch.zeros(num_behavior, dtype=torch.float64),
            torch.tensor(lengths),
            torch.ones(len(lengths), dtype=torch.float64),
            clip=FIXED,
            num_sequences=2,
        )


@pytest.mark.parametrize("advantage", [1.3, -0.7])
@pytest.mark.parametrize("log_ratio", [-0.2, -0.09, -0.05, 0.0, 0.05, 0.09, 0.2])
def test_calibrated_range_depends_on_each_sequences_length(advantage: float, log_ratio: float) -> None:
    """Against the reference with the range of each length: by value, gradient and count."""
    clip = ClipRange(LOW, HIGH, bias=0.004, spread=0.15, z=1.96)
    for length in (4, 16, 64):
        sequences = random_sequences([length])
        behavior = behavior_for(sequences, [log_ratio])
        loss, gradients, metrics = run(sequences, behavior, [advantage], clip=clip)
        low, high = reference.calibrated_range(LOW, HIGH, 0.004, 0.15, 1.96, length)
        values = [s.tolist() for s in sequences]
        assert loss == pytest.approx(reference.loss(values, behavior, [advantage], low, high), rel=1e-6)
        expected = reference.gradient(values, behavior, [advantage], low, high)
        np.testing.assert_allclose(gradients[0], expected[0], rtol=1e-5, atol=1e-9)
        clipped = log_ratio > np.log1p(high) if advantage > 0 else log_ratio < np.log1p(-low)
        assert metrics.num_clipped_positive + metrics.num_clipped_negative == int(clipped)
