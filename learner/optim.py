"""AdamW over float32 master weights, gradient clipping, the learning-rate schedule, and the loss scale of float16.

Never trains on a gradient that is not finite: such an update is skipped, reported, and leaves weights, moments and
schedule as they were.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.policy import Policy
from shared.config import Config
from shared.errors import ConfigError

# Gradients of activations pass through float16, which has no value between 0 and 6e-8: the loss is multiplied by this.
FLOAT16_LOSS_SCALE = 4096.0
_LOSS_SCALE = "loss_scale"


@dataclass(frozen=True)
class UpdateResult:
    """`grad_norm`: L2 norm over all parameters before clipping. `applied`: False when it was not finite."""

    grad_norm: float
    lr: float
    applied: bool


def lr_at(update: int, *, lr: float, warmup_updates: int, schedule: str, total_updates: int) -> float:
    """Learning rate of update number `update` (from 0).

    Linear warm-up, lr (update + 1) / warmup_updates, then with p = the share of the remaining updates already made:
    constant: lr; linear: lr (1 - p); cosine: lr (1 + cos(pi p)) / 2. With lr 1, 2 warm-up updates of 6 and "linear":
    0.5, 1, 1, 0.75, 0.5, 0.25.
    """
    if update < warmup_updates:
        return lr * (update + 1) / warmup_updates
    progress = min(1.0, (update - warmup_updates) / max(1, total_updates - warmup_updates))
    if schedule == "constant":
        return lr
    if schedule == "linear":
        return lr * (1.0 - progress)
    if schedule == "cosine":
        return lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ConfigError(f"learner.schedule = {schedule!r}: use constant, linear or cosine.")


class Optimizer:
    """AdamW with clipping and schedule. `num_updates` counts applied updates and drives the schedule.

    Losses are to be multiplied by `loss_scale` before they are propagated: 1 but in float16, where it is halved each
    time that a gradient is not finite.
    """

    def __init__(self, policy: Policy, config: Config) -> None:
        self._parameters = dict(policy.named_parameters())
        self._config = config.learner
        self._total_updates = config.learner.steps * config.learner.minibatches
        self.num_updates = 0
        self.loss_scale = FLOAT16_LOSS_SCALE if config.model.mode.autocast == "float16" else 1.0
        # Norm gains and biases (one-dimensional) are not decayed.
        matrices = [p for p in self._parameters.values() if p.ndim > 1]
        vectors = [p for p in self._parameters.values() if p.ndim <= 1]
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((matrices, config.learner.weight_decay), (vectors, 0.0))
            if params
        ]
        self._adamw = torch.optim.AdamW(groups, lr=config.learner.lr, fused=True)

    def update(self) -> UpdateResult:
        """Apply the accumulated gradients, clipped to `max_grad_norm`, unless they are not finite; clear them."""
        config = self._config
        lr = lr_at(
            self.num_updates,
            lr=config.lr,
            warmup_updates=config.warmup_updates,
            schedule=config.schedule,
            total_updates=self._total_updates,
        )
        parameters = [p for p in self._parameters.values() if p.grad is not None]
        if self.loss_scale != 1.0:
            torch._foreach_div_([p.grad for p in parameters if p.grad is not None], self.loss_scale)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        applied = bool(torch.isfinite(norm))
        if applied:
            torch.nn.utils.clip_grads_with_norm_(parameters, config.max_grad_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self.num_updates += 1
        else:
            self.loss_scale = max(1.0, self.loss_scale / 2)
        self.clear_gradients()
        return UpdateResult(float(norm), lr, applied)

    def clear_gradients(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments and step counts as "<parameter name>/<key>", and the loss scale, for a safetensors checkpoint."""
        state = self._adamw.state
        tensors = {f"{name}/{key}": value for name, p in self._parameters.items() for key, value in state[p].items()}
        return tensors | ({_LOSS_SCALE: torch.tensor(self.loss_scale)} if self.loss_scale != 1.0 else {})

    def load_state_tensors(self, tensors: dict[str, Tensor], num_updates: int) -> None:
        """Restore `state_tensors` and the number of updates. ValueError when a tensor belongs to no parameter."""
        self._adamw.state.clear()
        self.loss_scale = float(tensors.get(_LOSS_SCALE, 1.0))
        for full_name, value in tensors.items():
            if full_name == _LOSS_SCALE:
                continue
            name, _, key = full_name.rpartition("/")
            if name not in self._parameters:
                raise ValueError(f"optimizer state {full_name!r} belongs to no parameter: it is of another model")
            parameter = self._parameters[name]
            # AdamW keeps its step counters on the parameter's device when fused.
            self._adamw.state[parameter][key] = value.to(parameter.device).clone()
        self.num_updates = num_updates
