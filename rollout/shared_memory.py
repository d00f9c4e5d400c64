"""Shared memory that an engine's processes leave behind when they are killed together with whatever would clean up.

When a worker's process is killed, Ray kills its children too, resource tracker included, and vLLM's message queue
(`/dev/shm/psm_*`, `sem.mp-*`) stays. So a worker writes down which of these its engine maps, next to its slot's lock;
once nobody holds the slot, they are removed. Only names that were seen mapped by our own processes are ever removed.
"""

import json
import re
from contextlib import suppress
from pathlib import Path

import psutil

from rollout.slots import HostSlot, claims_paused, private_folder

SHARED_MEMORY = Path("/dev/shm")
_MAPPED = re.compile(rf"\s{SHARED_MEMORY}/((?:psm_|sem\.mp-)[\w.-]+)$", re.MULTILINE)


def remember_shared_memory(slot: HostSlot) -> None:
    """Note what this process and its children map now, for when they are killed."""
    names: set[str] = set()
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(OSError):  # it has just ended
            names.update(_MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    _note(slot.index).write_text(json.dumps(sorted(names)))


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
