"""Shared memory that an engine's processes leave behind when they are killed together with whatever would clean up.

When a worker's process is killed, Ray kills its children too, resource tracker included, and vLLM's message queue
(`/dev/shm/psm_*`, `sem.mp-*`) stays. So a worker writes down which of these its engine maps, from its start on, next to
its slot's lock; once nobody holds the slot, they are removed. Only names that were seen mapped by our own processes are
ever removed.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rollout.slots import HostSlot, claims_paused, private_folder

SHARED_MEMORY = Path("/dev/shm")
_LOOK_EVERY_S = 0.5
_MAPPED = re.compile(rf"\s{SHARED_MEMORY}/((?:psm_|sem\.mp-)[\w.-]+)$", re.MULTILINE)


@contextmanager
def shared_memory_noted(slot: HostSlot) -> Iterator[None]:
    """While an engine starts, note what this process and its children map, for when they are killed, then or later."""
    names: set[str] = set()
    started = threading.Event()

    def note() -> None:
        while True:
            last = started.wait(_LOOK_EVERY_S)
            names.update(_mapped_now())
            _note(slot.index).write_text(json.dumps(sorted(names)))
            if last:
                return

    watcher = threading.Thread(target=note, daemon=True)  # a start blocks this process's event loop
    watcher.start()
    try:
        yield
    finally:
        started.set()
        watcher.join()


def _mapped_now() -> set[str]:
    names: set[str] = set()
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(OSError):  # it has just ended
            names.update(_MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    return names


def clear_shared_memory() -> None:
    """Remove what was noted for slots that no live process holds."""
    with claims_paused() as is_held:
        for note in private_folder().glob("slot-*.memory"):
            index = int(note.stem.removeprefix("slot-"))
            if is_held(index):
                continue
            for name in json.loads(note.read_text()):
                (SHARED_MEMORY / name).unlink(missing_ok=True)
            note.unlink()


def _note(index: int) -> Path:
    return private_folder() / f"slot-{index}.memory"
