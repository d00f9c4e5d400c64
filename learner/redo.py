"""Training a committed step again, for recovery and for replay.

A step is decided by its plan, its groups' bytes and the state before it, so the same state gives the same weights: byte
for byte in float32 on one CPU thread. `learner.publish.published_digest` says whether it did.
"""

from learner.optim import Optimizer
from learner.policy import Policy
from learner.step import StepResult, train_step
from shared.config import Config
from shared.records import RecordedStep
from shared.schema import decode_group


def redo_step(policy: Policy, optimizer: Optimizer, recorded: RecordedStep, config: Config) -> StepResult:
    """Train `policy`, which is at version `recorded.plan.step`, in place by the recorded plan on the recorded groups.

    SchemaError when a group cannot be read, HubError when the groups are not the plan's.
    """
    groups = [decode_group(payload) for payload in recorded.groups]
    return train_step(policy, optimizer, groups, recorded.plan, config)
