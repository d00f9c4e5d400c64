"""The store: what was acknowledged is there after any kill, once."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from shared.errors import SchemaError
from shared.ledger import Ledger
from shared.ledger_rows import GroupRow, GroupState, LedgerRules
from shared.records import ClipRange, Group, GroupId, StepPlan, Ticket
from shared.schema import encode_group
from shared.store import Store

MakeGroup = Callable[..., Group]
RULES = LedgerRules(prompts_per_step=2, max_staleness=1, steps=2)
WORKER = "worker-0"


def everything(make_group: MakeGroup, directory: Path) -> list[Callable[[], None]]:
    """A whole run of two steps as a list of store operations, each ending at an instant where a kill may come."""
    ledger, store = Ledger(RULES), Store(directory)
    tickets = [*ledger.issue(WORKER, 0, 4, now_s=0.0)]
    operations: list[Callable[[], None]] = [
        lambda: store.save_groups([ledger.row(ticket.group) for ticket in tickets]),
    ]

    def drop() -> None:
        ledger.give_up(WORKER, tickets[3], "test", "why")
        store.save_groups([ledger.row(tickets[3].group)])
        tickets[3:] = ledger.issue(WORKER, 0, 1, now_s=1.5)
        store.save_groups([ledger.row(tickets[3].group)])

    def submit(index: int) -> None:
        ledger.submit(WORKER, tickets[index])
        store.save_ready(ledger.row(tickets[index].group), encode_group(make_group(tickets[index])))

    def begin(step: int) -> None:
        ledger.begin_step(StepPlan(step, tuple(ledger.take(step) or ()), 7, ClipRange(3e-4, 4e-4)))
        save_step(step)

    def commit(step: int) -> None:
        ledger.commit_step(step, f"digest-{step}")
        save_step(step)

    def save_step(step: int) -> None:
        row = ledger.step_row(step)
        store.save_step(row, [ledger.row(group) for group in row.plan.groups])

    def export(step: int) -> None:
        store.export_step(ledger.step_row(step).plan)

    def publish(step: int) -> None:
        store.save_published(ledger.publish(step + 1))

    operations += [drop, *(partial(submit, index) for index in range(4))]
    operations += [partial(call, step) for step in range(2) for call in (begin, commit, export, publish)]
    return operations


NUM_OPERATIONS = 14


@pytest.mark.parametrize("num_done", range(NUM_OPERATIONS + 1))
def test_a_kill_between_any_two_operations_loses_nothing(make_group: MakeGroup, tmp_path: Path, num_done: int) -> None:
    operations = everything(make_group, tmp_path)
    assert len(operations) == NUM_OPERATIONS
    for operation in operations[:num_done]:
        operation()

    store = Store(tmp_path)  # the first one is not closed: its process was killed
    ledger = Ledger.from_rows(RULES, *store.load())
    groups, _ = store.load()
    for row in groups:
        if row.state in (GroupState.READY, GroupState.TAKEN):
            assert store.payloads([row.group])
    for step in store.unexported_steps():
        store.export_step(step.plan)
    assert store.unexported_steps() == []
    assert trained_in_files(tmp_path) == [row.group.number for row in sorted(groups, key=lambda r: r.group)
                                          if row.state is GroupState.TRAINED]  # fmt: skip
    assert ledger.balance().trained == 2 * ledger.version
    if num_done == NUM_OPERATIONS:
        assert ledger.finished
        assert ledger.balance().dropped == {"test": 1}


def trained_in_files(directory: Path) -> list[int]:
    files = sorted((directory / "trajectories").glob("step-*.parquet"))
    return [number for file in files for number in dict.fromkeys(pd.read_parquet(file)["group_number"].tolist())]


def committed_store(make_group: MakeGroup, directory: Path) -> tuple[Store, StepPlan]:
    for operation in everything(make_group, directory)[:8]:
        operation()
    store = Store(directory)
    (step,) = store.unexported_steps()
    return store, step.plan


@pytest.mark.parametrize(
    ("instant", "visible"),
    [("os.fsync", []), ("pathlib.Path.replace", []), ("shared.store.Store.clear_payloads", [0, 1])],
)
def test_a_kill_inside_the_export_is_made_good(
    make_group: MakeGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant: str, visible: list[int]
) -> None:
    store, plan = committed_store(make_group, tmp_path)

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(instant, kill)
        with pytest.raises(Killed):
            store.export_step(plan)
    assert trained_in_files(tmp_path) == visible
    back = Store(tmp_path)
    (step,) = back.unexported_steps()
    assert back.export_step(step.plan).name == "step-000000.parquet"
    assert trained_in_files(tmp_path) == [0, 1]
    assert [file.name for file in (tmp_path / "trajectories").iterdir()] == ["step-000000.parquet"]
    with pytest.raises(KeyError, match=r"group 0\.0"):
        back.payloads(plan.groups)


def test_rows_come_back_as_they_were_stored(tmp_path: Path) -> None:
    rows = [
        GroupRow(GroupId(0, 0), GroupState.DROPPED, 1, WORKER, 1.7e9 + 0.123, "reward_error", "3 for 4"),
        GroupRow(GroupId(0, 1), GroupState.GENERATING, 0, "worker-1", 1.7e9),
    ]
    Store(tmp_path).save_groups(rows)
    assert Store(tmp_path).load() == (rows, [])


def test_a_group_and_its_bytes_are_stored_together_or_not_at_all(tmp_path: Path) -> None:
    store = Store(tmp_path)
    row = GroupRow(GroupId(0), GroupState.READY, 0, WORKER, 0.0)
    with pytest.raises(sqlite3.Error):
        store.save_ready(row, None)  # type: ignore[arg-type]
    assert store.load() == ([], [])
    store.save_ready(row, b"bytes")
    assert store.payloads([row.group]) == [b"bytes"]


def test_a_database_of_another_layout_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(SchemaError, match=r"layout version 99, this release uses 3.*choose another run\.name"):
        Store(tmp_path)


def test_every_write_is_synced_and_needs_no_shared_memory(tmp_path: Path) -> None:
    database = Store(tmp_path)._database
    assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert database.execute("PRAGMA synchronous").fetchone() == (2,)


ACKNOWLEDGE_FOREVER = """
import sys
from pathlib import Path
from shared.ledger_rows import GroupRow, GroupState
from shared.records import GroupId
from shared.store import Store

