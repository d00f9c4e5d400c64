"""From the ledger and the newest checkpoint to a policy at the current version.

Steps that were committed after the checkpoint are trained again from their recorded groups: on one CPU thread in
float32 that gives the same weights byte for byte. Where it does not (a GPU, other thread counts), the weights that come
out are the current version's from now on, in a new incarnation, and every worker loads them.
"""

import logging
from pathlib import Path
from typing import Protocol

from learner.checkpoint import find_checkpoint, load_checkpoint
from learner.optim import Optimizer
from learner.policy import Policy
from learner.publish import Publisher
from learner.redo import redo_step
from learner.report import step_metrics
from shared.config import Config
from shared.hub import MetricRow
from shared.metrics import as_row
from shared.records import Publication, RecordedStep, ResumePoint
from shared.schema import decode_group
from shared.spans import Recorder, Timing

_LOG = logging.getLogger(__name__)


class Hub(Protocol):
    """What recovery asks of the hub."""

    def recorded_step(self, step: int) -> RecordedStep: ...
    def replace_weights(self, weights_digest: str) -> int: ...
    def publish(self, publication: Publication) -> None: ...
    def log_metrics(self, row: MetricRow) -> None: ...


def recover(config: Config, checkpoints: Path, hub: Hub, point: ResumePoint) -> tuple[Policy, Optimizer, Publisher]:
    """Policy and optimizer at `point.version`, whose weights are published when this returns."""
    path = find_checkpoint(checkpoints, point.version)
    if path is None:
        policy, version = Policy.load(config), 0
        optimizer = Optimizer(policy, config)
    else:
        policy, optimizer, state = load_checkpoint(path, config)
        version = state.version
    publisher = Publisher(policy, config, point.incarnation)
    if point.version == 0:
        return policy, optimizer, publisher
    _LOG.info("version %d from %s, training steps %d to %d again", version, path, version, point.version - 1)
    for step in range(version, point.version):
        _redo(config, policy, optimizer, hub, step)
    last = hub.recorded_step(point.version - 1)
    groups = [decode_group(payload) for payload in last.groups]
    publication = publisher.next(point.version, groups, changed=True)
    if publisher.digest != last.weights_digest:
        _LOG.warning("these are not the weights of before (%s, now %s)", last.weights_digest, publisher.digest)
        publication = publisher.renew(hub.replace_weights(publisher.digest))
    hub.publish(publication)
    return policy, optimizer, publisher


def _redo(config: Config, policy: Policy, optimizer: Optimizer, hub: Hub, step: int) -> None:
    recorded = hub.recorded_step(step)
    with Recorder("learner").span("redo", step) as trained:
        result = redo_step(policy, optimizer, recorded, config)
    groups = [decode_group(payload) for payload in recorded.groups]
    timings = {"stepped": trained, "waited": Timing(), "trained": trained, "published": Timing()}
    hub.log_metrics(as_row(step_metrics(step, groups, result, **timings)))  # in case a kill came before it was logged
