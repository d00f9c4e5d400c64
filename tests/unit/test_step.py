"""A learner step on a tiny real model: what is trained, what is left out, and that the split does not matter."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import plan_for, tiny_config, tiny_group, tiny_policy

from learner.optim import FLOAT16_LOSS_SCALE, Optimizer
from learner.packing import pack
from learner.policy import Policy
from learner.step import StepResult, train_step
from shared.errors import HubError
from shared.records import Group

MIXED: list[float | None] = [1.0, 0.0, 0.0, 1.0]


class Run:
    """One step on a fresh copy of the same weights; keeps the gradient that reached the optimizer."""

    def __init__(self, path: Path, groups: list[Group], kind: str = "dense", **learner: Any) -> None:
        policy, config = tiny_policy(path, kind, prompts_per_step=len(groups), **learner)
        self.before = weights(policy)
        optimizer = Optimizer(policy, config)
        self.gradients: list[dict[str, torch.Tensor]] = []
        update = optimizer.update

        def spy() -> Any:
            self.gradients.append({n: p.grad.clone() for n, p in policy.named_parameters()})
            return update()

        optimizer.update = spy  # type: ignore[method-assign]
        self.policy, self.optimizer = policy, optimizer
        self.result: StepResult = train_step(policy, optimizer, groups, plan_for(groups), config)

    @property
    def moved(self) -> bool:
        after = weights(self.policy)
        return any(not torch.equal(after[name], value) for name, value in self.before.items())


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize(("budget", "chunk_tokens", "shares_prompts"), [(16, 256, True), (40, 3, True), (90, 7, False)])
def test_any_micro_batch_split_gives_the_same_loss_and_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, budget: int, chunk_tokens: int, shares_prompts: bool
) -> None:
    groups = [tiny_group(i, MIXED) for i in range(3)]
    whole = Run(tmp_path / "whole", groups, kind)
    if not shares_prompts:
        monkeypatch.setattr("learner.policy.can_share_prompts", lambda model: False)
    split = Run(tmp_path / "split", groups, kind, micro_batch_tokens=budget, logprob_chunk_tokens=chunk_tokens)
    ours, theirs = split.result.minibatches[0], whole.result.minibatches[0]
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
    assert ours.metrics.num_tokens == theirs.metrics.num_tokens
    assert ours.metrics.sum_log_ratio == pytest.approx(theirs.metrics.sum_log_ratio, abs=1e-5)
    for name, gradient in whole.gradients[0].items():
        torch.testing.assert_close(split.gradients[0][name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_order_of_groups_does_not_change_the_gradient(tmp_path: Path) -> None:
    groups = [tiny_group(i, MIXED) for i in range(3)]
    forward, backward = Run(tmp_path / "a", groups), Run(tmp_path / "b", groups[::-1])
    for name, gradient in forward.gradients[0].items():
        torch.testing.assert_close(backward.gradients[0][name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_each_trained_token_goes_forward_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [tiny_group(0, MIXED, [3, 1, 8, 4]), tiny_group(1, [1.0] * 4, [2, 2, 5, 1])]
    for group in groups:  # token ids that say which completion they belong to
        for member, rollout in enumerate(group.rollouts):
            rollout.completion_ids[:] = 10 + 4 * group.group.number + member
        group.prompt_ids[:] = 1
    seen: list[int] = []

    def count(module: torch.nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        seen.extend(keywords["input_ids"].flatten().tolist())

    load = Policy.load

    def load_with_hook(config: Any) -> Policy:
        policy = load(config)
        policy.model.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
        return policy

    monkeypatch.setattr(Policy, "load", load_with_hook)
    Run(tmp_path, groups, minibatches=2, micro_batch_tokens=24)
    assert [seen.count(10 + i) for i in range(8)] == [3, 1, 8, 4, 2, 2, 5, 1]


def test_unscored_and_empty_rollouts_are_out_and_counted(tmp_path: Path) -> None:
    full = tiny_group(0, [1.0, None, 0.0, 0.0], [3, 4, 0, 5])
    run = Run(tmp_path / "a", [full])
    result = run.result
    assert (result.num_unscored, result.num_empty, result.num_updates) == (1, 1, 1)
    assert result.metrics.num_sequences == 2
    assert result.num_tokens == 8
    # The advantages come from the three scored ones, the denominator from the two that have tokens.
    advantage = (1 - 1 / 3) / np.std([1, 0, 0], ddof=1)
    assert result.metrics.num_positive == 1
    assert result.minibatches[0].loss == pytest.approx(expected_loss(run, full, [advantage, -advantage / 2]), abs=1e-6)


def expected_loss(run: Run, group: Group, advantages: list[float]) -> float:
    """Equation 5 over the group's trained rollouts, from the model's own full logits before the update."""
    model = run.policy.model
    model.load_state_dict(run.before, strict=False)
    total = 0.0
    for rollout, advantage in zip((group.rollouts[0], group.rollouts[3]), advantages, strict=True):
        ids = torch.from_numpy(np.concatenate([group.prompt_ids, rollout.completion_ids])).long()
        table = torch.log_softmax(model(input_ids=ids[None]).logits[0].double(), dim=-1).detach()
        first = len(group.prompt_ids)
        loglik = sum(float(table[t - 1, ids[t]]) for t in range(first, len(ids)))
        s = np.exp((loglik - rollout.seq_loglik) / rollout.num_tokens)
        total += min(s * advantage, np.clip(s, 0.8, 1.27) * advantage)
    return -total / 2


@pytest.mark.parametrize(
    "groups",
    [
        [tiny_group(0, [1.0] * 4), tiny_group(1, [0.0] * 4)],
        [tiny_group(0, [None] * 4), tiny_group(1, [0.5], [0])],
    ],
)
def test_step_with_nothing_to_learn_says_so_and_moves_nothing(tmp_path: Path, groups: list[Group]) -> None:
    run = Run(tmp_path, groups, minibatches=2, weight_decay=0.1)
    assert run.result.num_updates == 0
    assert [m.outcome for m in run.result.minibatches] == ["no_signal", "no_signal"]
    assert run.result.num_zero_advantage == run.result.metrics.num_sequences
    assert run.result.metrics.clip_fraction is None
    assert not run.moved
    assert run.gradients == []


def test_only_the_minibatch_with_a_signal_updates(tmp_path: Path) -> None:
    run = Run(tmp_path, [tiny_group(0, MIXED), tiny_group(1, [1.0] * 4)], minibatches=2)
    assert sorted(m.outcome for m in run.result.minibatches) == ["no_signal", "updated"]
    assert (run.result.num_updates, run.result.num_zero_advantage) == (1, 4)
    assert run.moved


def test_zero_advantage_sequences_stay_in_the_denominator(tmp_path: Path) -> None:
    signal, flat = tiny_group(0, MIXED), tiny_group(1, [1.0] * 4)
    alone, both = Run(tmp_path / "a", [signal]), Run(tmp_path / "b", [signal, flat])
    for name, gradient in alone.gradients[0].items():
        torch.testing.assert_close(both.gradients[0][name], gradient / 2, atol=1e-6, rtol=1e-5, msg=name)


def test_gradient_that_is_not_finite_is_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Policy.completion_logprobs
    monkeypatch.setattr(Policy, "completion_logprobs", lambda *arguments: whole(*arguments) * torch.nan)
    run = Run(tmp_path, [tiny_group(0, MIXED)])
    assert (run.result.num_non_finite, run.result.num_updates) == (1, 0)
    assert not run.moved


def test_sequence_payload_trains_the_same(tmp_path: Path) -> None:
    with_tokens = Run(tmp_path / "a", [tiny_group(0, MIXED)])
    without = Run(tmp_path / "b", [tiny_group(0, MIXED, with_logprobs=False)])
    assert with_tokens.result.minibatches == without.result.minibatches


def test_activation_checkpointing_trains_the_same(tmp_path: Path) -> None:
    groups = [tiny_group(0, MIXED)]
    plain, recomputed = Run(tmp_path / "a", groups), Run(tmp_path / "b", groups, activation_checkpointing=True)
    for name, gradient in plain.gradients[0].items():
        torch.testing.assert_close(recomputed.gradients[0][name], gradient, msg=name)


def test_later_minibatches_start_from_updated_weights(tmp_path: Path) -> None:
    group = tiny_group(0, MIXED)
    twin = Group(**(vars(group) | {"group": tiny_group(1, MIXED).group}))
    first, second = Run(tmp_path, [group, twin], minibatches=2).result.minibatches
    assert first.metrics.sum_log_ratio != second.metrics.sum_log_ratio


def test_groups_that_are_not_the_plans_are_refused(tmp_path: Path) -> None:
    groups = [tiny_group(0, MIXED), tiny_group(1, MIXED)]
    policy, config = tiny_policy(tmp_path)
    with pytest.raises(HubError, match="not the plan's"):
        train_step(policy, Optimizer(policy, config), groups[::-1], plan_for(groups), config)


def test_mixed_temperatures_are_refused(tmp_path: Path) -> None:
    groups = [tiny_group(0, MIXED), tiny_group(1, MIXED, temperature=0.5)]
    policy, config = tiny_policy(tmp_path)
    with pytest.raises(ValueError, match=r"\[0.5, 1.0\]"):
        train_step(policy, Optimizer(policy, config), groups, plan_for(groups), config)


def test_the_recompute_anchor_is_the_weights_that_the_step_started_from(tmp_path: Path) -> None:
    """Whatever the engine said, the first mini-batch has ratio 1; the second shows the step's own update."""
    groups = [tiny_group(i, MIXED) for i in range(4)]
    engine = Run(tmp_path / "engine", groups, minibatches=2)
    anchored = Run(tmp_path / "anchored", groups, minibatches=2, anchor="recompute", lr=0.05)
    first, second = (m.metrics for m in anchored.result.minibatches)
    assert first.max_abs_log_ratio < 1e-6 < 1e-4 < second.max_abs_log_ratio
    assert engine.result.minibatches[0].metrics.max_abs_log_ratio > 0.01
    assert anchored.result.anchor_s > 0.0 == engine.result.anchor_s


