"""Checkpoints: the same bytes back, every flipped byte found, and after a kill at any instant one that loads."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import plan_for, tiny_group, tiny_policy
from transformers import AutoModelForCausalLM

from learner.checkpoint import export_final, find_checkpoint, find_fault, load_checkpoint, save_checkpoint
from learner.optim import Optimizer
from learner.policy import Policy
from learner.publish import published_digest
from learner.step import train_step
from shared.config import Config
from shared.errors import CheckpointError
from shared.records import Calibration, Mismatch

CALIBRATION = Calibration(Mismatch(500.0, -0.002, 0.004, 0.002), None, 3, 0.002, 1.5)
KINDS = [("dense", True), ("dense", False), ("moe", False), ("moe", True)]
# The schedule and the decay see to it that a lost update count or step counter shows in the weights.
LEARNER: dict[str, Any] = {"schedule": "linear", "warmup_updates": 2, "weight_decay": 0.1, "minibatches": 2}


def train(policy: Policy, optimizer: Optimizer, config: Config, steps: range) -> None:
    for step in steps:
        groups = [tiny_group(2 * step + n, [1.0, 0.0, 0.5]) for n in range(2)]
        train_step(policy, optimizer, groups, plan_for(groups, seed=step), config)


def make(path: Path, kind: str = "dense", *, tied: bool = False) -> tuple[Policy, Optimizer, Config]:
    policy, config = tiny_policy(path, kind, tied=tied, **LEARNER)
    (path / "tokenizer.json").write_text("{}")
    return policy, Optimizer(policy, config), config


def save(folder: Path, policy: Policy, optimizer: Optimizer, version: int, keep: int = 2, digest: str = "d") -> Path:
    return save_checkpoint(
        folder, policy, optimizer, version=version, weights_digest=digest, calibration=CALIBRATION, keep=keep
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def state_of(policy: Policy, optimizer: Optimizer) -> dict[str, bytes]:
    tensors = optimizer.state_tensors() | dict(policy.model.state_dict())
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_training_goes_on_as_if_never_stopped(tmp_path: Path, kind: str, tied: bool) -> None:
    policy, optimizer, config = make(tmp_path / "source", kind, tied=tied)
    train(policy, optimizer, config, range(2))
    path = save(tmp_path / "checkpoints", policy, optimizer, 2, digest=published_digest(policy, config))
    at_save = state_of(policy, optimizer)
    train(policy, optimizer, config, range(2, 4))

    resumed, restored, state = load_checkpoint(path, config)
    assert (state.version, state.num_updates) == (2, 4)
    assert state.weights_digest == published_digest(resumed, config) != published_digest(policy, config)
    assert state_of(resumed, restored) == at_save
    train(resumed, restored, config, range(2, 4))
    assert restored.num_updates == optimizer.num_updates == 8
    assert state_of(resumed, restored) == state_of(policy, optimizer) != at_save
    assert find_fault(path) is None  # training goes on in memory, not in the files that it came from


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_the_model_folder_loads_in_plain_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    policy, optimizer, config = make(tmp_path / "source", kind, tied=tied)
    train(policy, optimizer, config, range(1))
    path = save(tmp_path / "checkpoints", policy, optimizer, 1)
    again = AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float32)
    for (name, ours), theirs in zip(policy.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert (path / "model" / "tokenizer.json").read_text() == "{}"


def test_an_optimizer_without_an_update_round_trips(tmp_path: Path) -> None:
    policy, optimizer, config = make(tmp_path / "source")
    path = save(tmp_path / "checkpoints", policy, optimizer, 3)  # three steps without a signal
    resumed, restored, state = load_checkpoint(path, config)
    assert (restored.state_tensors(), restored.num_updates, state.version) == ({}, 0, 3)
    train(policy, optimizer, config, range(3, 5))
    train(resumed, restored, config, range(3, 5))
    assert state_of(resumed, restored) == state_of(policy, optimizer)


def test_the_random_state_comes_back(tmp_path: Path) -> None:
    policy, optimizer, config = make(tmp_path / "source")
    path = save(tmp_path / "checkpoints", policy, optimizer, 0)
    drawn = torch.rand(3)
    load_checkpoint(path, config)
    assert torch.equal(torch.rand(3), drawn)


def test_a_resumed_policy_saves_after_its_checkpoint_is_gone(tmp_path: Path) -> None:
    policy, optimizer, config = make(tmp_path / "source")
    folder = tmp_path / "checkpoints"
    resumed, restored, _ = load_checkpoint(save(folder, policy, optimizer, 1, keep=1), config)
    for version in (2, 3):
        path = save(folder, resumed, restored, version, keep=1)
    assert names(folder) == ["step-000003"]
    assert (path / "model" / "tokenizer.json").exists()


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_a_flipped_byte_in_any_file_is_found_and_the_older_one_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy, optimizer, config = make(tmp_path / "source")
    folder = tmp_path / "checkpoints"
    older = save(folder, policy, optimizer, 1)
    train(policy, optimizer, config, range(1))
    newer = save(folder, policy, optimizer, 2)
    files = [file for file in newer.rglob("*") if file.is_file()]
    assert {"model.safetensors", "config.json", "tokenizer.json", "optimizer.safetensors", "state.json"} <= {
        file.name for file in files
    }
    for file in files:
        for position in (0, file.stat().st_size // 2, file.stat().st_size - 1):
            flip(file, position)
            caplog.clear()
            assert find_checkpoint(folder, 9) == older
            (record,) = caplog.records
            assert (record.levelno, str(file) in record.getMessage()) == (logging.WARNING, True)
            flip(file, position)
            assert find_checkpoint(folder, 9) == newer


def test_every_byte_of_the_state_counts(tmp_path: Path) -> None:
    policy, optimizer, config = make(tmp_path / "source")
    path = save(tmp_path / "checkpoints", policy, optimizer, 1)
    for position in range((path / "state.json").stat().st_size):
        flip(path / "state.json", position)
        assert find_fault(path, read_files=False) is not None, position
        if position % 100 == 0:
            with pytest.raises(CheckpointError, match=r"state\.json"):
                load_checkpoint(path, config)
        flip(path / "state.json", position)
    assert find_fault(path) is None


def test_missing_added_and_cut_files_are_found(tmp_path: Path) -> None:
    policy, optimizer, _ = make(tmp_path / "source")
    path = save(tmp_path / "checkpoints", policy, optimizer, 1)
    weights = path / "model" / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-4])
    assert f"{weights} has {len(data) - 4} bytes, {len(data)} were written" in str(find_fault(path, read_files=False))
    weights.unlink()
    assert f"{weights} is missing" in str(find_fault(path, read_files=False))
    weights.write_bytes(data)
    (path / "model" / "model.safetensors.index.json").write_text("{}")
    assert "index.json is not of this checkpoint" in str(find_fault(path, read_files=False))


def test_a_state_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, optimizer, _ = make(tmp_path / "source")
    monkeypatch.setattr("learner.checkpoint.FORMAT_VERSION", 7)
    path = save(tmp_path / "checkpoints", policy, optimizer, 1)
    monkeypatch.undo()
    assert "format version 7, this release reads 2" in str(find_fault(path))


def test_the_newest_that_is_not_too_new_is_found(tmp_path: Path) -> None:
    policy, optimizer, _ = make(tmp_path / "source")
    folder = tmp_path / "checkpoints"
    assert find_checkpoint(folder, 9) is None
    for version in (2, 10, 1_000_000):
        save(folder, policy, optimizer, version, keep=3)
    (folder / "final").mkdir()
    found = {most: find_checkpoint(folder, most) for most in (1, 2, 9, 10, 2_000_000)}
    assert [path.name if path else None for path in found.values()] == [
        None, "step-000002", "step-000002", "step-000010", "step-1000000",
    ]  # fmt: skip


def test_only_the_newest_whole_ones_are_kept(tmp_path: Path) -> None:
    policy, optimizer, _ = make(tmp_path / "source")
    folder = tmp_path / "checkpoints"
    for version in (5, 10, 15):
        save(folder, policy, optimizer, version)
    assert names(folder) == ["step-000010", "step-000015"]
    (folder / "step-000015" / "optimizer.safetensors").unlink()
    save(folder, policy, optimizer, 20)
    assert names(folder) == ["step-000010", "step-000020"]


def test_a_version_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    policy, optimizer, config = make(tmp_path / "source")
    folder = tmp_path / "checkpoints"
    weights = save(folder, policy, optimizer, 1) / "model" / "model.safetensors"
    first = weights.stat().st_ino
    save(folder, policy, optimizer, 1)
    assert weights.stat().st_ino == first
    flip(weights, 99)
    save(folder, policy, optimizer, 1)
    assert find_fault(folder / "step-000001") is None
    train(policy, optimizer, config, range(1))
    path = save(folder, policy, optimizer, 1, digest="of other weights")
    assert load_checkpoint(path, config)[2].weights_digest == "of other weights"
    assert names(folder) == ["step-000001"]


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path, mask: int, mode: int) -> None:
    policy, optimizer, _ = make(tmp_path / "source")
    with umask(mask):
        path = save(tmp_path / "checkpoints", policy, optimizer, 1)
        policy.save(tmp_path / "saved")
        export_final(path, tmp_path / "checkpoints" / "final")
    files = [file for folder in ("checkpoints", "saved") for file in (tmp_path / folder).rglob("*") if file.is_file()]
    assert len(files) > 8
    assert {file.stat().st_mode & 0o777 for file in files} == {mode}


@pytest.mark.parametrize("links", [True, False])
def test_final_is_the_checkpoints_model_and_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(1, "links are not allowed here")

    policy, optimizer, config = make(tmp_path / "source", "moe")
    folder = tmp_path / "checkpoints"
    if not links:
        monkeypatch.setattr("os.link", refuse)
    for version in (1, 2):  # the second one replaces the first
        train(policy, optimizer, config, range(version - 1, version))
        path = save(folder, policy, optimizer, version, keep=1)
        export_final(path, folder / "final")
    assert names(folder) == ["final", "step-000002"]
    assert names(folder / "final") == names(path / "model")
    assert all(file.samefile(path / "model" / file.name) is links for file in (folder / "final").iterdir())
    shutil.rmtree(path)
    again = AutoModelForCausalLM.from_pretrained(folder / "final", dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), again.parameters(), strict=True))


def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    policy, optimizer, _ = make(tmp_path / "source")
    folder = tmp_path / "checkpoints"
    save(folder, policy, optimizer, 1)
    monkeypatch.setattr("learner.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save(folder, policy, optimizer, 2)
    assert names(folder) == ["step-000001"]


def test_all_is_on_disk_before_the_name_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    target = tmp_path / "checkpoints" / "step-000001"

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        assert target.exists() == (path == target.parent)  # the last one, after the rename
        synced.append(path.relative_to(target.parent))

    monkeypatch.setattr("os.fsync", fsync)
    policy, optimizer, _ = make(tmp_path / "source")
    save(target.parent, policy, optimizer, 1)
    written = [target, *target.rglob("*")]
    staged = {Path(f".{target.name}.writing") / path.relative_to(target) for path in written}
    assert set(synced) == staged | {Path()}


KILL_AT_EVERY_INSTANT = """
import json, os, shutil, signal, sys
from pathlib import Path
from learner.checkpoint import find_checkpoint, find_fault, load_checkpoint, save_checkpoint
from test_checkpoint import make, names, save, state_of, train

