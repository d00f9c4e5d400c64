"""Reading a run directory back, of a run that goes on or has ended: nothing here creates or changes anything.

The JSON lines that the hub appended, the steps in its ledger and the groups that they trained, as records.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from shared.errors import SchemaError
from shared.ledger_rows import GroupRow, StepRow
from shared.records import (
    EvalReport,
    GroupId,
    Mismatch,
    ProbeReport,
    RecordedStep,
    SamplingReport,
    Span,
    StepPlan,
    SyncReport,
)
from shared.schema import encode_group
from shared.store import DATABASE_VERSION, group_rows, read_trajectories, step_rows


def read_run_id(run_directory: Path) -> str:
    """What tells this run from another one of its name; "" for a folder that no command made."""
    path = run_directory / "run.id"
    return path.read_text(encoding="ascii") if path.exists() else ""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file; [] when there is no such file. A torn last line is left out."""
    if not path.exists():
        return []
    text = path.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def read_metrics(run_directory: Path) -> list[dict[str, Any]]:
    """One row a step; the keys are those of shared.metrics.StepMetrics."""
    return read_rows(run_directory / "metrics.jsonl")


def read_spans(run_directory: Path) -> list[Span]:
    return [Span(**row) for row in read_rows(run_directory / "spans.jsonl")]


def read_syncs(run_directory: Path) -> list[SyncReport]:
    return [SyncReport(**row) for row in read_rows(run_directory / "syncs.jsonl")]


def read_probes(run_directory: Path) -> list[ProbeReport]:
    return [probe_of(row) for row in read_rows(run_directory / "probes.jsonl")]


def read_checks(run_directory: Path) -> list[SamplingReport]:
    """What the sampling check of version 0 found, by worker."""
    return [sampling_of(row) for row in read_rows(run_directory / "checks.jsonl")]


def probe_of(row: Mapping[str, Any]) -> ProbeReport:
    """A line of probes.jsonl as a record."""
    return ProbeReport(**{**row, "mismatch": Mismatch(**row["mismatch"])})


def sampling_of(row: Mapping[str, Any]) -> SamplingReport:
    """A line of checks.jsonl as a record."""
    fixed, calibrated = tuple(row["fixed_clip"]), tuple(row["calibrated_clip"])
    mismatch = Mismatch(**row["mismatch"])
    return SamplingReport(**{**row, "mismatch": mismatch, "fixed_clip": fixed, "calibrated_clip": calibrated})


def read_evaluations(run_directory: Path) -> list[EvalReport]:
    return [EvalReport(**row) for row in read_rows(run_directory / "evaluations.jsonl")]


def read_steps(run_directory: Path) -> list[StepRow]:
    """The begun steps of the run's ledger, in order; those with a weights digest are committed.

    SchemaError when there is no ledger, it has another layout, or a killed hub left it in the middle of a change.
    """
    with _ledger(run_directory) as database:
        return step_rows(database) if _has_tables(database) else []


def read_ledger(run_directory: Path) -> tuple[list[GroupRow], list[StepRow]]:
    """All rows of the run's ledger, for `Ledger.from_rows`; none before its hub was first started.

    SchemaError as `read_steps`.
    """
    if not (run_directory / "ledger.sqlite").exists():
        return [], []
    with _ledger(run_directory) as database:
        return (group_rows(database), step_rows(database)) if _has_tables(database) else ([], [])


def read_recorded_step(run_directory: Path, row: StepRow) -> RecordedStep:
    """A committed step with its groups' bytes in the plan's order. SchemaError naming the file where one is missing."""
    plan = row.plan
    payloads = _held_payloads(run_directory, plan)
    if len(payloads) < len(plan.groups):  # the bytes leave the ledger once they are in the step's Parquet file
        path = run_directory / "trajectories" / f"step-{plan.step:06d}.parquet"
        payloads = {group.group: encode_group(group) for group in read_trajectories(path)}
        if missing := [str(group) for group in plan.groups if group not in payloads]:
            raise SchemaError(f"{path}: group {missing[0]} of step {plan.step} is not there; take the file of this run")
    return RecordedStep(plan, [payloads[group] for group in plan.groups], row.weights_digest or "")


def _held_payloads(run_directory: Path, plan: StepPlan) -> dict[GroupId, bytes]:
    query = "SELECT payload FROM payloads WHERE number = ? AND replacement = ?"
    with _ledger(run_directory) as database:
        rows = ((group, database.execute(query, (group.number, group.replacement)).fetchone()) for group in plan.groups)
        return {group: bytes(row[0]) for group, row in rows if row}


def _has_tables(database: sqlite3.Connection) -> bool:
    """False for the file of a hub that was killed at its very first start."""
    return bool(database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])


@contextmanager
def _ledger(run_directory: Path) -> Iterator[sqlite3.Connection]:
    """The run's database, open for reading only. SchemaError as `read_steps`."""
    path = run_directory / "ledger.sqlite"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            database.execute("BEGIN")  # all that is read is of one instant, also while a hub writes
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, DATABASE_VERSION):
                raise SchemaError(
                    f"{path} has layout version {version}, this release uses {DATABASE_VERSION}; "
                    f"read it with the release that wrote it"
                )
            yield database
    except sqlite3.Error as error:
        raise SchemaError(
            f"{path}: {error}. It must be a run's ledger; if its hub was killed in the middle of a change, "
            f"resume the run once and it is whole again"
        ) from error
