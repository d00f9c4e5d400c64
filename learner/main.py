"""The learner service: `python -m learner.main --config run/config.json --address HOST:PORT`.

The loop: take the step's groups, train on the engine's own likelihoods, commit, publish the new weights. It starts
where the ledger says (learner.recover), and writes checkpoints on its way, when it is stopped, and at the end.
"""

import sys
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path

import torch

from learner.attribution import measured_by_worker
from learner.calibration import clip_range, with_probes
from learner.checkpoint import export_final, save_checkpoint
from learner.recover import Recovered, recover
from learner.report import step_metrics
from learner.sampling_check import calibrated, sampling_reports
from learner.step import calibration_after, train_step
from shared.config import Config
from shared.hub_client import LearnerHubClient
from shared.hub_start import start_hub
from shared.identity import identity_of
from shared.locks import FileLock
from shared.metrics import as_row
from shared.records import Calibration, Group, MismatchReport, StepPlan
from shared.run_directory import LEARNER_LOCK
from shared.schema import decode_group
from shared.seeds import derive_seed
from shared.service import run_service
from shared.spans import Recorder
from shared.stopping import StopRequest

_LOCK_WAIT_S = 5.0  # a predecessor that was killed together with its parent may take a moment to end


def run_learner(config: Config, run_directory: Path, stop: StopRequest) -> bool:
    """Train up to `learner.steps` steps: True once the run is finished, with the final weights in `checkpoints/final`.

    False when stopped before, after the step that was begun; a checkpoint of it is written. LockHeld when another
    learner trains in this run directory.
    """
    torch.set_num_threads(config.learner.threads)
    with FileLock(run_directory / LEARNER_LOCK, wait_s=_LOCK_WAIT_S):
        hub = LearnerHubClient(config.run.name, start_hub(config, run_directory), stop)
        with hub.seated(identity_of(config)) as point:
            checkpoints = run_directory / "checkpoints"
            learner = Learner(config, checkpoints, hub, point.version, recover(config, checkpoints, hub, point))
            plan = point.begun
            while learner.version < config.learner.steps and learner.step(plan):
                plan = None
            return learner.finish()


@dataclass
class Learner:
    """The policy's state and what surrounds it; `version` is the number of steps it was trained."""

    config: Config
    checkpoints: Path
    hub: LearnerHubClient
    version: int
    state: InitVar[Recovered]
    recorder: Recorder = field(default_factory=lambda: Recorder("learner"))

    def __post_init__(self, state: Recovered) -> None:
        self.policy, self.optimizer = state.policy, state.optimizer
        self.publisher, self.calibration = state.publisher, state.calibration

    def step(self, begun: StepPlan | None) -> bool:
        """Train the next step, by the plan it was `begun` with before, if any. False when asked to stop instead."""
        step, hub, recorder = self.version, self.hub, self.recorder
        with recorder.span("step", step) as stepped:
            with recorder.span("wait", step) as waited:
                payloads = hub.take(step)
            if payloads is None:
                return False
            with recorder.span("train", step) as trained:
                groups = [decode_group(payload) for payload in payloads]
                plan = begun or self.plan(groups)
                hub.begin_step(plan)
                result = train_step(self.policy, self.optimizer, groups, plan, self.config)
            with recorder.span("publish", step) as published:
                publication = self.publisher.next(step + 1, groups, changed=result.num_updates > 0)
                hub.commit_step(step, self.publisher.digest)
                hub.publish(publication)
        self.version = step + 1
        self.calibration = calibration_after(plan, result, self.config)
        timings = {"stepped": stepped, "waited": waited, "trained": trained, "published": published}
        hub.log_metrics(
            as_row(step_metrics(plan, groups, result, unmet_experts=self.publisher.num_unmet_experts, **timings))
        )
        if self.version % self.config.learner.checkpoint_steps == 0:
            self.save()
        by_worker = measured_by_worker(result.first, step)
        hub.report([*recorder.take(), *(MismatchReport(worker_id, step, m) for worker_id, m in by_worker.items())])
        return True

    def plan(self, groups: Sequence[Group]) -> StepPlan:
        """What the next step is to do with these groups. Before step 0 they pass the sampling check, or RunFailed."""
        calibration = self.calibration
        if self.version == 0:
            with self.recorder.span("check", 0):
                reports = sampling_reports(self.policy, groups, self.config, version=0)
            self.hub.report(reports)
            calibration = calibrated(reports, calibration, self.config.sampling.temperature)
        calibration = with_probes(calibration, self.hub.probes(calibration.probe_version + 1))
        return step_plan(self.config, self.version, groups, calibration)

    def save(self) -> Path:
        """Write a checkpoint of the current version, unless there is one."""
        with self.recorder.span("checkpoint", self.version):
            return save_checkpoint(
                self.checkpoints,
                self.policy,
                self.optimizer,
                version=self.version,
                weights_digest=self.publisher.digest,
                calibration=self.calibration,
                keep=self.config.learner.keep_checkpoints,
            )

    def finish(self) -> bool:
        """Write the last checkpoint, and `final` if all steps are trained; then True once the workers are done too."""
        if self.version == 0:
            return False
        checkpoint = self.save()
        self.hub.report(self.recorder.take())
        if self.version < self.config.learner.steps:
            return False
        export_final(checkpoint, self.checkpoints / "final")
        return self.hub.wait_finished()  # the workers fetch the last weights from this process


def step_plan(config: Config, step: int, groups: Sequence[Group], calibration: Calibration) -> StepPlan:
    """All that decides what step `step` does with its groups; durable before the first forward."""
    return StepPlan(
        step=step,
        groups=tuple(group.group for group in groups),
        minibatch_seed=derive_seed(config.run.seed, "minibatches", step),
        clip=clip_range(config.clip, calibration),
        calibration=calibration,
    )


def main(arguments: list[str]) -> int:
    return run_service("learner", run_learner, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
