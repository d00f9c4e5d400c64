"""Both services' view of the hub: the seams of shared.protocols over its Ray handle.

Errors arrive as they were raised in the hub (HubError, RunFailed, SchemaError, ...), not wrapped in Ray's own. A call
that finds the hub dead is made again until the hub is back from disk: every call may be repeated.
"""

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from shared.errors import HubError, RunFailed, SeqrelayError
from shared.hub import MetricRow
from shared.hub_start import connect, find_hub
from shared.hub_state import HubStatus, LearnerOrders, Taken
from shared.records import (
    Identity,
    MismatchReport,
    ProbeReport,
    Publication,
    RecordedStep,
    Report,
    ResumePoint,
    SamplingReport,
    Span,
    StepPlan,
    Ticket,
    Work,
)
from shared.stopping import StopRequest

_LOG = logging.getLogger(__name__)
_LOOK_AGAIN_S = 0.2
_FINISHED_EVERY_S = 0.5
_TELL_EVERY_S = 30.0
HUB_BACK_S = 60.0  # a killed hub is back in 2 to 5 s
_ALIVE_EVERY_S = 1.0


class HubLine:
    """The way to the hub of one run, found again by name when its process was replaced."""

    def __init__(self, namespace: str, handle: Any) -> None:
        self._namespace, self._handle = namespace, handle

    def send(self, method: str, arguments: Sequence[Any]) -> Any:
        return getattr(self._handle, method).remote(*arguments)

    def look_again(self, deadline_s: float, error: RayActorError) -> None:
        """After a failed call, before the next. HubError when the hub has been away for too long."""
        if time.monotonic() > deadline_s:
            raise HubError(
                f"the hub of run {self._namespace!r} is gone for {HUB_BACK_S:g} s; start the learner again with "
                f"--resume: {error}"
            ) from error
        self._handle = find_hub(self._namespace) or self._handle


def report_failure(namespace: str, side: str, traceback_text: str) -> None:
    """Tell the hub that `side` ("rollout" or "learner") cannot go on, so that the other side stops.

    HubError when there is no hub.
    """
    call(HubLine(namespace, connect(namespace, timeout_s=0.0)), "fail", side, traceback_text)


def call(line: HubLine, method: str, *arguments: Any) -> Any:
    """One blocking call."""
    deadline_s = time.monotonic() + HUB_BACK_S
    while True:
        try:
            return ray.get(line.send(method, arguments))
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            line.look_again(deadline_s, error)
        time.sleep(_LOOK_AGAIN_S)


class AsyncHubClient:
    """GroupSource, Membership and VersionFeed for a rollout worker."""

    def __init__(self, namespace: str, handle: Any) -> None:
        self._line = HubLine(namespace, handle)

    async def check(self, identity: Identity) -> str:
        return await self._call("check", identity)

    async def join(self, worker_id: str, identity: Identity) -> str:
        return await self._call("join", worker_id, identity)

    async def heartbeat(self, worker_id: str) -> None:
        await self._call("heartbeat", worker_id)

    async def leave(self, worker_id: str, why: str = "") -> None:
        await self._call("leave", worker_id, why)

    async def next_work(self, worker_id: str, active_version: int, holds: Sequence[Ticket], max_groups: int) -> Work:
        return await self._call("next_work", worker_id, active_version, holds, max_groups)

    async def submit(self, worker_id: str, ticket: Ticket, payload: bytes) -> bool:
        return await self._call("submit", worker_id, ticket, payload)

    async def give_up(self, worker_id: str, ticket: Ticket, reason: str, detail: str) -> None:
        await self._call("give_up", worker_id, ticket, reason, detail)

    async def report(self, reports: Sequence[Report]) -> None:
        if reports:
            await self._call("report", reports)

    async def newer_version(self, than: int, incarnation: int = 0) -> Publication | None:
        return await self._call("newer_version", than, incarnation)

    async def _call(self, method: str, *arguments: Any) -> Any:
        deadline_s = time.monotonic() + HUB_BACK_S
        while True:
            try:
                return await self._line.send(method, arguments)
            except RayTaskError as error:
                raise error.cause from None
            except RayActorError as error:
                self._line.look_again(deadline_s, error)
            await asyncio.sleep(_LOOK_AGAIN_S)


