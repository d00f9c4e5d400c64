"""Append-only files of one JSON object per line, readable while they grow."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends to `path`. A line that a killed writer left unfinished is cut off when the file is opened again."""

    def __init__(self, path: Path) -> None:
        path.touch()
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write all rows, or none: ValueError on NaN or infinity, which JSON does not have."""
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        self._file.write(text)
        self._file.flush()

    def close(self) -> None:
        self._file.close()
