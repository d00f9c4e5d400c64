"""The rollout service's workers: starts each as a Ray actor, replaces those that die, ends all of them.

A worker whose process or engine died, or whose weights were refused twice, is replaced as long as the run goes on in
between; any other error of a worker is a fault of the run and ends the service. Gate: whatever a worker held is back
with the hub before its successor starts.
"""

import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shared.config import Config
from shared.errors import EngineDied, HubError, WeightSyncError
from shared.hub_client import HubLine, call
from shared.hub_start import find_hub
from shared.protocols import Engine
from shared.stopping import StopRequest

_LOG = logging.getLogger(__name__)
_POLL_S = 0.5
_CLOSE_S = 15.0  # an engine's processes need 2 to 3 s to clean up
_MAX_DEATHS = 3  # of workers of one service that died young, without any group made in between
_YOUNG_S = 60.0  # after it joined

# The user's own settings in this terminal count, also where the cluster was started from another one.
_PASSED_ON = ("CUDA_", "VLLM_", "HF_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "TOKENIZERS_", "SEQRELAY_", "TMPDIR")

EngineFactory = Callable[[Config, int], Awaitable[Engine]]


@dataclass(frozen=True)
class _Member:
    worker_id: str
    actor: Any
    ended: Any  # the reference of its `run`


class Crew:
    """`rollout.workers` workers and their lifetimes, all on this service's own node.

    `resources`: custom Ray resources each worker asks for; then it runs on any node that has them.
    """

    def __init__(
        self,
        worker_class: type,
        config: Config,
        run_directory: Path,
        engine_factory: EngineFactory,
        resources: Mapping[str, float],
    ) -> None:
        variables = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._actor = ray.remote(worker_class).options(
            num_cpus=0,
            max_restarts=0,
            resources=dict(resources),
            scheduling_strategy="DEFAULT" if resources else here,
            runtime_env={"env_vars": variables},
        )
        self._arguments = (config, run_directory, engine_factory)
        self._config = config
        self._members: list[_Member] = []
        self._num_deaths, self._made_at_death = 0, -1

    def work(self, stop: StopRequest) -> bool:
        """Until all workers have ended: True if the run is finished. Raises the first error of any of them."""
        try:
            for _ in range(self._config.rollout.workers):
                self._start()
            finished, draining = [], False
            while self._members:
                if stop and not draining:
                    draining = True
                    for member in self._members:
                        member.actor.drain.remote()
                done, _ = ray.wait([m.ended for m in self._members], num_returns=1, timeout=_POLL_S)
                for member in [m for m in self._members if m.ended in done]:
                    finished += self._collect(member, stop)
            return bool(finished) and all(finished)
        finally:
            self._end()

    def _start(self) -> None:
        worker_id = f"worker-{secrets.token_hex(3)}"
        actor = self._actor.remote()
        ended = actor.run.remote(worker_id, *self._arguments)
        self._members.append(_Member(worker_id, actor, ended))

    def _collect(self, member: _Member, stop: StopRequest) -> list[bool]:
        """What the worker returned; nothing if it died, and then another one is started."""
        self._members.remove(member)
        try:
            return [ray.get(member.ended)]
        except (RayActorError, EngineDied, WeightSyncError) as error:
            self._kill(member)
            self._count_death(member, error)
            self._leave(member, f"died: {error}")
            if not stop:
                _LOG.warning("%s died and is replaced: %s", member.worker_id, error)
                self._start()
            return []

    def _count_death(self, member: _Member, error: Exception) -> None:
        """Raises the error when workers keep dying soon after they joined, or before, and nothing gets done."""
        hub = find_hub(self._config.run.name)
        status = call(HubLine(self._config.run.name, hub), "status") if hub else None
        made = status.issued + status.trained if status else 0
        lease = status.workers.get(member.worker_id) if status else None
        again = made == self._made_at_death and (lease is None or lease.joined_s < _YOUNG_S)
        self._num_deaths = self._num_deaths + 1 if again else 1
        self._made_at_death = made
        if self._num_deaths >= _MAX_DEATHS:
            raise error

    def _end(self) -> None:
        """Whatever still runs: each engine is closed, then its process is ended, then the hub is told."""
        closing = [(member, member.actor.close.remote()) for member in self._members]
        for member, closed in closing:
            with suppress(RayError, GetTimeoutError):
                ray.get(closed, timeout=_CLOSE_S)
            self._kill(member)
            self._leave(member, "ended with its service")
        self._members.clear()

    def _kill(self, member: _Member) -> None:
        with suppress(RayError):
            ray.kill(member.actor)

    def _leave(self, member: _Member, why: str) -> None:
        hub = find_hub(self._config.run.name)
        if hub is not None:
            with suppress(HubError):
                call(HubLine(self._config.run.name, hub), "leave", member.worker_id, why)
