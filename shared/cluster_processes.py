"""Ending the processes of a detached cluster and no others: they share the session that its head leads.

The kernel does not give a process id away while a session bears it, so a session stays recognizable when its head is
dead. That is needed: the kernel ends Ray's central processes with the head, and workers end with their raylet, but
Ray's agents first try for a minute to report that to a server which is gone too, and engines may be orphaned.
"""

import os
import time
from contextlib import suppress

import psutil

_POLL_S = 0.05


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie, which only waits for its parent, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_session(leader_pid: int, grace_s: float) -> None:
    """End all processes of a session, and those they started. Returns when none is left.

    SIGTERM goes to the leader, which ends the others in order, or to all when it is dead; SIGKILL after `grace_s`.
    """
    members = _session(leader_pid)
    leader = [process for process in members if process.pid == leader_pid]
    for process in leader or members:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    deadline_s = time.monotonic() + grace_s
    while members := {process for process in members | _session(leader_pid) if is_alive(process)}:
        for process in list(members):
            with suppress(psutil.NoSuchProcess):
                members.update(process.children(recursive=True))  # also those with a session of their own
                if time.monotonic() >= deadline_s:
                    process.kill()
        time.sleep(_POLL_S)


def _session(leader_pid: int) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader_pid and is_alive(process):
                found.add(process)
    return found
