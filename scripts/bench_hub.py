"""What the durable ledger costs: groups and bytes a second through the hub's Ray actor, with the ledger and without.

python scripts/bench_hub.py --json                      # about two minutes
python scripts/bench_hub.py --run runs/demo             # compared with the steps of that run

Each simulated client asks for a group, encodes it, hands it in and asks again; a learner takes, begins, commits and
publishes steps of eight groups and trains nothing, and the clients follow its versions as workers do. Without the
ledger the hub gets a store that keeps everything in memory, and writes the steps' Parquet files to shared memory.
`ledger_s_per_step` is the difference of a step's wall time with and without: transactions and waiting for the disk.
The two arms take turns, so that they meet the same load. A hub's first steps, in which it imports things, do not
count, nor do its last ones, when the clients have run out of groups.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shared.cluster import private_cluster
from shared.config import Config, EvaluationConfig, LearnerConfig, ModelConfig, RolloutConfig, RunConfig, SyncConfig
from shared.ledger_rows import GroupRow, StepRow
from shared.records import (
    ClipRange,
    Group,
    GroupId,
    Identity,
    Manifest,
    Publication,
    Rollout,
    Segment,
    StepPlan,
    SyncReport,
    Ticket,
)
from shared.run_files import read_metrics
from shared.schema import encode_group

GROUPS_PER_STEP = 8
WARM_UP_STEPS = 3
DEMO_STEP_S = 12.0
TARGET_SHARE = 0.02
SHARED_MEMORY = Path("/dev/shm")
_IDENTITY = Identity(model="", tokenizer="", schema="", code="", settings={})


@dataclass(frozen=True)
class Size:
    """A group of `members` completions of `tokens` tokens, and how many steps of it are measured."""

    members: int
    tokens: int
    steps: int

    def __str__(self) -> str:
        return f"{self.members} x {self.tokens}"


DEMO = Size(members=8, tokens=12, steps=25)
SIZES = (DEMO, Size(members=16, tokens=512, steps=10))


class MemoryStore:
    """In the place of shared.store.Store: forgets everything with its process."""

    def __init__(self, trajectories: Path) -> None:
        self._trajectories = trajectories
        self._payloads: dict[GroupId, bytes] = {}

    def close(self) -> None:
        pass

    def load(self) -> tuple[list[GroupRow], list[StepRow]]:
        return [], []

    def unexported_steps(self) -> list[StepRow]:
        return []

    def save_groups(self, rows: Sequence[GroupRow]) -> None:
        pass

    def save_ready(self, row: GroupRow, payload: bytes) -> None:
        self._payloads[row.group] = payload

    def save_step(self, step: StepRow, groups: Sequence[GroupRow]) -> None:
        pass

    def save_published(self, steps: Sequence[StepRow]) -> None:
        pass

    def payloads(self, groups: Sequence[GroupId]) -> list[bytes]:
        return [self._payloads[group] for group in groups]

    def clear_payloads(self, groups: Sequence[GroupId]) -> None:
        for group in groups:
            del self._payloads[group]

    def trajectory_path(self, step: int) -> Path:
        return self._trajectories / f"step-{step:06d}.parquet"


@dataclass(frozen=True)
class Submitted:
    """One call of `submit`: when it began and how long it took (monotonic seconds), and what it carried."""

    start_s: float
    duration_s: float
    num_bytes: int


class Clients:
    """A Ray actor: simulated workers, each an asyncio task of this process."""

    async def run(self, namespace: str, hub: Any, num_clients: int, size: Size) -> list[Submitted]:
        """Everything handed in until the hub says that the run is finished."""
        from shared.hub_client import AsyncHubClient

        self._hub = AsyncHubClient(namespace, hub)
        self._names = [f"client-{index}" for index in range(num_clients)]
        self._example = example_group(size)
        self._version = 0
        self._submitted: list[Submitted] = []
        await asyncio.gather(*(self._hub.join(name, _IDENTITY) for name in self._names))
        following = asyncio.create_task(self._follow())
        await asyncio.gather(*(self._work(name) for name in self._names))
        following.cancel()
        return self._submitted

    async def _follow(self) -> None:
        """New versions are active at once on all clients."""
        while True:
            publication = await self._hub.newer_version(self._version)
            if publication is not None:
                self._version = publication.manifest.version
                await self._hub.report([SyncReport(n, self._version, 0, 0, 0, 0, 0, 0, 0) for n in self._names])

    async def _work(self, name: str) -> None:
        while not (work := await self._hub.next_work(name, self._version, (), 1)).stop:
            for ticket in work.tickets:
                payload = encode_group(labelled(self._example, name, ticket, self._version))
                start_s = time.monotonic()
                await self._hub.submit(name, ticket, payload)
                self._submitted.append(Submitted(start_s, time.monotonic() - start_s, len(payload)))


def example_group(size: Size) -> Group:
    random = np.random.default_rng(0)
    rollouts = []
    for _ in range(size.members):
        logprobs = -random.random(size.tokens, dtype=np.float32)
        segment = Segment(policy_version=0, start=0, end=size.tokens, loglik=float(logprobs.sum(dtype=np.float64)))
        ids = random.integers(0, 49152, size.tokens, dtype=np.int32)
        rollouts.append(Rollout(ids, logprobs, (segment,), "length", reward=1.0, reward_parts={"correct": 1.0}))
    prompt = np.arange(40, dtype=np.int32)
    return Group(GroupId(0), 0, "client", "a+b", prompt, temperature=1.0, rollouts=tuple(rollouts))


def labelled(example: Group, worker_id: str, ticket: Ticket, version: int) -> Group:
    rollouts = tuple(
        replace(rollout, segments=tuple(replace(segment, policy_version=version) for segment in rollout.segments))
        for rollout in example.rollouts
    )
    return replace(example, group=ticket.group, attempt=ticket.attempt, worker_id=worker_id, rollouts=rollouts)


def bench_config(name: str, size: Size, num_clients: int) -> Config:
    """So much staleness that every client can hold a group while two steps are with the learner."""
    max_staleness = 1 + num_clients // GROUPS_PER_STEP
    return Config(
        run=RunConfig(name=name),
        model=ModelConfig(path="none"),
        rollout=RolloutConfig(lease_s=600.0),
        learner=LearnerConfig(steps=WARM_UP_STEPS + size.steps + max_staleness + 1, prompts_per_step=GROUPS_PER_STEP),
        sync=SyncConfig(max_staleness=max_staleness),
        evaluation=EvaluationConfig(samples=0),
    )


@contextmanager
def measured_hub(config: Config, ledger: bool) -> Iterator[Any]:
    """A hub with a run directory of its own, on disk or in memory."""
    import ray

    from shared.hub import Hub

    with tempfile.TemporaryDirectory(prefix="seqrelay-bench-", dir=None if ledger else SHARED_MEMORY) as folder:
        store = None if ledger else MemoryStore(Path(folder))
        hub = ray.remote(Hub).options(num_cpus=0, max_concurrency=1000).remote(config, Path(folder), store=store)
        try:
            ray.get(hub.status.remote())
            yield hub
        finally:
            ray.kill(hub)


def train(learner: Any, num_steps: int) -> list[float]:
    """All steps, without training. When each was published (monotonic seconds)."""
    published_s = []
    for step in range(num_steps):
        learner.take(step)
        numbers = range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP)
        learner.begin_step(StepPlan(step, tuple(GroupId(n) for n in numbers), 0, ClipRange(3e-4, 4e-4)))
        learner.commit_step(step, f"{step:064x}")
        learner.publish(Publication(Manifest(version=step + 1, weights_version=0, tensors=())))
        published_s.append(time.monotonic())
    return published_s


def measure(clients: Any, name: str, size: Size, num_clients: int, ledger: bool) -> dict[str, float]:
    import ray

    from shared.hub_client import LearnerHubClient
    from shared.stopping import StopRequest

    config = bench_config(name, size, num_clients)
    with measured_hub(config, ledger) as hub:
        running = clients.run.remote(name, hub, num_clients, size)
        learner = LearnerHubClient(name, hub, StopRequest())
        with learner.seated(_IDENTITY):
            published_s = train(learner, config.learner.steps)
            calls = ray.get(running)
    start_s, end_s = published_s[WARM_UP_STEPS - 1], published_s[WARM_UP_STEPS - 1 + size.steps]
    counted = [call for call in calls if start_s <= call.start_s < end_s]
    seconds, wall_s = [call.duration_s for call in counted], end_s - start_s
    return {
        "groups_per_s": len(counted) / wall_s,
        "mb_per_s": sum(call.num_bytes for call in counted) / wall_s / 1e6,
        "submit_mean_ms": 1e3 * statistics.fmean(seconds),
        "submit_p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
        "step_s": wall_s / size.steps,
    }


def rows(num_clients: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Of each arm's repeats the fastest: whatever else the host does only ever adds time."""
    import ray

    clients = ray.remote(Clients).options(num_cpus=0).remote()
    for size in SIZES:
        for count in num_clients:
            runs: dict[bool, list[dict[str, float]]] = {True: [], False: []}
            for repeat in range(repeats):
                for ledger in (True, False):
                    name = f"{size.tokens}-{count}-{ledger}-{repeat}"
                    runs[ledger].append(measure(clients, name, size, count, ledger))
            best = {ledger: min(measured, key=lambda run: run["step_s"]) for ledger, measured in runs.items()}
            extra_s = best[True]["step_s"] - best[False]["step_s"]
            row = {"group": str(size), "clients": count, "ledger_s_per_step": extra_s}
            yield {**row, "ledger": best[True], "no_ledger": best[False]}


def demo_step(run: Path | None) -> dict[str, Any]:
    """Seconds of a step of the demo: measured in a finished run, or assumed."""
    if run is None:
        return {"step_s": DEMO_STEP_S, "source": "assumed; give --run"}
    return {"step_s": statistics.fmean(row["step_s"] for row in read_metrics(run)), "source": str(run)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=1, help="measurements of each arm; the fastest counts")
    parser.add_argument("--run", type=Path, help="a finished run of the demo, for the length of its steps")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    options = parser.parse_args()
    step, measured = demo_step(options.run), []
    folder = Path(tempfile.mkdtemp(prefix="seqrelay-bench-"))
    try:
        with private_cluster(folder, "bench", folder):
            for row in rows(options.clients, options.repeats):
                print(f"{row['group']}, {row['clients']} clients: {row['ledger_s_per_step']:.3f} s", file=sys.stderr)
                measured.append(row)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    demo = [row for row in measured if row["group"] == str(DEMO)]
    share = max(row["ledger_s_per_step"] for row in demo) / step["step_s"]
    report = {"demo_step": step, "ledger_share_of_demo_step": share, "target_share": TARGET_SHARE, "rows": measured}
    print(json.dumps(report, indent=None if options.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
