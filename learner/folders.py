"""Folders that are complete under their name, or not there, whenever the writer is killed.

A folder `NAME` is written as its hidden sibling `.NAME.writing` and gets its name by one rename; it loses it by one
rename, too, before its files are removed. One writer at a time: whoever writes next removes what a dead one left.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged_folder(target: Path, *, durable: bool = False) -> Iterator[Path]:
    """Where to write what is to be `target` (the block makes the folder). An existing `target` is replaced at the end.

    All files get the permissions that the umask leaves. With `durable`, every file and folder is on disk before the
    rename, and the rename before this returns. If the block raises, `target` is as it was.
    """
    staging, old = target.with_name(f".{target.name}.writing"), target.with_name(f".{target.name}.old")
    for leftover in (staging, old):
        shutil.rmtree(leftover, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield staging
        # safetensors makes its files private to their owner; a new folder shows what the umask leaves to others.
        for file in files_in(staging):
            file.chmod(staging.stat().st_mode & 0o666)
        if durable:
            _sync_tree(staging)
        if target.exists():
            target.rename(old)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    if durable:
        _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(target: Path) -> None:
    """The reverse: at no instant is a part of the folder there under its name."""
    aside = target.with_name(f".{target.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    target.rename(aside)
    shutil.rmtree(aside)


def remove_leftovers(parent: Path, pattern: str) -> None:
    """Remove what dead writers left beside the targets in `parent` whose names match `pattern`."""
    for state in ("writing", "old"):
        for leftover in parent.glob(f".{pattern}.{state}"):
            shutil.rmtree(leftover, ignore_errors=True)


def files_in(folder: Path) -> list[Path]:
    """All files below `folder`, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
