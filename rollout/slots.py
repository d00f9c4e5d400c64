"""A number for every worker of a host, so that workers of several services share its cores and folders in peace.

Owns the lock files `slot-<index>.lock` in a folder of this user, `seqrelay-<uid>` where temporary files go. A slot is
held while its file is locked, which the kernel ends with the process, kill -9 included. Children that are started by
spawn or exec do not keep it, as those of vLLM are; one that is forked and runs on without exec would.

Example: a service with 2 workers holds slots 0 and 1; one that starts beside it gets 2. The worker in slot 0 is killed;
the next worker of any service on this host gets 0, and with it those cores and that staging folder.
"""

import contextlib
import itertools
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError, LockHeld
from shared.locks import FileLock

_CLAIM_WAIT_S = 60.0  # whoever removes an abandoned staging folder meanwhile needs a few seconds at most


@dataclass(frozen=True)
class HostSlot:
    """A slot that this process holds until it ends."""

    index: int

    @classmethod
    def claim(cls) -> "HostSlot":
        """The lowest slot that no live process of this user holds on this host.

        ConfigError as in `private_folder`; LockHeld when other processes keep claims waiting for a minute.
        """
        with claims_paused():
            return cls(next(index for index in itertools.count() if _try_claim(index)))


@contextlib.contextmanager
def claims_paused() -> Iterator[Callable[[int], bool]]:
    """While the block runs nobody claims a slot; the value tells of an index whether a live process holds it."""
    lock = FileLock(private_folder() / "claims.lock")
    lock.acquire(_CLAIM_WAIT_S)
    try:
        yield lambda index: _slot_lock(index).holder() is not None
    finally:
        lock.release()


def private_folder() -> Path:
    """The folder of this user, mode 0700. ConfigError when something of another user is in its place."""
    folder = Path(tempfile.gettempdir()) / f"seqrelay-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # of a link, not of what it leads to
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(
            f"{folder} is not a folder of user {os.getuid()}, so the locks in it cannot be trusted. Remove it, or set "
            f"TMPDIR to another folder on the whole host."
        )
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def _try_claim(index: int) -> bool:
    try:
        _slot_lock(index).acquire()
    except LockHeld:
        return False
    return True


def _slot_lock(index: int) -> FileLock:
    return FileLock(private_folder() / f"slot-{index}.lock")
