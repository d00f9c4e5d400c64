"""The whole loop on two Ray nodes: the real hub, workers and learner, with a deterministic engine in vLLM's place.

The nodes have shared-memory directories of their own, as two hosts have: weights and groups can only arrive through
Ray's object stores and its network.
"""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas
import psutil
import pytest
import ray
import torch
from engine_factories import broken_engine, fake_engine
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM

import tiny_moe
from learner.main import run_learner
from learner.step import StepResult, train_step
from rollout.main import run_workers
from shared.config import Config
from shared.config_file import parse_config
from shared.errors import RunFailed
from shared.hub_client import report_failure
from shared.hub_start import start_hub
from shared.run_files import read_evaluations, read_metrics, read_spans, read_syncs
from shared.spans import overlap_s, union
from shared.stopping import StopRequest

ROLLOUT_NODE = "rollout_node"


@dataclass
class Folders:
    """What is in memory on each of the two hosts that the nodes stand for."""

    learner: Path
    rollout: Path
    staging: Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    """Two nodes on this host; only the second one may hold rollout workers. Their processes find the fakes."""
    tests = Path(__file__).parents[1]
    folders = Folders(*(tmp_path_factory.mktemp(name) for name in ("learner-shm", "rollout-shm", "staging")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tests.parent), str(tests / "fakes")]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("SEQRELAY_STAGING", str(folders.staging))
        memory = {"include_dashboard": False, "object_store_memory": 100 << 20}
        head = {"num_cpus": 1, "plasma_directory": str(folders.learner), **memory}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        nodes.add_node(num_cpus=1, resources={ROLLOUT_NODE: 100}, plasma_directory=str(folders.rollout), **memory)
        ray.init(address=nodes.address, log_to_driver=False)
        yield folders
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tiny_moe.make_model().save_pretrained(path)
    tiny_moe.make_tokenizer().save_pretrained(path)
    return path


@dataclass
class Run:
    config: Config
    directory: Path
    status: Any
    last_step_mib: float = 0.0


def run_loop(name: str, model: Path, folder: Path, engine: Any = fake_engine, **sections: Any) -> Run:
    """Run learner and workers against one hub. What a side raises is raised here, the learner's first."""
    values: dict[str, Any] = {
        "run": {"name": name, "directory": str(folder)},
        "model": {"path": str(model), "precision": "float32"},
        "prompts": {"style": "plain", "digits": 2, "num_held_out": 4},
        "sampling": {"group_size": 4, "max_tokens": 6},
        "rollout": {"max_model_len": 32, "workers": 2},
        "learner": {"steps": 4, "prompts_per_step": 4, "minibatches": 2, "lr": 1e-3},
        "clip": {"calibration": "none"},
        "sync": {"max_mismatch": 1e9},  # the fake engine and the model know nothing of each other
    }
    for section, given in sections.items():
        values[section] = values.get(section, {}) | given
    config = parse_config(values)
    directory = folder / name
    directory.mkdir()
    hub = start_hub(config, directory)
    errors: list[BaseException] = []

    def workers() -> None:
        try:
            run_workers(config, directory, StopRequest(), engine, {ROLLOUT_NODE: 1})
        except BaseException as error:
            errors.append(error)
            report_failure(name, "rollout", str(error))

    thread = threading.Thread(target=workers)
    thread.start()
    try:
        assert run_learner(config, directory, StopRequest())
    finally:
        thread.join(60)
    if errors:
        raise errors[0]
    return Run(config, directory, ray.get(hub.status.remote()))


