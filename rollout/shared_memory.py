"""Shared memory that an engine's processes leave behind when they are killed together with whatever would clean up.

When a worker's process is killed, Ray kills its children too, resource tracker included, and what vLLM's processes
talk through stays: message queues (`/dev/shm/psm_*`) and semaphores (`sem.mp-*`). So a worker writes down which queues
its engine maps, from its start on, next to its slot's lock, and its semaphores bear the slot in their names, because
nobody maps them for long. Once nobody holds the slot, both are removed: never anything but what was ours.
"""

import json
import multiprocessing
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rollout.slots import HostSlot, claims_paused, private_folder

SHARED_MEMORY = Path("/dev/shm")
_LOOK_EVERY_S = 0.5
_MAPPED = re.compile(rf"\s{SHARED_MEMORY}/(psm_\w+)$", re.MULTILINE)


@contextmanager
def shared_memory_noted(slot: HostSlot) -> Iterator[None]:
    """While an engine starts, note what this process and its children map, for when they are killed, then or later."""
    # Private, and the only way to tell whose a semaphore is; children inherit it.
    multiprocessing.current_process()._config["semprefix"] = f"/{_semaphores(slot.index)}"  # type: ignore[attr-defined]
    names: set[str] = set()
    started = threading.Event()

    def note() -> None:
        while True:
            last = started.wait(_LOOK_EVERY_S)
            names.update(_mapped_now())
            temporary = _note(slot.index).with_suffix(".new")
            temporary.write_text(json.dumps(sorted(names)))
            temporary.replace(_note(slot.index))
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
            queues = [SHARED_MEMORY / name for name in json.loads(note.read_text())]
            for file in [*queues, *SHARED_MEMORY.glob(f"sem.{_semaphores(index)}-*")]:
                file.unlink(missing_ok=True)
            note.unlink()


def _semaphores(index: int) -> str:
    """How the names of this slot's semaphores begin."""
    return f"mp-seqrelay-{os.getuid()}-slot{index}"


def _note(index: int) -> Path:
    return private_folder() / f"slot-{index}.memory"
