"""What a worker and a learner do at the hub, call by call: stories without engine, model or Ray."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.hub import Hub
from shared.records import (
    ClipRange,
    Group,
    Identity,
    Manifest,
    Publication,
    StepPlan,
    SyncReport,
    TensorEntry,
    Ticket,
)
from shared.schema import decode_group, encode_group

MakeGroup = Callable[..., Group]
MakeHub = Callable[..., Hub]
POLL_S = 0.05
LEARNER = "host-a:100-aa"
IDENTITY = Identity("model-1", "tokenizer-1", "schema-1", "code-1", {"sampling.temperature": "1.0"})


@dataclass
class Clock:
    """Stands in for the module `time` where leases are measured."""

    now_s: float = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def run(story: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(story, timeout=30))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(folder: Path) -> list[tuple[str, str]]:
    """(name, who) of everything in events.jsonl."""
    return [(row["name"], row["who"]) for row in rows(folder / "events.jsonl")]


def publication(
    version: int, weights_version: int | None = None, buckets: tuple[str, ...] = ("bucket",), incarnation: int = 0
) -> Publication:
    tensors = tuple(TensorEntry(f"weight-{i}", "float32", (1,), i, 0, 4, "digest") for i in range(len(buckets)))
    weights_version = version if weights_version is None else weights_version
    return Publication(Manifest(version, weights_version, tensors, incarnation=incarnation), buckets)


def sync(worker: str, version: int, incarnation: int = 0) -> SyncReport:
    return SyncReport(worker, version, 13, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, incarnation)


async def ask(
    hub: Hub, version: int = 0, worker: str = "w0", max_groups: int = 9, holds: Sequence[Ticket] = ()
) -> list[Ticket]:
    return list((await hub.next_work(worker, version, holds, max_groups)).tickets)


async def submit(hub: Hub, make_group: MakeGroup, ticket: Ticket, version: int = 0, worker: str = "w0") -> bool:
    return await hub.submit(worker, ticket, encode_group(make_group(ticket, worker, spans=((version, 4),))))


async def work(
    hub: Hub, make_group: MakeGroup, version: int = 0, worker: str = "w0", max_groups: int = 9
) -> list[Ticket]:
    """One round of a worker: ask, generate, submit everything."""
    tickets = await ask(hub, version, worker, max_groups)
    await asyncio.sleep(0.001)
    for ticket in tickets:
        assert await submit(hub, make_group, ticket, version, worker)
    return tickets


async def plan(hub: Hub, step: int) -> StepPlan:
    """Take the step's groups, which must be ready."""
    taken = await hub.take(LEARNER, step)
    assert taken.groups is not None, taken.waiting_for
    groups = tuple(decode_group(payload).group for payload in taken.groups)
    return StepPlan(step, groups, 7, ClipRange(3e-4, 4e-4))


async def train(hub: Hub, step: int, publish: bool = True) -> None:
    await hub.begin_step(LEARNER, await plan(hub, step))
    await hub.commit_step(LEARNER, step, f"digest-{step}")
    if publish:
        await hub.publish(LEARNER, publication(step + 1))
