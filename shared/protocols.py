"""The seams. Each is a Protocol of at most four methods with one contract suite in tests/contract.

Who implements what: `GroupSource`, `Membership`, `VersionFeed`, `GroupSink` - the hub (through its Ray handle, or a
fake in memory); `Engine` - vLLM (rollout/engine.py) or the deterministic fake in tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from shared.records import (
    Float32Array,
    Identity,
    Int32Array,
    Manifest,
    Publication,
    Report,
    StepPlan,
    Ticket,
    Work,
)

# What becomes of running requests in a weight swap: their cache is computed again, or they end with what they have.
RequestsInLoad = Literal["recompute", "abort"]


class GroupSource(Protocol):
    """Where a rollout worker gets its work and leaves its results."""

    async def next_work(self, worker_id: str, active_version: int, holds: Sequence[Ticket], max_groups: int) -> Work:
        """Up to `max_groups` tickets this worker may start at `active_version`. Waits briefly when there are none.

        `holds`: what the worker has and has not handed in; anything else that was issued to it is issued again.
        """
        ...

    async def submit(self, worker_id: str, ticket: Ticket, payload: bytes) -> bool:
        """Hand in one finished group (shared.schema.encode_group). Durable when it returns.

        False: refused as late (that attempt no longer holds the group); the worker forgets it.
        """
        ...

    async def give_up(self, worker_id: str, ticket: Ticket, reason: str, detail: str) -> None:
        """This group cannot be finished: it is dropped with `reason` and its number goes to a replacement."""
        ...

    async def report(self, reports: Sequence[Report]) -> None:
        """What happened on this worker. A SyncReport also tells the hub which version is active on it from now on."""
        ...


class Membership(Protocol):
    """How a rollout worker comes, stays and goes."""

    async def check(self, identity: Identity) -> str:
        """Before the engine is started: "" if this worker may join, or what it would wait for. ConfigError if not."""
        ...

    async def join(self, worker_id: str, identity: Identity) -> str:
        """As `check`, after which the worker's lease runs. Waits briefly before it says what it waits for."""
        ...

    async def heartbeat(self, worker_id: str) -> None:
        """Renew the lease."""
        ...

    async def leave(self, worker_id: str, why: str = "") -> None:
        """The worker is gone; what it held is issued again."""
        ...


class VersionFeed(Protocol):
    """How a rollout worker learns of new policy versions."""

    async def newer_version(self, than: int, incarnation: int = 0) -> Publication | None:
        """The current publication once (version, incarnation) exceeds these; None after a short wait, to ask again."""
        ...


class GroupSink(Protocol):
    """Where the learner takes groups from and reports its steps to. Calls block."""

    def take(self, step: int) -> list[bytes] | None:
        """The groups of step `step` in order, waiting until all are ready; None when the learner is to stop instead.

        RunFailed when the other side failed.
        """
        ...

    def begin_step(self, plan: StepPlan) -> None:
        """Durable before the first forward pass of the step."""
        ...

    def commit_step(self, step: int, weights_digest: str) -> None:
        """The step's groups are trained and version step + 1 is the learner's current one."""
        ...

    def publish(self, publication: Publication) -> None:
        """Version `publication.manifest.version` is ready for the workers; groups of earlier steps are settled."""
        ...


@dataclass(frozen=True)
class GenerateRequest:
    """One completion to sample. Every sampling field that matters is here; nothing is taken from the model's files."""

    request_id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float
    seed: int
    cache_salt: str


@dataclass(frozen=True)
class Completion:
    """What an engine returns, checked: ids as sampled, one finite log-probability each, spans that tile [0, T).

    `finish_reason` "abort": a load ended the request; it may have no token yet, and is never a finished rollout.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    version_spans: tuple[tuple[int, int, int], ...]
    finish_reason: Literal["stop", "length", "abort"]


class Engine(Protocol):
    """An inference engine whose weights can be replaced while requests run."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. RolloutRejected when its log-probabilities cannot be trusted."""
        ...

    async def score(self, token_ids: Sequence[int], first: int) -> Float32Array:
        """Log-probabilities (nats, temperature 1, no prefix cache) of `token_ids[first:]` under the active weights."""
        ...

    async def load(
        self, manifest: Manifest, files: Sequence[Path], requests: RequestsInLoad = "recompute"
    ) -> dict[str, float]:
        """Swap to the manifest's weights, read from one staged safetensors file per bucket.

        Running requests go on, their cache computed again under the new weights; with "abort" they end at once, before
        the load, and return what they have. With no files, only the version label moves. Returns seconds by part:
        pause_s, load_s, resume_s. WeightSyncError when the weights are refused; the engine then still serves the old
        version.
        """
        ...

    async def close(self) -> None:
        """End every process of the engine. Idempotent."""
        ...