@pytest.fixture(scope="module")
def finished(cluster: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run at staleness 1 with mixed rewards. Steps take at least half a second, as those of a real model do."""
    folder = tmp_path_factory.mktemp("runs")
    used_mib: list[float] = []

    def slow_step(*arguments: Any) -> StepResult:
        time.sleep(0.5)
        used_mib.append(settled_object_store_mib())
        return train_step(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("learner.main.train_step", slow_step)
        run = run_loop("stale", model, folder, reward={"function": "example_rewards:even_length"})
    return replace(run, last_step_mib=used_mib[-1])


def settled_object_store_mib() -> float:
    """MiB in the object store, the least of three seconds: references are given back with a delay."""
    from ray._private.internal_api import memory_summary

    least = float("inf")
    for _ in range(6):
        summary = memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True)
        least = min(least, float(summary.split("Plasma memory usage ")[1].split(" MiB")[0]))
        time.sleep(0.5)
    return least


@pytest.fixture(scope="module")
def synchronous(cluster: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run at staleness 0 in which half of the prompts cannot be scored and the others have equal rewards."""
    reward = {"function": "example_rewards:fails_for_odd_sums"}
    return run_loop("synchronous", model, tmp_path_factory.mktemp("runs"), reward=reward, sync={"max_staleness": 0})


def test_every_group_is_trained_once_and_the_account_balances(finished: Run) -> None:
    status = finished.status
    assert (status.issued, status.trained, status.pending, dict(status.dropped)) == (16, 16, 0, {})
    rows = pandas.read_parquet(finished.directory / "trajectories")
    assert len(rows) == 16 * 4
    assert sorted(rows.group_number.unique()) == list(range(16))
    assert (rows.step == rows.group_number // 4).all()


def test_versions_only_grow_and_staleness_keeps_its_bound(finished: Run) -> None:
    metrics = read_metrics(finished.directory)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert max(row["staleness_max"] for row in metrics) == 1
    assert metrics[0]["staleness_max"] == 0
    for worker in {sync.worker_id for sync in read_syncs(finished.directory)}:
        versions = [s.version for s in read_syncs(finished.directory) if s.worker_id == worker]
        assert versions == sorted(set(versions))


def test_workers_and_learner_are_on_different_nodes(finished: Run) -> None:
    nodes = {path.read_text() for path in finished.directory.parent.glob("stale-worker-*.node")}
    assert len(nodes) == 1
    assert ray.get_runtime_context().get_node_id() not in nodes


def mapped_by_raylets(folder: Path) -> int:
    """How many of this test's Ray nodes keep their object store in `folder` (the file itself has no name any more)."""
    raylets = [child for child in psutil.Process().children(recursive=True) if child.name() == "raylet"]
    return sum(str(folder) in Path(f"/proc/{raylet.pid}/maps").read_text() for raylet in raylets)


def test_weights_arrive_where_the_learners_shared_memory_is_not(finished: Run, cluster: Folders) -> None:
    assert mapped_by_raylets(cluster.learner) == mapped_by_raylets(cluster.rollout) == 1
    staged_in = {path.read_text() for path in finished.directory.parent.glob("stale-worker-*.staging")}
    assert staged_in == {str(cluster.staging)}
    assert list(cluster.staging.iterdir()) == []
    assert min(sync.num_bytes for sync in read_syncs(finished.directory)) > 0


def test_at_staleness_1_both_sides_are_busy_at_once(finished: Run) -> None:
    spans = read_spans(finished.directory)
    generate = union(s for s in spans if s.name == "generate")
    train = union(s for s in spans if s.name == "train")
    assert overlap_s(generate, train) > 0


def test_weights_travel_in_the_engines_names_and_are_all_used(finished: Run, model: Path) -> None:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", framework="pt") as file:
        num_bytes = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - not a dict
    assert {sync.num_bytes for sync in read_syncs(finished.directory)} == {num_bytes}
    final = AutoModelForCausalLM.from_pretrained(finished.directory / "checkpoints" / "final")
    start = AutoModelForCausalLM.from_pretrained(model)
    moved = [not torch.equal(a, b) for a, b in zip(final.parameters(), start.parameters(), strict=True)]
    assert any(moved)


def test_held_out_prompts_are_evaluated_before_and_after(finished: Run) -> None:
    evaluations = read_evaluations(finished.directory)
    assert [(e.version, e.num_samples) for e in evaluations] == [(0, 16), (4, 16)]


def test_objects_of_old_versions_are_released(finished: Run) -> None:
    one_version_mib = read_syncs(finished.directory)[0].num_bytes / 2**20
    assert one_version_mib > 1
    # Both nodes' stores hold the current version; three were published by then, six copies in all.
    assert finished.last_step_mib < 3 * one_version_mib


def test_staleness_0_is_the_synchronous_loop(synchronous: Run) -> None:
    assert [row["staleness_max"] for row in read_metrics(synchronous.directory)] == [0, 0, 0, 0]
    spans = read_spans(synchronous.directory)
    generate = union(s for s in spans if s.name == "generate")
    assert overlap_s(generate, union(s for s in spans if s.name == "train")) == 0


def test_equal_rewards_move_the_version_and_send_no_weights(synchronous: Run) -> None:
    assert [row["num_updates"] for row in read_metrics(synchronous.directory)] == [0, 0, 0, 0]
    assert synchronous.status.published_version == 4
    assert {sync.num_bytes for sync in read_syncs(synchronous.directory)} == {0}


def test_a_group_that_cannot_be_scored_is_replaced_and_counted(synchronous: Run) -> None:
    assert synchronous.status.trained == 16
    assert synchronous.status.dropped["reward_error"] == synchronous.status.issued - 16 > 0


def test_a_worker_that_fails_stops_the_learner_with_its_traceback(cluster: None, model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="no engine on this host"):
        run_loop("broken", model, tmp_path, engine=broken_engine)
