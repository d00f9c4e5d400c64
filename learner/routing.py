"""Which experts of a Mixture-of-Experts model a forward pass went through. Nothing for a dense model.

transformers 5 routes in modules whose class is named `...TopKRouter` and that return (logits, weights, experts), the
experts as [tokens, k] in row order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


class ExpertCount:
    """For each router of a model, which of its experts were chosen so far."""

    def __init__(self, routers: dict[str, Any]) -> None:
        self._met = {name: torch.zeros(module.num_experts, dtype=torch.bool) for name, module in routers.items()}
        self.real_tokens: Tensor | None = None  # bool, of the rows of the next forward pass; padding is no meeting

    def add(self, name: str, experts_TK: Tensor) -> None:
        chosen = (
            experts_TK if self.real_tokens is None else experts_TK[self.real_tokens.flatten().to(experts_TK.device)]
        )
        self._met[name][chosen.flatten().unique().cpu()] = True

    @property
    def num_unmet(self) -> int:
        """Experts, over all layers, that no token was routed to."""
        return sum(int((~met).sum()) for met in self._met.values())

    @property
    def num_experts(self) -> int:
        return sum(len(met) for met in self._met.values())


@contextmanager
def experts_counted(model: PreTrainedModel) -> Iterator[ExpertCount]:
    """Count the experts that forward passes inside this block choose."""
    routers = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("TopKRouter")}
    count = ExpertCount(routers)

    def counter(name: str) -> Any:
        return lambda module, inputs, outputs: count.add(name, outputs[2].detach())

    hooks = [module.register_forward_hook(counter(name)) for name, module in routers.items()]
    try:
        yield count
    finally:
        for hook in hooks:
            hook.remove()
