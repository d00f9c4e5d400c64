"""Both services' view of the hub: the seams of shared.protocols over its Ray handle.

Errors arrive as they were raised in the hub (HubError, RunFailed, SchemaError, ...), not wrapped in Ray's own.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from shared.errors import HubError, RunFailed
from shared.hub import HUB_NAME, MetricRow
from shared.hub_state import HubStatus, Taken
from shared.records import Publication, Report, Span, StepPlan, Ticket, Work

_LOG = logging.getLogger(__name__)
_LOOK_AGAIN_S = 0.2
_TELL_EVERY_S = 30.0


def connect(namespace: str, timeout_s: float = 60.0) -> Any:
    """The handle of the run's hub, waiting until it exists. HubError after `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return ray.get_actor(HUB_NAME, namespace=namespace)
        except ValueError as error:
            if time.monotonic() >= deadline_s:
                raise HubError(
                    f"no hub of run {namespace!r} in this Ray cluster after {timeout_s:g} s; "
                    f"check run.name and the cluster's address, and that the run was started"
                ) from error
        time.sleep(_LOOK_AGAIN_S)


def report_failure(handle: Any, side: str, traceback_text: str) -> None:
    """Tell the hub that `side` ("rollout" or "learner") cannot go on, so that the other side stops."""
    with _plain_errors():
        ray.get(handle.fail.remote(side, traceback_text))


class AsyncHubClient:
    """GroupSource and VersionFeed for a rollout worker."""

    def __init__(self, handle: Any) -> None:
        self._hub = handle

    async def next_work(self, worker_id: str, active_version: int, max_groups: int) -> Work:
        with _plain_errors():
            return await self._hub.next_work.remote(worker_id, active_version, max_groups)

    async def submit(self, worker_id: str, ticket: Ticket, payload: bytes) -> bool:
        with _plain_errors():
            return await self._hub.submit.remote(worker_id, ticket, payload)

    async def give_up(self, worker_id: str, ticket: Ticket, reason: str, detail: str) -> None:
        with _plain_errors():
            await self._hub.give_up.remote(worker_id, ticket, reason, detail)

    async def report(self, reports: Sequence[Report]) -> None:
        if reports:
            with _plain_errors():
                await self._hub.report.remote(reports)

    async def newer_version(self, than: int) -> Publication | None:
        with _plain_errors():
            return await self._hub.newer_version.remote(than)


class LearnerHubClient:
    """GroupSink for the learner, and its metrics and spans. Calls block."""

    def __init__(self, handle: Any) -> None:
        self._hub = handle

    def take(self, step: int) -> list[bytes]:
        """The step's groups in order. Waits as long as it takes and says in the log what for."""
        told_s = time.monotonic()
        while True:
            taken: Taken = self._get(self._hub.take.remote(step))
            if taken.groups is not None:
                return taken.groups
            if time.monotonic() - told_s >= _TELL_EVERY_S:
                told_s = time.monotonic()
                _LOG.info("%s", taken.waiting_for)

    def begin_step(self, plan: StepPlan) -> None:
        self._get(self._hub.begin_step.remote(plan))

    def commit_step(self, step: int, weights_digest: str) -> None:
        self._get(self._hub.commit_step.remote(step, weights_digest))

    def publish(self, publication: Publication) -> None:
        self._get(self._hub.publish.remote(publication))

    def log_metrics(self, row: MetricRow) -> None:
        """Append the step's record to metrics.jsonl. HubError on NaN or infinity."""
        self._get(self._hub.log_metrics.remote(row))

    def report(self, spans: Sequence[Span]) -> None:
        """Append to spans.jsonl."""
        self._get(self._hub.report.remote(spans))

    def status(self) -> HubStatus:
        return self._get(self._hub.status.remote())

    def wait_finished(self) -> None:
        """Returns once all steps are published and the last evaluation is in. RunFailed when the other side failed."""
        while not (status := self.status()).finished:
            if status.failure:
                raise RunFailed(status.failure)
            time.sleep(_LOOK_AGAIN_S)

    def _get(self, reference: Any) -> Any:
        with _plain_errors():
            return ray.get(reference)


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise HubError(f"the hub is gone, so this run cannot go on: {error}") from error
