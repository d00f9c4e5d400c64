"""Checkpoints: all that the learner needs to go on after a committed step, as `checkpoints/step-000010/`.

    model/                 what Policy.save writes: float32 weights, config, tokenizer; loads with transformers
    optimizer.safetensors  AdamW's moments and step counters; the state of torch's CPU random generator
    state.json             CheckpointState: version, updates, weights digest; BLAKE3 digest and size of every other file

The number in the name is the policy version: 10 means that steps 0 to 9 are in these weights. Gate: a folder has its
name only once it is complete on disk (learner.folders), and `find_checkpoint` has read every byte of what it returns.
Nothing is pickled.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from learner.folders import files_in, remove_folder, remove_leftovers, staged_folder
from learner.optim import Optimizer
from learner.policy import Policy
from shared.config import Config
from shared.errors import CheckpointError
from shared.plans import calibration_of
from shared.records import Calibration

FORMAT_VERSION = 2
MODEL, OPTIMIZER, STATE = "model", "optimizer.safetensors", "state.json"
_RANDOM_STATE = "torch_cpu_random_state"  # without a slash, which the names of the optimizer's tensors have
_CHUNK_BYTES = 2**20

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileRecord:
    """`digest` is the BLAKE3 hex of the file's bytes."""

    num_bytes: int
    digest: str


@dataclass(frozen=True)
class CheckpointState:
    """`version`: steps that are in the weights. `num_updates`: optimizer updates applied, which drive the schedule.

    `weights_digest`: of the weights as published (learner.publish.published_digest). `calibration`: for the next step.
    `files`: by path in the folder.
    """

    version: int
    num_updates: int
    weights_digest: str
    calibration: Calibration
    files: Mapping[str, FileRecord]


def save_checkpoint(
    folder: Path,
    policy: Policy,
    optimizer: Optimizer,
    *,
    version: int,
    weights_digest: str,
    calibration: Calibration,
    keep: int,
) -> Path:
    """Write the state after `version` steps, then remove all older checkpoints but the newest `keep` - 1.

    Does not write again what is there already, with these weights and unbroken. Returns the checkpoint's folder.
    """
    target = folder / f"step-{version:06d}"
    remove_leftovers(folder, "step-*")
    if not _holds(target, weights_digest):
        with staged_folder(target, durable=True) as staging:
            policy.save(staging / MODEL)
            tensors = optimizer.state_tensors() | {_RANDOM_STATE: torch.get_rng_state()}
            save_file(tensors, staging / OPTIMIZER)
            files = {str(file.relative_to(staging)): _record(file) for file in files_in(staging)}
            state = CheckpointState(version, optimizer.num_updates, weights_digest, calibration, files)
            (staging / STATE).write_text(_state_text(state), encoding="utf-8")
    _prune(folder, version, keep)
    return target


def find_checkpoint(folder: Path, max_version: int) -> Path | None:
    """The newest unbroken checkpoint of at most `max_version` steps; None without any. Reads all of its bytes.

    One with another byte than when it was written is passed over with a warning that names the file.
    """
    for version, path in _checkpoints(folder):
        if version > max_version:
            continue
        fault = find_fault(path)
        if fault is None:
            return path
        _logger.warning("%s; going back to the next older checkpoint", fault)
    return None


def load_checkpoint(path: Path, config: Config) -> tuple[Policy, Optimizer, CheckpointState]:
    """Policy and optimizer as they were, bit for bit, from a folder that `find_checkpoint` returned.

    Sets torch's CPU random state as a side effect. CheckpointError when state.json is broken; ConfigError as
    `Policy.load`.
    """
    state = _read_state(path)
    policy = Policy.load(
        config.model_copy(update={"model": config.model.model_copy(update={"path": str(path / MODEL)})})
    )
    policy.source = Path(config.model.path)  # this checkpoint may be pruned before the next one copies its tokenizer
    optimizer = Optimizer(policy, config)
    tensors = load_file(path / OPTIMIZER)
    torch.set_rng_state(tensors.pop(_RANDOM_STATE))
    optimizer.load_state_tensors(tensors, state.num_updates)
    return policy, optimizer, state


def export_final(checkpoint: Path, target: Path) -> None:
    """Make `target` the checkpoint's model folder, by hard links where the file system has them: nothing is copied."""
    with staged_folder(target, durable=True) as staging:
        shutil.copytree(checkpoint / MODEL, staging, copy_function=_link_or_copy)


def find_fault(path: Path, *, read_files: bool = True) -> str | None:
    """The first file of the checkpoint in `path` that is not what was written, and how it differs; None if all are.

    Without `read_files` only state.json is read, and of the others names and sizes are compared.
    """
    try:
        state = _read_state(path)
        found = {str(file.relative_to(path)) for file in files_in(path)} - {STATE}
        if differing := sorted(found ^ state.files.keys()):
            return f"{path / differing[0]} is {'not of this checkpoint' if differing[0] in found else 'missing'}"
        for name, record in state.files.items():
            num_bytes = (path / name).stat().st_size
            if num_bytes != record.num_bytes:
                return f"{path / name} has {num_bytes} bytes, {record.num_bytes} were written"
            if read_files and _record(path / name) != record:
                return f"{path / name} has other bytes than were written"
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _holds(path: Path, weights_digest: str) -> bool:
    return path.exists() and find_fault(path) is None and _read_state(path).weights_digest == weights_digest


def _prune(folder: Path, version: int, keep: int) -> None:
    num_kept = 0
    for other, path in _checkpoints(folder):
        if other > version:  # not of this run's past, as with a ledger from a backup: not ours to judge
            continue
        if num_kept < keep and find_fault(path, read_files=False) is None:
            num_kept += 1
        else:
            remove_folder(path)


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(version, path) of everything with a checkpoint's name, newest first."""
    named = ((re.fullmatch(r"step-(\d{6,})", path.name), path) for path in folder.glob("step-*"))
    return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)


def _state_text(state: CheckpointState) -> str:
    """state.json; its last entry is the digest of the others, so that each state has exactly one text."""
    values = {"format_version": FORMAT_VERSION, **asdict(state)}
    return json.dumps(values | {"digest": blake3(json.dumps(values).encode()).hexdigest()}, indent=1)


def _read_state(path: Path) -> CheckpointState:
    try:
        text = (path / STATE).read_text(encoding="utf-8")
        values = json.loads(text)
        version = values.pop("format_version")
        values.pop("digest")
        values["calibration"] = calibration_of(values["calibration"])
        values["files"] = {name: FileRecord(**record) for name, record in values["files"].items()}
        state = CheckpointState(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / STATE} cannot be read: {error!r}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path / STATE} has format version {version}, this release reads {FORMAT_VERSION}")
    if text != _state_text(state):
        raise CheckpointError(f"{path / STATE} has other bytes than were written")
    return state


def _record(file: Path) -> FileRecord:
    hasher, num_bytes = blake3(), 0
    with file.open("rb", buffering=0) as opened:  # not memory-mapped: there a bad disk block kills the process
        while chunk := opened.read(_CHUNK_BYTES):
            hasher.update(chunk)
            num_bytes += len(chunk)
    return FileRecord(num_bytes, hasher.hexdigest())


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
