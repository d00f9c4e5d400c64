"""What both services have in common: arguments, joining the Ray cluster, and telling the hub of a failure."""

import argparse
import logging
import traceback
from collections.abc import Callable
from pathlib import Path

from shared.config import Config
from shared.config_file import load_resolved

Body = Callable[[Config, Path], None]


def run_service(side: str, body: Body, arguments: list[str]) -> int:
    """Join the cluster, run `body(config, run_directory)`, return the exit code.

    A failure is printed with its traceback and reported to the hub: the other side stops instead of waiting.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {side}.main")
    parser.add_argument("--config", type=Path, required=True, help="config.json of a run directory")
    parser.add_argument("--address", required=True, help="address of the Ray cluster")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    config = load_resolved(options.config)

    import ray  # after the arguments are known to be good: this import takes a second

    from shared.hub_client import connect, report_failure

    ray.init(address=options.address, namespace=config.run.name, log_to_driver=True, logging_level=logging.WARNING)
    try:
        body(config, options.config.parent)
        return 0
    except Exception:
        text = traceback.format_exc()
        logging.getLogger(side).error("%s", text)
        report_failure(connect(config.run.name), side, text)
        return 1
    finally:
        ray.shutdown()
