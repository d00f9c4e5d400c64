"""What a worker sees when the learner is killed: its weights are lost, said plainly and soon. Two Ray nodes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from rollout.receive import fetch_buckets
from shared.errors import WeightsLost
from shared.records import Publication

NUM_BUCKETS, BUCKET_BYTES = 4, 32 << 20
WORKER_NODE = "worker_node"
NUM_LEARNERS = 4
# Publishes weights of one version, as the learner does.
LEARNER = f"""
import sys, time
import numpy as np, ray
from shared.records import Manifest, Publication

version = int(sys.argv[2])
ray.init(address=sys.argv[1], namespace="lost", log_to_driver=False)
buckets = tuple(ray.put(np.full({BUCKET_BYTES}, i, np.uint8)) for i in range({NUM_BUCKETS}))
holder = ray.get_actor("holder", namespace="lost")
ray.get(holder.publish.remote(Publication(Manifest(version, version, ()), buckets)))
print("published", flush=True)
time.sleep(120)
"""
WHOLE = str(list(range(NUM_BUCKETS)))


class Holder:
    """Keeps the references, as the hub does."""

    def __init__(self) -> None:
        self._publications: dict[int, Publication] = {}

    def publish(self, publication: Publication) -> None:
        self._publications[publication.manifest.version] = publication

    def publication(self, version: int) -> Publication:
        return self._publications[version]


class Fetcher:
    """A worker on a node that does not have the bytes. Says how it went, and after how many seconds."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder

    async def receive(self, version: int) -> None:
        """Get the publication, and no bucket yet."""
        self._publication: Publication = await self._holder.publication.remote(version)

    async def fetch(self) -> tuple[str, float]:
        start_s = time.monotonic()
        try:
            buckets = await fetch_buckets(self._publication)
            values = [np.unique(bucket).tolist() for bucket in buckets]
            outcome = str([value for [value] in values])
        except WeightsLost as error:
            outcome = str(error)
        return outcome, time.monotonic() - start_s


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[list[subprocess.Popen[str]], Any]]:
    """Processes that have published, version i by process i, and a worker. All start at once."""
    root = Path(__file__).parents[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(Path(__file__).parent)]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        store = {"object_store_memory": 640 << 20}
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False} | store)
        nodes.add_node(num_cpus=1, resources={WORKER_NODE: 1}, wait=False, **store)
        ray.init(address=nodes.address, namespace="lost", log_to_driver=False)
        holder = ray.remote(Holder).options(name="holder", num_cpus=0).remote()
        command = [sys.executable, "-c", LEARNER, nodes.address]
        fetcher = ray.remote(Fetcher).options(num_cpus=0, resources={WORKER_NODE: 1}).remote(holder)
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        processes = [subprocess.Popen([*command, str(version)], **streams) for version in range(NUM_LEARNERS)]
        try:
            assert [process.stdout.readline() for process in processes if process.stdout] == [
                "published\n"
            ] * NUM_LEARNERS
            ray.get(fetcher.__ray_ready__.remote())
            yield processes, fetcher
        finally:
            for process in processes:
                kill(process)
            ray.shutdown()
            nodes.shutdown()


@pytest.fixture
def learners(site: Any) -> list[subprocess.Popen[str]]:
    return site[0]


@pytest.fixture
def fetcher(site: Any) -> Any:
    return site[1]


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def lost(version: int) -> str:
    return f"the weights of version {version} cannot be fetched any more: the learner that published them is gone"


def finish(fetching: Any, what: str) -> str:
    outcome, seconds = ray.get(fetching, timeout=30)
    print(f"{what}: {outcome!r} after {seconds:.2f} s")
    return outcome


def test_weights_are_lost_when_the_learner_was_killed_before_the_fetch(
    learners: list[subprocess.Popen[str]], fetcher: Any
) -> None:
    ray.get(fetcher.receive.remote(0))
    kill(learners[0])
    assert finish(fetcher.fetch.remote(), "known before the kill").startswith(lost(0))


def test_weights_are_lost_when_the_worker_hears_of_them_after_the_kill(
    learners: list[subprocess.Popen[str]], fetcher: Any
) -> None:
    kill(learners[1])
    ray.get(fetcher.receive.remote(1))
    assert finish(fetcher.fetch.remote(), "heard of after the kill").startswith(lost(1))


def test_a_kill_during_the_fetch_loses_all_or_nothing(learners: list[subprocess.Popen[str]], fetcher: Any) -> None:
    ray.get(fetcher.receive.remote(2))
    fetching = fetcher.fetch.remote()
    time.sleep(0.01)
    kill(learners[2])
    outcome = finish(fetching, "killed during the fetch")
    assert outcome == WHOLE or outcome.startswith(lost(2))


def test_weights_of_a_live_learner_are_whole(learners: list[subprocess.Popen[str]], fetcher: Any) -> None:
    ray.get(fetcher.receive.remote(3))
    assert finish(fetcher.fetch.remote(), "not killed") == WHOLE
