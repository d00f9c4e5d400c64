"""A learner that ends itself by SIGKILL at a point of a step: `python -m killed_learner POINT STEP --config ...`.

What is patched runs up to that point as it is; the next learner is an ordinary one.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import learner.checkpoint
import learner.main
from learner.optim import Optimizer
from shared.hub_client import LearnerHubClient


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: Any, name: str, is_the_moment: Callable[..., bool]) -> None:
    """Die when `owner.name` is called with arguments that `is_the_moment` is true for."""
    original = getattr(owner, name)

    def patched(*arguments: Any, **named: Any) -> Any:
        if is_the_moment(*arguments, **named):
            _die()
        return original(*arguments, **named)

    setattr(owner, name, patched)


def _count_updates(moment: int) -> Callable[..., bool]:
    return lambda optimizer: optimizer.num_updates == moment


def die_at(point: str, at: int) -> None:
    """Patch this process. Two mini-batches a step, each with an update."""
    if point == "before_begin":
        _before(LearnerHubClient, "begin_step", lambda hub, plan: plan.step == at)
    elif point == "after_begin":
        _before(learner.main, "train_step", lambda policy, optimizer, groups, plan, config: plan.step == at)
    elif point == "between_minibatches":
        _before(Optimizer, "update", _count_updates(2 * at + 1))
    elif point == "before_commit":
        _before(LearnerHubClient, "commit_step", lambda hub, step, digest: step == at)
    elif point == "after_commit":
        _before(LearnerHubClient, "publish", lambda hub, publication: publication.manifest.version == at + 1)
    elif point == "before_log":
        _before(LearnerHubClient, "log_metrics", lambda hub, row: row["step"] == at)
    elif point == "in_checkpoint":  # the model is written, the optimizer's state is not
        _before(learner.checkpoint, "save_file", lambda tensors, path: f"step-{at + 1:06d}" in str(path))
    else:
        raise ValueError(point)


if __name__ == "__main__":
    die_at(sys.argv[1], int(sys.argv[2]))
    sys.exit(learner.main.main(sys.argv[3:]))
