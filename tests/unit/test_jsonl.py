"""Files of JSON lines: whole lines or nothing."""

import json
from pathlib import Path

import pytest

from shared.jsonl import JsonLines


def test_lines_are_readable_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = JsonLines(path)
    file.append([{"step": 0, "loss": None}, {"step": 1, "loss": 0.5}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0, "loss": None},
        {"step": 1, "loss": 0.5},
    ]


def test_an_unfinished_line_of_a_killed_writer_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "lo')
    JsonLines(path).append([{"step": 1}])
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_nan_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match="JSON"):
        JsonLines(path).append([{"loss": 1.0}, {"loss": float("nan")}])
    assert path.read_text() == ""
