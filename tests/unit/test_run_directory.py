"""Which folder a command works in, and what a run that goes on may change."""

import asyncio
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.config import Config
from shared.errors import ConfigError, LockHeld
from shared.hub import Hub
from shared.ledger_rows import GroupRow, GroupState
from shared.locks import FileLock
from shared.records import GroupId, Identity
from shared.run_directory import LEARNER_LOCK, open_for_learner, open_for_rollout
from shared.run_files import read_ledger, read_run_id, read_steps
from shared.store import Store

MakeConfig = Callable[..., Config]


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> Callable[..., Config]:
    def make(**sections: dict[str, Any]) -> Config:
        return make_config(run={"name": "one", "directory": str(tmp_path)}, **sections)

    return make


def issue(folder: Path, num_groups: int) -> None:
    store = Store(folder)
    rows = [GroupRow(GroupId(n), GroupState.WAITING, 0, "w", 0.0) for n in range(num_groups)]
    store.save_groups(rows)
    store.close()


def test_a_new_run_gets_an_identity_that_it_keeps(config: Callable[..., Config]) -> None:
    folder = open_for_rollout(config())
    identity = read_run_id(folder)
    assert len(identity) == 16
    assert open_for_learner(config(), resume=False, alone=False) == folder  # the workers came first
    assert read_run_id(folder) == identity


def test_only_a_run_that_has_not_begun_is_joined_without_resume(config: Callable[..., Config]) -> None:
    open_for_learner(config(), resume=False, alone=True)
    with pytest.raises(ConfigError, match="exists already and is never overwritten.*--resume"):
        open_for_learner(config(), resume=False, alone=True)


def test_what_would_change_the_run_is_refused_with_both_values(config: Callable[..., Config]) -> None:
    folder = open_for_learner(config(), resume=False, alone=True)
    before = (folder / "config.json").read_text()
    with pytest.raises(ConfigError, match=r"learner\.lr = 0\.5, the run has 1e-06"):
        open_for_learner(config(learner={"lr": 0.5}), resume=True, alone=True)
    with pytest.raises(ConfigError, match=r"sampling\.temperature = 0\.7, the run has 1\.0"):
        open_for_rollout(config(sampling={"temperature": 0.7}))
    assert (folder / "config.json").read_text() == before
    open_for_learner(config(rollout={"workers": 3}), resume=True, alone=True)
    open_for_rollout(config(rollout={"memory_share": 0.3}))


def test_steps_may_grow_and_not_fall_below_what_was_issued(config: Callable[..., Config]) -> None:
    def steps(num: int, **learner: Any) -> Config:
        return config(learner={"steps": num, "prompts_per_step": 2, "minibatches": 1, **learner})

    folder = open_for_learner(steps(10), resume=False, alone=True)
    issue(folder, 5)
    with pytest.raises(ConfigError, match=r"learner\.steps = 2: .* has issued groups for 3 steps already"):
        open_for_learner(steps(2), resume=True, alone=True)
    open_for_learner(steps(3), resume=True, alone=True)
    open_for_learner(steps(20), resume=True, alone=True)


def test_a_schedule_with_an_end_keeps_its_end(config: Callable[..., Config]) -> None:
    open_for_learner(config(learner={"steps": 4, "schedule": "linear"}), resume=False, alone=True)
    with pytest.raises(ConfigError, match="the linear schedule .* ends at 4 steps"):
        open_for_learner(config(learner={"steps": 8, "schedule": "linear"}), resume=True, alone=True)


def test_a_run_that_a_learner_trains_is_left_alone(config: Callable[..., Config]) -> None:
    folder = open_for_learner(config(), resume=False, alone=True)
    before = (folder / "config.json").read_text()
    with FileLock(folder / LEARNER_LOCK), pytest.raises(LockHeld, match="is held by process"):
        open_for_learner(config(rollout={"workers": 3}), resume=True, alone=True)
    assert (folder / "config.json").read_text() == before


def test_what_a_kill_left_in_the_middle_of_a_change_is_undone_by_a_resume(config: Callable[..., Config]) -> None:
    folder = open_for_learner(config(), resume=False, alone=True)
    issue(folder, 1)
    leave_a_hot_journal(folder / "ledger.sqlite")
    with pytest.raises(Exception, match="killed in the middle of a change"):
        read_steps(folder)
    open_for_learner(config(), resume=True, alone=True)
    assert [row.group.number for row in read_ledger(folder)[0]] == [0]


def test_a_hub_that_was_killed_at_its_very_first_start_left_an_empty_ledger(config: Callable[..., Config]) -> None:
    folder = open_for_learner(config(), resume=False, alone=True)
    (folder / "ledger.sqlite").touch()
    assert read_ledger(folder) == ([], [])
    open_for_learner(config(), resume=True, alone=True)


def test_a_run_goes_on_from_the_model_it_started_with(config: Callable[..., Config]) -> None:
    first = Identity("model-a", "tokenizer", "1", "code", {})
    folder = open_for_learner(config(), resume=False, alone=True)

    async def come(identity: Identity) -> None:
        hub = Hub(config(), folder, poll_s=0.1)
        try:
            await hub.sit_down("host:1", identity)
        finally:
            hub.close()

    asyncio.run(come(first))
    asyncio.run(come(replace(first, code="a newer release")))
    with pytest.raises(ConfigError, match="model: this learner has model-b, the run was started with model-a"):
        asyncio.run(come(replace(first, model="model-b")))


def leave_a_hot_journal(path: Path) -> None:
    """As a kill between the journal's sync and its removal does: pages are changed, the journal has the old ones."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA cache_size = 1")
    database.execute("BEGIN IMMEDIATE")
    database.executemany("INSERT INTO payloads VALUES (?, 0, ?)", [(number, b"x" * 4096) for number in range(100)])
    journal, pages = path.with_name(path.name + "-journal").read_bytes(), path.read_bytes()
    database.execute("ROLLBACK")
    database.close()
    path.write_bytes(pages)
    path.with_name(path.name + "-journal").write_bytes(journal)


def test_a_full_disk_is_a_failure_although_the_event_of_it_cannot_be_written(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_for_learner(config(), resume=False, alone=True)

    def no_room(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    async def story() -> str | None:
        hub = Hub(config(), folder, poll_s=0.1)
        monkeypatch.setattr(hub._core.files["events"], "append", no_room)
        monkeypatch.setattr(hub._core.store, "save_groups", no_room)
        try:
            with pytest.raises(OSError, match="No space left"):
                await hub.next_work("w0", 0, (), 1)
            return (await hub.status()).failure
        finally:
            hub.close()

    assert "No space left on device" in (asyncio.run(story()) or "")
