"""The learner service: `python -m learner.main --config run/config.json --address HOST:PORT`.

The loop: take the step's groups, train on the engine's own likelihoods, commit, publish the new weights.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from learner.optim import Optimizer
from learner.policy import Policy
from learner.publish import Publisher
from learner.report import step_metrics
from learner.step import train_step
from shared.config import Config
from shared.hub_client import LearnerHubClient, connect
from shared.metrics import as_row
from shared.records import Group, StepPlan
from shared.schema import decode_group
from shared.seeds import derive_seed
from shared.service import run_service
from shared.spans import Recorder


def run_learner(config: Config, run_directory: Path) -> None:
    """Train `learner.steps` steps and save the final weights to `checkpoints/final`."""
    torch.set_num_threads(config.learner.threads)
    hub = LearnerHubClient(connect(config.run.name))
    recorder = Recorder("learner")
    policy = Policy.load(config)
    optimizer = Optimizer(policy, config)
    publisher = Publisher(policy, config)
    for step in range(config.learner.steps):
        with recorder.span("step", step) as stepped:
            with recorder.span("wait", step) as waited:
                payloads = hub.take(step)
            with recorder.span("train", step) as trained:
                groups = [decode_group(payload) for payload in payloads]
                plan = step_plan(config, step, groups)
                hub.begin_step(plan)
                result = train_step(policy, optimizer, groups, plan, config)
            with recorder.span("publish", step) as published:
                publication = publisher.next(step + 1, groups, changed=result.num_updates > 0)
                hub.commit_step(step, publisher.digest)
                hub.publish(publication)
        timings = {"stepped": stepped, "waited": waited, "trained": trained, "published": published}
        hub.log_metrics(as_row(step_metrics(step, groups, result, **timings)))
        hub.report(recorder.take())
    policy.save(run_directory / "checkpoints" / "final")
    hub.wait_finished()  # the workers fetch the last weights from this process


def step_plan(config: Config, step: int, groups: Sequence[Group]) -> StepPlan:
    """All that decides what step `step` does with its groups; durable before the first forward."""
    return StepPlan(
        step=step,
        groups=tuple(group.group for group in groups),
        minibatch_seed=derive_seed(config.run.seed, "minibatches", step),
        clip_low=config.learner.clip_low,
        clip_high=config.learner.clip_high,
    )


def main(arguments: list[str]) -> int:
    return run_service("learner", run_learner, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
