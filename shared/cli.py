"""The `seqrelay` command. Parses, checks, and hands over; nothing heavy is imported before the config is known good.

Exit codes: 0 the command did what it says, 1 it failed or found a fault, 2 the command or the config is wrong,
130 interrupted.
"""

import argparse
import sys
from pathlib import Path

from shared.config import Config
from shared.config_file import load_config
from shared.errors import ConfigError, SeqrelayError

# Without tokenizer files transformers makes one up, with an empty vocabulary.
_MODEL_FILES = {
    "config.json": ("config.json",),
    "*.safetensors": ("*.safetensors",),
    "tokenizer": ("tokenizer.*", "vocab.*", "*.model", "tekken.json"),
}
_STOP_TIMEOUT_S = 600.0


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script."""
    options = _parse(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("seqrelay: interrupted at once; what was done so far is kept", file=sys.stderr)
        return 130
    except SeqrelayError as error:
        print(f"seqrelay: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _run(options: argparse.Namespace) -> int:
    configs = (_load(options),) if hasattr(options, "config") else ()
    from shared import commands  # after the config is known to be good: this takes half a second

    return int(getattr(commands, options.command)(options, *configs))


def _load(options: argparse.Namespace) -> Config:
    workers = getattr(options, "workers", None)
    overrides = [*options.overrides, *([] if workers is None else [f"rollout.workers={workers}"])]
    config = load_config(options.config, overrides)
    _check_model(config)
    return config


def _check_model(config: Config) -> None:
    """ConfigError for a folder without a complete model."""
    model = Path(config.model.path)
    for wanted, patterns in _MODEL_FILES.items():
        if not any(any(model.glob(pattern)) for pattern in patterns):
            raise ConfigError(
                f"model.path = {config.model.path!r}: no {wanted} there. Give a folder with a transformers checkpoint "
                f"(config.json, safetensors, tokenizer); `make models` writes the small ones used by the examples."
            )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options and overrides in any order; argparse alone takes no overrides behind an option."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown or (rest and not hasattr(options, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="seqrelay", description="Decoupled GSPO post-training of language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    both = commands.add_parser("train", help="run workers and the learner on a private Ray cluster, to the end")
    learner = commands.add_parser("learner", help="run the learner; it waits for workers")
    rollout = commands.add_parser(
        "rollout", help="run rollout workers; they wait for the learner, and may join any time"
    )
    doctor = commands.add_parser("doctor", help="examine a run before it starts: sample, score and sync, train nothing")
    for command in (both, learner, rollout, doctor):
        command.add_argument("config", type=Path, metavar="run.toml")
        command.add_argument(
            "overrides", nargs="*", metavar="section.key=value", help="values that replace those of the file"
        )
    for command in (both, learner):
        command.add_argument("--resume", action="store_true", help="go on with the run that is in the run directory")
    rollout.add_argument("--workers", type=int, metavar="N", help="the same as rollout.workers=N")

    show = commands.add_parser("status", help="what a run is doing: its groups, versions and workers")
    end = commands.add_parser("stop", help="let a run's services finish what they hold, then end them and the cluster")
    end.add_argument("--now", action="store_true", help="do not wait for them; nothing that is done is lost")
    end.add_argument(
        "--timeout", type=float, default=_STOP_TIMEOUT_S, metavar="S", help="seconds to wait (default 600)"
    )
    replay = commands.add_parser("replay", help="train again from the recorded rollouts, and compare the weights")
    replay.add_argument("--to-step", type=int, metavar="K", help="only the first K steps")
    replay.add_argument("--out", type=Path, metavar="FOLDER", help="save the weights there")
    for command in (show, end, replay):
        command.add_argument("directory", metavar="RUN", help="a run directory, such as runs/demo")
    for command in (learner, rollout, show, end):
        command.add_argument("--address", help="a Ray cluster of yours; without it, the run's own on this host")
    for command in (both, learner, doctor, show, replay):
        command.add_argument("--json", action="store_true", help="JSON for machines")
    return parser


if __name__ == "__main__":
    sys.exit(main())
