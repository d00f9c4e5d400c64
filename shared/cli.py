"""The `seqrelay` command. Parses, checks, and hands over; nothing heavy is imported before the config is known good.

Exit codes: 0 the command did what it says, 1 it failed, 2 the command or the config is wrong, 130 interrupted.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shared.config import Config
from shared.config_file import load_config
from shared.errors import ConfigError, SeqrelayError
from shared.launch import Outcome, log_path, serve, train
from shared.progress import LogLines, Progress
from shared.run_directory import find_run, open_for_learner, open_for_rollout
from shared.status import as_json, as_text, recorded_status, status, stop

# Without tokenizer files transformers makes one up, with an empty vocabulary.
_MODEL_FILES = {
    "config.json": ("config.json",),
    "*.safetensors": ("*.safetensors",),
    "tokenizer": ("tokenizer.*", "vocab.*", "*.model", "tekken.json"),
}
_INTERRUPTED = 130
_STOP_TIMEOUT_S = 600.0


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script."""
    options = _parse(arguments)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except KeyboardInterrupt:
        print("seqrelay: interrupted at once; what was done so far is kept", file=sys.stderr)
        return _INTERRUPTED
    except SeqrelayError as error:
        print(f"seqrelay: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _train(options: argparse.Namespace) -> int:
    config = _load(options)
    run_directory = open_for_learner(config, resume=options.resume, alone=True)
    return _watch_steps(options, config, run_directory, lambda view: train(config, run_directory, view))


def _learner(options: argparse.Namespace) -> int:
    config = _load(options)
    run_directory = open_for_learner(config, resume=options.resume, alone=False)
    return _watch_steps(
        options, config, run_directory, lambda view: serve("learner", config, run_directory, options.address, view)
    )


def _watch_steps(
    options: argparse.Namespace, config: Config, run_directory: Path, run: Callable[[Progress], Outcome]
) -> int:
    """Show the steps while `run` goes on, and in the end where everything is and how to go on."""
    progress = Progress(config, run_directory, options.json)
    if options.resume and recorded_status(config, run_directory).finished:
        progress.update()
        progress.close()
        progress.say(
            f"this run is finished: {run_directory}; learner.steps=N makes it longer, run.name=... starts another"
        )
        return 0
    outcome = run(progress)
    progress.say(f"run directory: {run_directory}")
    if outcome.finished:
        progress.say("final weights: checkpoints/final (loads with transformers and vLLM)")
    else:
        progress.say("stopped before the last step; the same command with --resume goes on")
    if options.command == "learner" and options.address is None:
        progress.say(f"the run's cluster is still up; `seqrelay stop {os.path.relpath(run_directory)}` ends it")
    return _INTERRUPTED if outcome.interrupted else 0


def _rollout(options: argparse.Namespace) -> int:
    if options.workers is not None:
        options.overrides.append(f"rollout.workers={options.workers}")
    config = _load(options)
    run_directory = open_for_rollout(config)
    view = LogLines(log_path(run_directory, "rollout"))
    outcome = serve("rollout", config, run_directory, options.address, view)
    view.say("the run is finished" if outcome.finished else "stopped; what was held is handed in")
    return _INTERRUPTED if outcome.interrupted else 0


def _status(options: argparse.Namespace) -> int:
    found, served = status(find_run(options.directory), options.address)
    print(as_json(found, served) if options.json else as_text(found, served))
    return 0


def _stop(options: argparse.Namespace) -> int:
    timeout_s = 0.0 if options.now else options.timeout
    stop(find_run(options.directory), options.address, timeout_s, say=lambda line: print(line, flush=True))
    return 0


def _replay(options: argparse.Namespace) -> int:
    """In a process of its own: this one loads no model."""
    command = [sys.executable, "-m", "learner.replay", "--run", str(find_run(options.directory))]
    for name in ("to_step", "out"):
        if (value := getattr(options, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return subprocess.run([*command, *(["--json"] if options.json else [])], check=False).returncode


def _load(options: argparse.Namespace) -> Config:
    config = load_config(options.config, options.overrides)
    check_model(config)
    return config


def check_model(config: Config) -> None:
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
    for command, run in ((both, _train), (learner, _learner), (rollout, _rollout)):
        command.add_argument("config", type=Path, metavar="run.toml")
        command.add_argument(
            "overrides", nargs="*", metavar="section.key=value", help="values that replace those of the file"
        )
        command.set_defaults(run=run)
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
    for command, run in ((show, _status), (end, _stop), (replay, _replay)):
        command.add_argument("directory", metavar="RUN", help="a run directory, such as runs/demo")
        command.set_defaults(run=run)
    for command in (learner, rollout, show, end):
        command.add_argument("--address", help="a Ray cluster of yours; without it, the run's own on this host")
    for command in (both, learner, show, replay):
        command.add_argument("--json", action="store_true", help="JSON for machines")
    return parser


if __name__ == "__main__":
    sys.exit(main())
