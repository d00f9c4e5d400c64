"""Finished model directories: complete or absent, and remade only when the recipe or a file changed.

A maker writes into a temporary neighbor of the target and renames it into place as its last act, so a directory that
exists is complete. A marker file inside records the recipe and the sha256 of each file.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

MARKER = ".made.json"
Recipe = Mapping[str, str | int | float]


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file directly in `folder` except the marker, by name."""
    return {path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.name != MARKER}


def is_finished(out: Path, recipe: Recipe) -> bool:
    """True if `out` was made by exactly this recipe and every file is still what was written."""
    try:
        marker = json.loads((out / MARKER).read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return marker == {"recipe": dict(recipe), "files": digests(out)}


def make_model_dir(out: Path, recipe: Recipe, write_files: Callable[[Path], None]) -> bool:
    """Let `write_files` fill a temporary folder, then rename it to `out`. Returns False if `out` was already finished.

    Replaces a directory that carries a marker of ours; refuses any other that holds files.
    """
    if is_finished(out, recipe):
        return False
    if out.exists() and not (out.is_dir() and ((out / MARKER).is_file() or not any(out.iterdir()))):
        raise ValueError(f"--out {out}: exists and was not made by this script; remove it or choose another path")
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        fresh = staging / "new"
        fresh.mkdir()
        write_files(fresh)
        for path in fresh.iterdir():
            path.chmod(0o644)  # safetensors writes files that only their owner can read
        (fresh / MARKER).write_text(json.dumps({"recipe": dict(recipe), "files": digests(fresh)}, indent=2) + "\n")
        if out.exists():
            out.rename(staging / "old")
        fresh.rename(out)
    finally:
        shutil.rmtree(staging)
    return True