root = Path(sys.argv[1])
policy, optimizer, config = make(root / "source")
saved = save(root / "first", policy, optimizer, 1)
states = {1: state_of(policy, optimizer)}
train(policy, optimizer, config, range(1))
states[2] = state_of(policy, optimizer)
CHANGES = {"open", "os.rename", "os.mkdir", "os.chmod", "os.remove", "os.rmdir", "shutil.rmtree", "fsync"}

def save_until_killed(folder, instant):
    left = instant
    def at(event, arguments):
        nonlocal left
        if event in CHANGES and (event == "fsync" or str(folder) in str(arguments[0])):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    fsync = os.fsync
    os.fsync = lambda descriptor: (at("fsync", ()), fsync(descriptor))[1]
    sys.addaudithook(at)
    save(folder, policy, optimizer, 2, keep=1)
    os._exit(0)

for instant in range(1000):
    folder = root / f"at-{instant}"
    shutil.copytree(root / "first", folder)
    child = os.fork()
    if child == 0:
        save_until_killed(folder, instant)
    _, status = os.waitpid(child, 0)
    second = folder / "step-000002"
    whole = not second.exists() or find_fault(second) is None
    left = names(folder)
    resumed, restored, state = load_checkpoint(find_checkpoint(folder, 2), config)
    exact = state_of(resumed, restored) == states[state.version]
    save(folder, policy, optimizer, 2, keep=1)
    row = {"status": status, "whole": whole, "left": left, "version": state.version, "exact": exact}
    print(json.dumps(row | {"then": names(folder)}), flush=True)
    if status == 0:
        break
    shutil.rmtree(folder)
"""


@pytest.mark.full
def test_a_kill_at_any_instant_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    path = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", KILL_AT_EVERY_INSTANT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *killed, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(killed) > 20
    assert {row["status"] for row in killed} == {signal.SIGKILL}
    assert last["status"] == 0
    assert all(row["whole"] and row["exact"] and row["then"] == ["step-000002"] for row in [*killed, last])
    versions = [row["version"] for row in killed]
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}  # before and after the rename
    assert any(name.endswith(".writing") for row in killed for name in row["left"])
    assert any(name.endswith(".old") for row in killed for name in row["left"])
