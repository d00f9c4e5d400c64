"""Schedule, clipping, and never an update on a gradient that is not finite."""

import math
from collections.abc import Callable

import pytest
import torch

from learner.optim import Optimizer, lr_at
from shared.config import Config
from shared.errors import ConfigError


def rates(schedule: str, warmup_updates: int = 2, total_updates: int = 6) -> list[float]:
    return [
        lr_at(u, lr=1.0, warmup_updates=warmup_updates, schedule=schedule, total_updates=total_updates)
        for u in range(total_updates)
    ]


def test_schedules() -> None:
    assert rates("constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates("constant", warmup_updates=0) == [1] * 6
    assert rates("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    half = math.sqrt(0.5) / 2
    assert rates("cosine") == pytest.approx([0.5, 1, 1, 0.5 + half, 0.5, 0.5 - half])
    assert lr_at(99, lr=1.0, warmup_updates=0, schedule="linear", total_updates=6) == 0.0
    with pytest.raises(ConfigError, match=r"learner\.schedule"):
        rates("exponential")


def make(make_config: Callable[..., Config], **learner: object) -> tuple[torch.nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, Optimizer(model, make_config(learner={"lr": 0.1, "prompts_per_step": 2, "minibatches": 1} | learner))


def set_gradients(model: torch.nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_norm_is_measured_before_clipping(make_config: Callable[..., Config]) -> None:
    model, optimizer = make(make_config, max_grad_norm=0.5)
    seen: list[float] = []
    optimizer._adamw.register_step_pre_hook(
        lambda *_: seen.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())))
    )
    set_gradients(model, 3.0)
    result = optimizer.update()
    assert result.applied
    assert result.grad_norm == pytest.approx(3.0 * math.sqrt(8))
    assert seen == [pytest.approx(0.5, rel=1e-4)]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradient_that_is_not_finite_changes_nothing(make_config: Callable[..., Config], bad: float) -> None:
    model, optimizer = make(make_config, warmup_updates=4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    set_gradients(model, 1.0)
    model.bias.grad[0] = bad
    result = optimizer.update()
    assert not result.applied
    assert optimizer.num_updates == 0
    assert optimizer.state_tensors() == {}
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    set_gradients(model, 1.0)
    assert optimizer.update().lr == pytest.approx(0.1 / 4)  # the schedule did not move either


def test_restored_state_continues_exactly(make_config: Callable[..., Config]) -> None:
    def run(num_updates: int, model: torch.nn.Module, optimizer: Optimizer) -> None:
        for _ in range(num_updates):
            set_gradients(model, 0.3 * (optimizer.num_updates + 1))
            optimizer.update()

    straight, optimizer = make(make_config, schedule="linear")
    run(2, straight, optimizer)
    saved = {name: value.clone() for name, value in optimizer.state_tensors().items()}
    weights = {name: value.clone() for name, value in straight.state_dict().items()}
    run(1, straight, optimizer)

    resumed, restored = make(make_config, schedule="linear")
    resumed.load_state_dict(weights)
    restored.load_state_tensors(saved, num_updates=2)
    run(1, resumed, restored)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    with pytest.raises(ValueError, match="belongs to no parameter"):
        restored.load_state_tensors({"other.weight/step": torch.zeros(())}, num_updates=1)


def test_only_matrices_decay(make_config: Callable[..., Config]) -> None:
    model, optimizer = make(make_config, weight_decay=0.5)
    bias, weight = model.bias.detach().clone(), model.weight.detach().clone()
    set_gradients(model, 0.0)
    optimizer.update()
    assert torch.equal(model.bias, bias)
    torch.testing.assert_close(model.weight.detach(), weight * (1 - 0.1 * 0.5))