def test_the_first_mini_batch_is_kept_with_the_log_probabilities_before_any_update(tmp_path: Path) -> None:
    groups = [tiny_group(i, MIXED) for i in range(4)]
    run = Run(tmp_path, groups, minibatches=2, lr=0.1)
    assert len(run.result.first) == 8
    assert {s.advantage > 0 for s in run.result.first} == {True, False}
    fresh, _ = tiny_policy(tmp_path / "again")
    by_ids = {r.completion_ids.tobytes(): (g, r) for g in groups for r in g.rollouts}
    for scored in run.result.first:
        group, rollout = by_ids[scored.rollout.completion_ids.tobytes()]
        batch = pack([(group.prompt_ids, rollout.completion_ids)], 64, share_prompts=False)[0]
        expected = fresh.completion_logprobs(batch, 1.0, 8).detach()
        np.testing.assert_allclose(scored.logprobs_T, expected, atol=1e-5)


def test_float16_trains_with_a_scaled_loss_and_halves_it_when_it_overflows(tmp_path: Path) -> None:
    groups = [tiny_group(i, MIXED) for i in range(2)]
    run = Run(tmp_path / "half", groups, precision="float16")
    full = Run(tmp_path / "full", groups)
    assert run.moved
    ours = {name: g / FLOAT16_LOSS_SCALE for name, g in run.gradients[0].items()}
    for name, gradient in full.gradients[0].items():
        torch.testing.assert_close(ours[name], gradient, atol=0.02 * float(gradient.abs().max()) + 1e-6, rtol=0.05)
    for parameter in run.policy.model.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    assert not run.optimizer.__class__.update(run.optimizer).applied
    assert run.optimizer.loss_scale == FLOAT16_LOSS_SCALE / 2
    again = Optimizer(run.policy, tiny_config(tmp_path / "half", precision="float16"))
    again.load_state_tensors(run.optimizer.state_tensors(), 1)
    assert again.loss_scale == FLOAT16_LOSS_SCALE / 2
