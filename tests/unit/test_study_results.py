"""Finished runs of studies: found by what decided them, whole or not at all."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from study_results import Results, machine

TABLE = pa.table({"step": [0, 1], "reward": [0.5, None]})
SETTINGS = {"seed": 0, "clip": {"low": 3e-4}, "prompts": ("a", "b")}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results("example", 1, tmp_path / "example")


def test_a_finished_run_is_found_with_its_rows_and_how_it_was_made(results: Results) -> None:
    assert results.find("arm", SETTINGS) is None
    written = results.write("arm", SETTINGS, TABLE, {"wall_s": 2.5})
    found = results.find("arm", SETTINGS)
    assert found is not None
    assert found.table.to_pylist() == TABLE.to_pylist()
    assert found.path == written.path
    assert found.made["wall_s"] == 2.5
    assert found.made["machine"] == machine()


@pytest.mark.parametrize(
    ("version", "study", "arm", "settings"),
    [
        (2, "example", "arm", SETTINGS),
        (1, "other", "arm", SETTINGS),
        (1, "example", "arm-2", SETTINGS),
        (1, "example", "arm", SETTINGS | {"seed": 1}),
        (1, "example", "arm", SETTINGS | {"clip": {"low": 3e-2}}),
    ],
)
def test_whatever_decides_a_run_makes_it_another(
    results: Results, version: int, study: str, arm: str, settings: dict[str, Any]
) -> None:
    results.write("arm", SETTINGS, TABLE)
    assert Results(study, version, results.folder).find(arm, settings) is None


def test_the_order_of_settings_does_not_matter(results: Results) -> None:
    results.write("arm", SETTINGS, TABLE)
    assert results.find("arm", dict(reversed(SETTINGS.items()))) is not None


def test_a_run_under_another_name_is_refused(results: Results) -> None:
    path = results.write("arm", SETTINGS, TABLE).path
    path.rename(results.path("arm", {}))
    with pytest.raises(ValueError, match="remove it"):
        results.find("arm", {})


def test_a_write_that_fails_leaves_nothing(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", stop)
    with pytest.raises(OSError, match="disk full"):
        results.write("arm", SETTINGS, TABLE)
    assert list(results.folder.iterdir()) == []


def test_an_arm_names_a_file(results: Results) -> None:
    with pytest.raises(ValueError, match="names a file"):
        results.path("../arm", {})
