"""What both services have in common: arguments, joining the Ray cluster, telling the hub of a failure, and ending with
the process that started them.
"""

import argparse
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from shared.cluster import join, leave
from shared.config import Config
from shared.config_file import load_resolved
from shared.errors import ConfigError, HubError, LockHeld, RunFailed, SeatTaken
from shared.stopping import STOPPED, StopRequest

Body = Callable[[Config, Path, StopRequest], bool]

_PARENT_POLL_S = 1.0
_CONFIG_AT_FAULT = 2


def run_service(side: str, body: Body, arguments: list[str]) -> int:
    """Join the cluster, run `body(config, run_directory, stop)`, return the exit code.

    0: the run is finished; STOPPED: ended on request before that; 1: failed; 2: the config is at fault. A failure is
    printed with its traceback, and reported to the hub, so that the other side stops instead of waiting, and to who
    started this service (a file beside the config): the traceback, or the message alone if the config is at fault. A
    failure that came from the hub is not sent back to it; nobody else has to end because this service was refused.
    """
    options = _parse(side, arguments)
    if options.parent is not None:
        threading.Thread(target=_end_with, args=(options.parent,), daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    config = load_resolved(options.config)

    stop = StopRequest()
    join(options.address, config.run.name)
    stop.on_signals()  # after joining: Ray's own handler aborts with a crash report
    try:
        return 0 if body(config, options.run_directory, stop) else STOPPED
    except Exception as error:
        text, code = _explain(error)
        logging.getLogger(side).error("%s", text)
        options.config.with_suffix(".error").write_text(text + "\n", encoding="utf-8")
        second = isinstance(error, SeatTaken) or (side == "learner" and isinstance(error, LockHeld))
        refused = side == "rollout" and code == _CONFIG_AT_FAULT  # this service's affair; the run goes on with others
        if not second and not refused and not isinstance(error, RunFailed):
            _report(side, config, text)
        return code
    finally:
        leave()


def _parse(side: str, arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {side}.main")
    parser.add_argument("--config", type=Path, required=True, help="the resolved config, as JSON")
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--address", required=True, help="address of the Ray cluster")
    parser.add_argument("--parent", type=int, help="process id of the parent, without which this service ends")
    return parser.parse_args(arguments)


def _explain(error: Exception) -> tuple[str, int]:
    """What to say, and the exit code."""
    from ray.exceptions import RayTaskError

    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ConfigError):
        return str(cause), _CONFIG_AT_FAULT
    return str(error) if isinstance(error, RunFailed) else traceback.format_exc(), 1


def _report(side: str, config: Config, text: str) -> None:
    from shared.hub_client import report_failure

    try:
        report_failure(config.run.name, side, text)
    except HubError as unheard:
        logging.getLogger(side).error("nobody was told of this: %s", unheard)


def _end_with(parent: int) -> None:
    """Kill this process once its parent is gone; kill -9 leaves a parent no chance to end it."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
