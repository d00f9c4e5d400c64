"""Where the run's hub is: starting it as a detached Ray actor, and finding it again.

The hub outlives whoever started it. When its process is killed, Ray starts it again on the same node, which holds the
run directory; `hub.lock` there keeps two hubs of two clusters from working on one ledger.
"""

import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shared.config import Config
from shared.errors import ConfigError, HubError
from shared.hub import POLL_S, Hub
from shared.locks import FileLock
from shared.run_files import read_run_id

HUB_NAME = "hub"
_MAX_CONCURRENCY = 1000  # calls that may wait at once: two long polls a worker
_START_TIMEOUT_S = 60.0
_LOCK_WAIT_S = 20.0  # a predecessor whose cluster was killed may take a moment to end
_LOOK_AGAIN_S = 0.2


class HubActor(Hub):
    """The hub in a process of its own, which holds the run directory's hub.lock."""

    def __init__(self, config: Config, run_directory: Path, poll_s: float) -> None:
        self._lock = FileLock(run_directory / "hub.lock", wait_s=_LOCK_WAIT_S)
        self._lock.acquire()
        super().__init__(config, run_directory, poll_s)


def start_hub(config: Config, run_directory: Path, poll_s: float = POLL_S) -> Any:
    """The run's hub, made on this node if this Ray cluster has none; this node must hold the run directory.

    One that was started with another config (a run that is resumed for more steps) is replaced. Namespace is the run's
    name. Ray must be connected. HubError when it does not start, with the cause; ConfigError when another run of this
    name is in the cluster.
    """
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        hub = find_hub(config.run.name) or _create_hub(config, run_directory, poll_s)
        try:
            run_id, started_with = ray.get(hub.config.remote(), timeout=_START_TIMEOUT_S)
            if run_id != read_run_id(run_directory):
                raise ConfigError(
                    f"run.name = {config.run.name!r} is taken in this Ray cluster by a run in another folder. Choose "
                    f"another name, or end that run by `seqrelay stop`."
                )
            if started_with == config:
                return hub
            ray.kill(hub, no_restart=True)  # its name is free a moment later
        except RayError as error:  # it could not start, or it is being restarted, or its node died: then for 15 s
            if time.monotonic() > deadline_s or _failed_to_start(error):
                raise HubError(
                    f"the hub of run {config.run.name!r} did not start in {run_directory}: {error}"
                ) from error
        time.sleep(_LOOK_AGAIN_S)


def find_hub(namespace: str) -> Any | None:
    """The handle of the run's hub; None when there is none in this cluster (yet)."""
    try:
        return ray.get_actor(HUB_NAME, namespace=namespace)
    except ValueError:
        return None


def connect(namespace: str, timeout_s: float = 60.0) -> Any:
    """The handle of the run's hub, waiting until it exists. HubError after `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    while (hub := find_hub(namespace)) is None:
        if time.monotonic() >= deadline_s:
            raise HubError(
                f"no hub of run {namespace!r} in this Ray cluster after {timeout_s:g} s; "
                f"check run.name and the cluster's address, and that the run was started"
            )
        time.sleep(_LOOK_AGAIN_S)
    return hub


def _create_hub(config: Config, run_directory: Path, poll_s: float) -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(HubActor).options(
        name=HUB_NAME,
        namespace=config.run.name,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=_MAX_CONCURRENCY,
        scheduling_strategy=here,
    )
    return actor.remote(config, run_directory.resolve(), poll_s)


def _failed_to_start(error: RayError) -> bool:
    """Whether the hub's own constructor raised: it would again."""
    return isinstance(error, ActorDiedError) and "creation task" in str(error)
