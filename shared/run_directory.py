"""Which folder a command works in: made for a new run, opened for one that goes on, and never mixed up.

`config.json` there is the run's: `train` and `learner` write it, `rollout` only if it comes first. Gate: a run that has
begun to train goes on only when that was asked for, and only with options that do not change what it computes.
"""

import json
import math
import os
import secrets
from contextlib import suppress
from pathlib import Path

from shared.config import Config
from shared.config_file import load_resolved
from shared.errors import ConfigError
from shared.identity import LOCAL_OPTIONS, SHARED_OPTIONS
from shared.locks import FileLock
from shared.run_files import read_ledger, read_steps
from shared.store import heal

CONFIG_FILE = "config.json"
LEARNER_LOCK = "learner.lock"
RUN_ID = "run.id"  # tells this run from another one of its name
_LOCK_WAIT_S = 3.0  # a learner whose parent was killed ends within a second

# What a run that goes on may change: nothing of it enters into the weights. `learner.steps` is looked at by itself.
_FREE = {
    "run.directory", "model.path", "rollout.workers", "rollout.max_num_seqs", "rollout.memory_share",
    "rollout.threads", "rollout.lease_s", "rollout.group_timeout_s", "rollout.max_attempts",
    "learner.checkpoint_steps", "learner.keep_checkpoints", "learner.steps", "sync.bucket_mib",
}  # fmt: skip


def open_for_learner(config: Config, *, resume: bool, alone: bool) -> Path:
    """The run directory for `seqrelay train` (`alone`: nobody else may have made it) or `seqrelay learner`.

    ConfigError when it holds a run that was not to be resumed, holds none that was, or the config changed too much;
    LockHeld, which is one too, while a learner trains there.
    """
    folder = run_directory(config)
    if os.path.lexists(folder / "ledger.sqlite"):
        heal(folder)
    if resume:
        _may_go_on(config, folder)
    elif os.path.lexists(folder) and (alone or not _is_unbegun_run(folder)):
        raise ConfigError(
            f"run.name = {config.run.name!r}: {folder} exists already and is never overwritten. Go on with that run "
            f"by --resume, or choose another name (run.name=...)."
        )
    _make(folder)
    with FileLock(folder / LEARNER_LOCK, wait_s=_LOCK_WAIT_S):  # LockHeld, before anything is changed
        _write(folder, config)
    return folder


def open_for_rollout(config: Config) -> Path:
    """The run directory for `seqrelay rollout`: the run's if it is on this host, else one for logs and staging.

    ConfigError when the run is here and differs in an option that both sides share.
    """
    folder = run_directory(config)
    if (folder / CONFIG_FILE).is_file():
        changed = {name for name in _changes(load_resolved(folder / CONFIG_FILE), config) if name in SHARED_OPTIONS}
        _refuse(changed, folder, config, "workers would not fit to it")
    else:
        _make(folder)
        _write(folder, config)
    return folder


def run_directory(config: Config) -> Path:
    return (Path(config.run.directory) / config.run.name).resolve()


def find_run(text: str) -> Path:
    """The run directory that a command line names. ConfigError when it is none."""
    folder = Path(text).resolve()
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{text}: not a run directory (no {CONFIG_FILE} there). Give a folder such as runs/demo.")
    return folder


def _may_go_on(config: Config, folder: Path) -> None:
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"--resume: there is no run in {folder}. Leave --resume out to start it, or correct run.name (now "
            f"{config.run.name!r}) or run.directory."
        )
    before = load_resolved(folder / CONFIG_FILE)
    _refuse(_changes(before, config) - _FREE, folder, config, "it would not be the same run")
    num_issued = len({row.group.number for row in read_ledger(folder)[0]})
    least = math.ceil(num_issued / config.learner.prompts_per_step)
    if config.learner.steps < least:
        raise ConfigError(
            f"learner.steps = {config.learner.steps}: {folder} has issued groups for {least} steps already; give at "
            f"least that many."
        )
    if config.learner.steps != before.learner.steps and config.learner.schedule != "constant":
        raise ConfigError(
            f"learner.steps = {config.learner.steps}: the {config.learner.schedule} schedule of {folder} ends at "
            f"{before.learner.steps} steps; only a run with learner.schedule = constant can be made longer."
        )


def _is_unbegun_run(folder: Path) -> bool:
    """Whether this is a run, and one in which no step was begun: a rollout service came first."""
    if not (folder / CONFIG_FILE).is_file():
        return False
    return not (folder / "ledger.sqlite").exists() or not read_steps(folder)


def _changes(before: Config, after: Config) -> set[str]:
    old, new = before.model_dump(), after.model_dump()
    names = SHARED_OPTIONS | LOCAL_OPTIONS
    values = {name: name.split(".") for name in names}
    return {name for name, (section, key) in values.items() if old[section][key] != new[section][key]}


def _refuse(changed: set[str], folder: Path, config: Config, why: str) -> None:
    if not changed:
        return
    old, new = load_resolved(folder / CONFIG_FILE).model_dump(), config.model_dump()
    lines = []
    for name in sorted(changed):
        section, key = name.split(".")
        lines.append(f"{name} = {json.dumps(new[section][key])}, the run has {json.dumps(old[section][key])}")
    raise ConfigError(f"{folder} was started with other options, so {why}:\n" + "\n".join(lines))


def _make(folder: Path) -> None:
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), (folder / RUN_ID).open("x") as file:
            file.write(secrets.token_hex(8))
    except OSError as error:
        raise ConfigError(f"run.directory: {folder} cannot be made: {error.strerror}. Choose another.") from error


def _write(folder: Path, config: Config) -> None:
    """Complete or absent, for services that read it at the same time."""
    temporary = folder / f".{CONFIG_FILE}.{os.getpid()}"
    temporary.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / CONFIG_FILE)
