"""The `seqrelay` command. Parses, checks, and hands over; nothing heavy is imported before the config is known good.

Exit codes: 0 the run ended, 1 it failed, 2 the command or the config is wrong, 130 interrupted.
"""

import argparse
import os
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


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script."""
    options = _parse(arguments)
    try:
        config = load_config(options.config, options.overrides)
        run_directory = _check_paths(config)
    except ConfigError as error:
        print(f"seqrelay: {error}", file=sys.stderr)
        return 2
    from shared.launch import train  # Ray takes a second to import

    try:
        return train(config, run_directory, json_lines=options.json)
    except KeyboardInterrupt:
        print(f"seqrelay: interrupted; what was done so far is in {run_directory}", file=sys.stderr)
        return 130
    except SeqrelayError as error:
        print(f"seqrelay: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options and overrides in any order; argparse alone takes no overrides behind an option."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if unknown := [argument for argument in rest if argument.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="seqrelay", description="Decoupled GSPO post-training of language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run rollout workers and the learner on a private Ray cluster")
    train.add_argument("config", type=Path, metavar="run.toml")
    train.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="values that replace those of the file"
    )
    train.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    return parser


def _check_paths(config: Config) -> Path:
    """The new run's directory. ConfigError for an incomplete model or a directory that holds a run already."""
    model = Path(config.model.path)
    for wanted, patterns in _MODEL_FILES.items():
        if not any(any(model.glob(pattern)) for pattern in patterns):
            raise ConfigError(
                f"model.path = {config.model.path!r}: no {wanted} there. Give a folder with a transformers checkpoint "
                f"(config.json, safetensors, tokenizer); `make models` writes the small ones used by the examples."
            )
    run_directory = Path(config.run.directory) / config.run.name
    if os.path.lexists(run_directory):
        raise ConfigError(
            f"run.name = {config.run.name!r}: {run_directory} exists already and is never overwritten. "
            f"Choose another name (run.name=...) or remove it."
        )
    return run_directory.resolve()


if __name__ == "__main__":
    sys.exit(main())
