"""From the ledger and the newest checkpoint to a policy at the current version.

Steps that were committed after the checkpoint are trained again from their recorded groups: on one CPU thread in
float32 that gives the same weights byte for byte. Where it does not (a GPU, other thread counts), the weights that come
out are the current version's from now on, in a new incarnation, and every worker loads them.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from learner.checkpoint import find_checkpoint, load_checkpoint
from learner.optim import Optimizer
from learner.policy import Policy
from learner.publish import Publisher
from learner.redo import redo_step
from learner.report import step_metrics
from learner.step import calibration_after
from shared.config import Config
from shared.hub import MetricRow
from shared.metrics import as_row
from shared.records import Calibration, Publication, RecordedStep, ResumePoint
from shared.schema import decode_group
from shared.spans import Recorder, Timing

_LOG = logging.getLogger(__name__)


class Hub(Protocol):
    """What recovery asks of the hub."""

    def recorded_step(self, step: int) -> RecordedStep: ...
    def replace_weights(self, weights_digest: str) -> int: ...
    def publish(self, publication: Publication) -> None: ...
    def log_metrics(self, row: MetricRow) -> None: ...


@dataclass(frozen=True)
class Recovered:
    """The state at the version where the learner goes on."""

    policy: Policy
    optimizer: Optimizer
    publisher: Publisher
    calibration: Calibration


def recover(config: Config, checkpoints: Path, hub: Hub, point: ResumePoint) -> Recovered:
    """The state at `point.version`, whose weights are published when this returns."""
    calibration = Calibration()
    path = find_checkpoint(checkpoints, point.version)
    if path is None:
        policy, version = Policy.load(config), 0
        optimizer = Optimizer(policy, config)
    else:
        policy, optimizer, state = load_checkpoint(path, config)
        version, calibration = state.version, state.calibration
    publisher = Publisher(policy, config, point.incarnation)
    if point.version == 0:
        return Recovered(policy, optimizer, publisher, calibration)
    _LOG.info("version %d from %s, training steps %d to %d again", version, path, version, point.version - 1)
    for step in range(version, point.version):
        calibration = _redo(config, policy, optimizer, hub, step)
    last = hub.recorded_step(point.version - 1)
    groups = [decode_group(payload) for payload in last.groups]
    publication = publisher.next(point.version, groups, changed=True)
    if publisher.digest != last.weights_digest:
        _LOG.warning("these are not the weights of before (%s, now %s)", last.weights_digest, publisher.digest)
        publication = publisher.renew(hub.replace_weights(publisher.digest))
    hub.publish(publication)
    return Recovered(policy, optimizer, publisher, calibration)


def _redo(config: Config, policy: Policy, optimizer: Optimizer, hub: Hub, step: int) -> Calibration:
    """Train the step again; the calibration that it leaves."""
    recorded = hub.recorded_step(step)
    with Recorder("learner").span("redo", step) as trained:
        result = redo_step(policy, optimizer, recorded, config)
    groups = [decode_group(payload) for payload in recorded.groups]
    timings = {"stepped": trained, "waited": Timing(), "trained": trained, "published": Timing()}
    # In case a kill came before it was logged.
    hub.log_metrics(as_row(step_metrics(recorded.plan, groups, result, unmet_experts=None, **timings)))
    return calibration_after(recorded.plan, result, config)
