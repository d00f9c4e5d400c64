"""The run's durable state: `ledger.sqlite` (ledger rows, bytes of ready groups) and one Parquet file per trained step.

Every public method that writes is one transaction, synced to disk before it returns; a kill at any instant leaves the
state before or after it. A group's bytes stay in the database until its step's Parquet file is in place (temporary
file, sync, rename), so they are always in one of the two; `export_step` may be repeated.

A rollback journal, not WAL: SQLite's WAL does not work on network file systems.
"""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from shared.errors import SchemaError
from shared.ledger_rows import GroupRow, GroupState, StepRow
from shared.plans import plan_of, plan_text
from shared.records import Group, GroupId, StepPlan
from shared.schema import decode_group, groups_of_table, step_table

DATABASE_VERSION = 3

_TABLES = f"""
CREATE TABLE groups (
    number INTEGER, replacement INTEGER, state TEXT NOT NULL, attempt INTEGER NOT NULL, worker_id TEXT NOT NULL,
    issued_at_s REAL NOT NULL, reason TEXT NOT NULL, detail TEXT NOT NULL, oldest_version INTEGER,
    PRIMARY KEY (number, replacement)
);
CREATE TABLE payloads (number INTEGER, replacement INTEGER, payload BLOB NOT NULL, PRIMARY KEY (number, replacement));
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, plan TEXT NOT NULL, weights_digest TEXT, published INTEGER NOT NULL,
    incarnation INTEGER NOT NULL
);
PRAGMA user_version = {DATABASE_VERSION};
"""


class Store:
    """Opens the run directory, making `ledger.sqlite` and `trajectories/` when they are missing.

    SchemaError when the database was written by a release with another layout.
    """

    def __init__(self, run_directory: Path) -> None:
        self._trajectories = run_directory / "trajectories"
        self._trajectories.mkdir(parents=True, exist_ok=True)
        path = run_directory / "ledger.sqlite"
        # Explicit transactions only. An asyncio actor is built and run on different threads, never on two at once.
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = DELETE")
        self._database.execute("PRAGMA synchronous = FULL")
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if version == 0:
            with self._transaction():
                for statement in _TABLES.split(";"):
                    self._database.execute(statement)
        elif version != DATABASE_VERSION:
            self._database.close()
            raise SchemaError(
                f"{path} has layout version {version}, this release uses {DATABASE_VERSION}; "
                f"open it with the release that wrote it, or choose another run.name"
            )

    def close(self) -> None:
        self._database.close()

    def load(self) -> tuple[list[GroupRow], list[StepRow]]:
        """All rows, for `Ledger.from_rows`."""
        return group_rows(self._database), step_rows(self._database)

    def save_groups(self, rows: Sequence[GroupRow]) -> None:
        """Groups that were issued, dropped or lost."""
        with self._transaction():
            self._put_groups(rows)

    def save_ready(self, row: GroupRow, payload: bytes) -> None:
        """A ready group and its bytes, both or neither."""
        with self._transaction():
            self._put_groups([row])
            key = (row.group.number, row.group.replacement)
            self._database.execute("INSERT OR REPLACE INTO payloads VALUES (?, ?, ?)", (*key, payload))

    def save_step(self, step: StepRow, groups: Sequence[GroupRow]) -> None:
        """A step that was begun or committed, together with the new state of its groups."""
        with self._transaction():
            self._put_groups(groups)
            self._put_step(step)

    def save_published(self, steps: Sequence[StepRow]) -> None:
        """Steps that a publication settled."""
        with self._transaction():
            for step in steps:
                self._put_step(step)

    def payloads(self, groups: Sequence[GroupId]) -> list[bytes]:
        """The bytes of these groups, in order. KeyError when one is not held."""
        return [self._payload(group) for group in groups]

    def unexported_steps(self) -> list[StepRow]:
        """Committed steps whose groups' bytes are still in the database: a kill came before `export_step` was done."""
        held = {GroupId(*row) for row in self._database.execute("SELECT number, replacement FROM payloads")}
        _, steps = self.load()
        return [step for step in steps if step.weights_digest is not None and held.intersection(step.plan.groups)]

    def trajectory_path(self, step: int) -> Path:
        return self._trajectories / f"step-{step:06d}.parquet"

    def export_step(self, plan: StepPlan) -> Path:
        """Write a committed step's groups to Parquet, then let go of their bytes."""
        path = self.trajectory_path(plan.step)
        write_trajectories(path, self.payloads(plan.groups), plan.step)
        self.clear_payloads(plan.groups)
        return path

    def clear_payloads(self, groups: Sequence[GroupId]) -> None:
        """Let go of these groups' bytes, once they are in a Parquet file."""
        with self._transaction():
            self._database.executemany(
                "DELETE FROM payloads WHERE number = ? AND replacement = ?", [(g.number, g.replacement) for g in groups]
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:  # also when the commit itself met somebody who reads for too long
                self._database.execute("ROLLBACK")
            raise

    def _put_groups(self, rows: Sequence[GroupRow]) -> None:
        values = [
            (r.group.number, r.group.replacement, r.state, r.attempt, r.worker_id, r.issued_at_s, r.reason, r.detail,
             r.oldest_version)
            for r in rows
        ]  # fmt: skip
        self._database.executemany("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def _put_step(self, row: StepRow) -> None:
        self._database.execute(
            "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)",
            (row.plan.step, plan_text(row.plan), row.weights_digest, row.published, row.incarnation),
        )

    def _payload(self, group: GroupId) -> bytes:
        row = self._database.execute(
            "SELECT payload FROM payloads WHERE number = ? AND replacement = ?", (group.number, group.replacement)
        ).fetchone()
        if row is None:
            raise KeyError(f"the store does not hold the bytes of group {group}")
        return bytes(row[0])


def write_trajectories(path: Path, payloads: Sequence[bytes], step: int) -> None:
    """One Parquet file of a step's groups (shared.schema.STEP_SCHEMA), complete or absent."""
    table = step_table([decode_group(payload) for payload in payloads], step)
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(table, temporary, compression="zstd")
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_trajectories(path: Path) -> list[Group]:
    """The groups of a step's Parquet file, exactly as `write_trajectories` was given them.

    SchemaError naming the file when it is missing, cut, or does not follow `STEP_SCHEMA`.
    """
    try:
        with pq.ParquetFile(path) as file:
            return groups_of_table(file.read())
    except (OSError, pa.ArrowInvalid) as error:
        raise SchemaError(f"{path}: no Parquet file of a step's groups: {error}") from error
    except SchemaError as error:
        raise SchemaError(f"{path}: {error}") from error


def heal(run_directory: Path) -> None:
    """Undo what a killed hub left half-written: SQLite does so as soon as it may write. Safe beside a live hub."""
    with closing(sqlite3.connect(run_directory / "ledger.sqlite")) as database:
        database.execute("SELECT count(*) FROM sqlite_master").fetchone()


def group_rows(database: sqlite3.Connection) -> list[GroupRow]:
    """All issued groups of an open database."""
    return [
        GroupRow(GroupId(number, replacement), GroupState(state), *rest)
        for number, replacement, state, *rest in database.execute(
            "SELECT number, replacement, state, attempt, worker_id, issued_at_s, reason, detail, oldest_version "
            "FROM groups"
        )
    ]


def step_rows(database: sqlite3.Connection) -> list[StepRow]:
    """The begun steps in a run's database, in order."""
    rows = database.execute("SELECT plan, weights_digest, published, incarnation FROM steps ORDER BY step")
    return [
        StepRow(plan_of(plan), digest, bool(published), incarnation) for plan, digest, published, incarnation in rows
    ]
