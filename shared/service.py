"""What both services have in common: arguments, joining the Ray cluster, telling the hub of a failure, and ending with
the process that started them.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from shared.config import Config
from shared.config_file import load_resolved
from shared.errors import ConfigError, HubError

Body = Callable[[Config, Path], None]

_PARENT_POLL_S = 1.0


def run_service(side: str, body: Body, arguments: list[str]) -> int:
    """Join the cluster, run `body(config, run_directory)`, return the exit code.

    A failure is printed with its traceback and reported to the hub: the other side stops instead of waiting. The hub
    gets the traceback too, or the message alone if the config is at fault.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {side}.main")
    parser.add_argument("--config", type=Path, required=True, help="config.json of a run directory")
    parser.add_argument("--address", required=True, help="address of the Ray cluster")
    parser.add_argument("--parent", type=int, help="process id of the parent, without which this service ends")
    options = parser.parse_args(arguments)
    if options.parent is not None:
        threading.Thread(target=_end_with, args=(options.parent,), daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    config = load_resolved(options.config)

    import ray  # after the arguments are known to be good: this import takes a second

    from shared.hub_client import connect, report_failure

    ray.init(address=options.address, namespace=config.run.name, log_to_driver=True, logging_level=logging.WARNING)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # Ray's aborts with a crash report
    try:
        body(config, options.config.parent)
        return 0
    except Exception as error:
        text = traceback.format_exc()
        logging.getLogger(side).error("%s", text)
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        try:
            report_failure(connect(config.run.name), side, str(cause) if isinstance(cause, ConfigError) else text)
        except HubError as unheard:
            logging.getLogger(side).error("nobody was told of this: %s", unheard)
        return 1
    finally:
        ray.shutdown()


def _end_with(parent: int) -> None:
    """Kill this process once its parent is gone; kill -9 leaves a parent no chance to end it."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