store = Store(Path(sys.argv[1]))
for number in range(10**6):
    store.save_ready(GroupRow(GroupId(number), GroupState.READY, 0, "w", 0.0), bytes([number % 256]) * 100_000)
    print(number, flush=True)
"""


def test_everything_acknowledged_before_a_kill_is_there(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ACKNOWLEDGE_FOREVER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout
    acknowledged = [int(process.stdout.readline()) for _ in range(20)]
    process.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in process.stdout if line.endswith("\n")]
    process.wait()

    store = Store(tmp_path)
    stored = {row.group.number for row in store.load()[0]}
    assert stored >= set(acknowledged)
    assert len(stored) - len(acknowledged) <= 1  # the one that was stored and not yet acknowledged
    for number in stored:
        assert store.payloads([GroupId(number)]) == [bytes([number % 256]) * 100_000]


def test_a_repeated_ticket_is_one_row(tmp_path: Path) -> None:
    store, ticket = Store(tmp_path), Ticket(GroupId(3))
    for attempt in (0, 1):
        store.save_groups([GroupRow(ticket.group, GroupState.GENERATING, attempt, WORKER, 0.0)])
    assert [row.attempt for row in store.load()[0]] == [1]


def test_a_commit_that_meets_a_reader_leaves_the_store_usable(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store._database.execute("PRAGMA busy_timeout = 50")
    reader = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM groups").fetchone()
    row = GroupRow(GroupId(0), GroupState.WAITING, 0, "w", 0.0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        store.save_groups([row])
    assert store.load()[0] == []  # what was refused is not read as if it were on disk
    reader.close()
    store.save_groups([row])
    assert store.load()[0] == [row]
    store.close()
