"""Reading a run directory back: the JSON lines that the hub appended, as records."""

import json
from pathlib import Path
from typing import Any

from shared.records import EvalReport, ProbeReport, Span, SyncReport


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
    return [ProbeReport(**row) for row in read_rows(run_directory / "probes.jsonl")]


def read_evaluations(run_directory: Path) -> list[EvalReport]:
    return [EvalReport(**row) for row in read_rows(run_directory / "evaluations.jsonl")]