class LearnerHubClient:
    """GroupSink for the learner, its seat, its metrics and spans. Calls block.

    While it sits, a thread of its own tells the hub that the learner is alive, passes the hub's stop on to `stop`, and
    sends the current publication again when a hub that was killed has lost it.
    """

    def __init__(self, namespace: str, handle: Any, stop: StopRequest) -> None:
        self._namespace, self._line, self._stop = namespace, HubLine(namespace, handle), stop
        self._learner_id = f"{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(2)}"
        self._publication: Publication | None = None
        self._publishing = threading.Lock()
        self._up = threading.Event()

    @contextmanager
    def seated(self, identity: Identity) -> Iterator[ResumePoint]:
        """Be the run's learner for this block. HubError while another one is alive.

        Afterwards the weights that were published can no longer be fetched.
        """
        point: ResumePoint = self._call("sit_down", self._learner_id, identity)
        threading.Thread(target=self._stay_alive, args=(identity,), daemon=True, name="learner-alive").start()
        try:
            yield point
        finally:
            self._up.set()
            with suppress(HubError):  # gone or taken over: what led here is the error to show
                self._call("get_up", self._learner_id)

    def recorded_step(self, step: int) -> RecordedStep:
        return self._call("recorded_step", self._learner_id, step)

    def replace_weights(self, weights_digest: str) -> int:
        return self._call("replace_weights", self._learner_id, weights_digest)

    def take(self, step: int) -> list[bytes] | None:
        """As in GroupSink. Waits as long as it takes and says in the log what for."""
        told_s = time.monotonic()
        while not self._stop:
            taken: Taken = self._call("take", self._learner_id, step)
            if taken.groups is not None:
                return taken.groups
            if time.monotonic() - told_s >= _TELL_EVERY_S:
                told_s = time.monotonic()
                _LOG.info("%s", taken.waiting_for)
        return None

    def begin_step(self, plan: StepPlan) -> None:
        self._call("begin_step", self._learner_id, plan)

    def commit_step(self, step: int, weights_digest: str) -> None:
        self._call("commit_step", self._learner_id, step, weights_digest)

    def publish(self, publication: Publication) -> None:
        with self._publishing:
            self._publication = publication
            self._call("publish", self._learner_id, publication)

    def log_metrics(self, row: MetricRow) -> None:
        """Append the step's record to metrics.jsonl, unless it is there. HubError on NaN or infinity."""
        self._call("log_metrics", self._learner_id, row)

    def report(self, reports: Sequence[Span | SamplingReport | MismatchReport]) -> None:
        """Append to spans.jsonl, checks.jsonl and mismatch.jsonl."""
        self._call("report", reports)

    def probes(self, since_version: int) -> list[ProbeReport]:
        """The workers' verdicts on the weights of `since_version` and later versions, as far as the hub has them."""
        return self._call("probes", self._learner_id, since_version)

    def status(self) -> HubStatus:
        return self._call("status")

    def wait_finished(self) -> bool:
        """True once all steps are published and the last evaluation is in; False when the learner is to stop instead.

        RunFailed when the other side failed.
        """
        told_s = time.monotonic()
        while not (status := self.status()).finished:
            if status.failure:
                raise RunFailed(status.failure)
            if time.monotonic() - told_s >= _TELL_EVERY_S:
                told_s = time.monotonic()
                _LOG.info("%s", status.waiting_for)
            if self._stop:
                return False
            time.sleep(_FINISHED_EVERY_S)
        return True

    def _stay_alive(self, identity: Identity) -> None:
        while not self._up.wait(_ALIVE_EVERY_S):
            try:
                orders: LearnerOrders = self._call("learner_alive", self._learner_id, identity)
                if orders.stop:
                    self._stop.set()
                if orders.republish:
                    self._publish_again()
            except SeqrelayError as error:  # the main thread meets the same error at its next call, and says so
                _LOG.warning("no sign of life could be given: %s", error)
                return

    def _publish_again(self) -> None:
        with self._publishing:
            if self._publication is not None:
                self._call("publish_again", self._learner_id, self._publication)

    def _call(self, method: str, *arguments: Any) -> Any:
        return call(self._line, method, *arguments)
