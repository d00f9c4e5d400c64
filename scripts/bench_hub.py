"""What the durable ledger costs: groups and bytes a second through the hub's Ray actor, with the ledger and without.

python scripts/bench_hub.py --json                      # about two minutes
python scripts/bench_hub.py --run runs/demo             # compared with the steps of that run

Simulated clients ask for a group, encode it and hand it in, one after the other; a learner takes, begins, commits and
publishes steps of eight groups and trains nothing. Without the ledger the hub gets a store that keeps everything in
memory, and writes the steps' Parquet files to shared memory. `ledger_s_per_step` is what is left of a step's time when
that is taken off: transactions and the waiting for the disk. Both arms run in turns, so that they meet the same load.
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
from shared.records import Group, GroupId, Identity, Manifest, Publication, Rollout, Segment, StepPlan, Ticket
from shared.run_files import read_metrics
from shared.schema import encode_group

GROUPS_PER_STEP = 8
DEMO_STEP_S = 12.0
TARGET_SHARE = 0.02
SHARED_MEMORY = Path("/dev/shm")
_IDENTITY = Identity(model="", tokenizer="", schema="", code="", settings={})


@dataclass(frozen=True)
class Size:
    """A group of `members` completions of `tokens` tokens, trained for `steps` steps a measurement."""

    members: int
    tokens: int
    steps: int

    def __str__(self) -> str:
        return f"{self.members} x {self.tokens}"


DEMO = Size(members=8, tokens=12, steps=12)
SIZES = (DEMO, Size(members=16, tokens=512, steps=6))


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


class Clients:
    """A Ray actor: simulated workers, each an asyncio task of this process."""

    async def run(self, namespace: str, hub: Any, num_clients: int, size: Size) -> tuple[list[float], int]:
        """Seconds of every `submit`, and the bytes handed in, once the hub says that the run is finished."""
        from shared.hub_client import AsyncHubClient

        client, names = AsyncHubClient(namespace, hub), [f"client-{i}" for i in range(num_clients)]
        await asyncio.gather(*(client.join(name, _IDENTITY) for name in names))
        model = example_group(size)
        results = await asyncio.gather(*(self._work(client, name, model) for name in names))
        return [s for seconds, _ in results for s in seconds], sum(num_bytes for _, num_bytes in results)

    async def _work(self, client: Any, name: str, model: Group) -> tuple[list[float], int]:
        seconds: list[float] = []
        num_bytes = 0
        while not (work := await client.next_work(name, 0, (), 1)).stop:
            for ticket in work.tickets:
                payload = encode_group(labelled(model, name, ticket))
                start_s = time.monotonic()
                await client.submit(name, ticket, payload)
                seconds.append(time.monotonic() - start_s)
                num_bytes += len(payload)
        return seconds, num_bytes


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


def labelled(model: Group, worker_id: str, ticket: Ticket) -> Group:
    return replace(model, group=ticket.group, attempt=ticket.attempt, worker_id=worker_id)


def bench_config(name: str, size: Size) -> Config:
    """Version 0 may be trained in every step: the clients never wait for weights."""
    return Config(
        run=RunConfig(name=name),
        model=ModelConfig(path="none"),
        rollout=RolloutConfig(lease_s=600.0),
        learner=LearnerConfig(steps=size.steps, prompts_per_step=GROUPS_PER_STEP),
        sync=SyncConfig(max_staleness=size.steps),
        evaluation=EvaluationConfig(samples=0),
    )


@contextmanager
def measured_hub(name: str, size: Size, ledger: bool) -> Iterator[Any]:
    """A hub with a run directory of its own, on disk or in memory."""
    import ray

    from shared.hub import Hub

    with tempfile.TemporaryDirectory(prefix="seqrelay-bench-", dir=None if ledger else SHARED_MEMORY) as folder:
        store = None if ledger else MemoryStore(Path(folder))
        actor = ray.remote(Hub).options(num_cpus=0, max_concurrency=1000)
        hub = actor.remote(bench_config(name, size), Path(folder), store=store)
        try:
            ray.get(hub.status.remote())
            yield hub
        finally:
            ray.kill(hub)


def train(client: Any, size: Size) -> float:
    """All steps, without training. Seconds from the first take to the last publish."""
    with client.seated(_IDENTITY):
        start_s = time.monotonic()
        for step in range(size.steps):
            client.take(step)
            numbers = range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP)
            client.begin_step(StepPlan(step, tuple(GroupId(n) for n in numbers), 0, 3e-4, 4e-4))
            client.commit_step(step, f"{step:064x}")
            client.publish(Publication(Manifest(version=step + 1, weights_version=0, tensors=())))
        return time.monotonic() - start_s


def measure(name: str, size: Size, num_clients: int, ledger: bool) -> dict[str, float]:
    import ray

    from shared.hub_client import LearnerHubClient
    from shared.stopping import StopRequest

    with measured_hub(name, size, ledger) as hub:
        clients = ray.remote(Clients).options(num_cpus=0).remote()
        running = clients.run.remote(name, hub, num_clients, size)
        wall_s = train(LearnerHubClient(name, hub, StopRequest()), size)
        seconds, num_bytes = ray.get(running)
        ray.kill(clients)
    return {
        "groups_per_s": len(seconds) / wall_s,
        "mb_per_s": num_bytes / wall_s / 1e6,
        "group_bytes": num_bytes / len(seconds),
        "submit_mean_ms": 1e3 * statistics.fmean(seconds),
        "submit_p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
        "step_s": wall_s / size.steps,
    }


def rows(num_clients: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Of each arm's repeats the fastest: whatever else the host does only ever adds time."""
    report = []
    for size in SIZES:
        for count in num_clients:
            runs: dict[bool, list[dict[str, float]]] = {True: [], False: []}
            for repeat in range(repeats):
                for ledger in (True, False):
                    name = f"{size.tokens}-{count}-{ledger}-{repeat}"
                    runs[ledger].append(measure(name, size, count, ledger))
            best = {ledger: min(measured, key=lambda run: run["step_s"]) for ledger, measured in runs.items()}
            extra_s = best[True]["step_s"] - best[False]["step_s"]
            row = {"group": str(size), "clients": count, "ledger_s_per_step": extra_s}
            report.append({**row, "ledger": best[True], "no_ledger": best[False]})
    return report


def demo_step(run: Path | None) -> dict[str, Any]:
    """Seconds of a step of the demo: measured in a finished run, or assumed."""
    if run is None:
        return {"step_s": DEMO_STEP_S, "source": "assumed; give --run"}
    return {"step_s": statistics.fmean(row["step_s"] for row in read_metrics(run)), "source": str(run)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--run", type=Path, help="a finished run of the demo, for the length of its steps")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    options = parser.parse_args()
    step = demo_step(options.run)
    folder = Path(tempfile.mkdtemp(prefix="seqrelay-bench-"))
    try:
        with private_cluster(folder, "bench", folder):
            measured = rows(options.clients, options.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    demo = [row for row in measured if row["group"] == str(DEMO)]
    share = max(row["ledger_s_per_step"] for row in demo) / step["step_s"]
    report = {"demo_step": step, "ledger_share_of_demo_step": share, "target_share": TARGET_SHARE, "rows": measured}
    print(json.dumps(report, indent=None if options.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
