"""The process at the head of a detached cluster: started by `ensure_cluster`, ended by `stop_cluster` (SIGTERM).

Prints to `logs/ray.log` of the run directory. Exit codes: 0 stopped, HEAD_LOCK_HELD another head was first, 1 Ray did
not start or one of its two central processes died, which makes the cluster useless and must free its place.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import psutil

from shared.cluster import HEAD_LOCK_HELD, head_of_cluster
from shared.cluster_processes import is_alive
from shared.cluster_record import ClusterRecord, read_cluster
from shared.errors import LockHeld

_POLL_S = 1.0
_CENTRAL = ("gcs_server", "raylet")


def main(arguments: list[str] | None = None) -> int:
    """Be the head until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m shared.cluster_head")
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("--object-store-bytes", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        with head_of_cluster(options.run_directory, "detached", None, options.object_store_bytes) as record:
            signal.signal(signal.SIGTERM, _stop)  # after Ray has set its own
            _watch(options.run_directory, record)
    except LockHeld:
        return HEAD_LOCK_HELD
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _watch(run_directory: Path, record: ClusterRecord) -> None:
    """Returns when the record is gone, as with the run directory: nobody could find this cluster again."""
    central = [child for child in psutil.Process().children() if child.name() in _CENTRAL]
    while read_cluster(run_directory) == record:
        for process in central:
            if not is_alive(process):
                print(f"{process.pid} of {_CENTRAL} has died; see {record.session_directory}/logs", flush=True)
                os._exit(1)  # `ray.shutdown` would wait for it; the rest dies with this process, or is cleared up
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
