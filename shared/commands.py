"""What each command of `seqrelay` does, once its arguments and config are known to be good. Returns exit codes."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from shared import doctor_view, launch, run_status
from shared.config import Config
from shared.doctor import examined_config, judge, worst
from shared.errors import RunFailed
from shared.examination import read_examination
from shared.progress import LogLines, Progress
from shared.run_directory import find_run, open_for_learner, open_for_rollout

INTERRUPTED = 130


def train(options: argparse.Namespace, config: Config) -> int:
    run_directory = open_for_learner(config, resume=options.resume, alone=True)
    return _watch_steps(options, config, run_directory, lambda view: launch.train(config, run_directory, view))


def learner(options: argparse.Namespace, config: Config) -> int:
    run_directory = open_for_learner(config, resume=options.resume, alone=False)
    return _watch_steps(
        options,
        config,
        run_directory,
        lambda view: launch.serve("learner", config, run_directory, options.address, view),
    )


def _watch_steps(
    options: argparse.Namespace, config: Config, run_directory: Path, run: Callable[[Progress], launch.Outcome]
) -> int:
    """Show the steps while `run` goes on, and in the end where everything is and how to go on."""
    progress = Progress(config, run_directory, options.json)
    if options.resume and run_status.recorded_status(config, run_directory).finished:
        progress.update()
        progress.close()
        progress.say(
            f"this run is finished: {run_directory}; learner.steps=N makes it longer, run.name=... starts another"
        )
        return 0
    outcome = run(progress)
    progress.say(f"run directory: {run_directory}")
    if outcome.finished:
        progress.say(progress.verified())
        progress.say("final weights: checkpoints/final (loads with transformers and vLLM)")
    else:
        progress.say("stopped before the last step; the same command with --resume goes on")
    if options.command == "learner" and options.address is None:
        progress.say(f"the run's cluster is still up; `seqrelay stop {os.path.relpath(run_directory)}` ends it")
    return INTERRUPTED if outcome.interrupted else 0


def doctor(options: argparse.Namespace, config: Config) -> int:
    """A run that never trains, in a folder that is removed: 1 if it shows a fault."""
    with tempfile.TemporaryDirectory(prefix="seqrelay-doctor-", ignore_cleanup_errors=True) as folder:
        examined = examined_config(config, folder)
        run_directory = open_for_learner(examined, resume=False, alone=True)
        outcome, failure = launch.Outcome(finished=False, interrupted=False), ""
        try:
            outcome = launch.examine(examined, run_directory, doctor_view.Stages(run_directory, quiet=options.json))
        except RunFailed as error:
            failure = str(error)
        found = read_examination(run_directory)
    if outcome.interrupted:
        return INTERRUPTED
    findings = judge(config, found, failure)
    if options.json:
        print(doctor_view.as_json(findings, found, config, failure))
    else:
        doctor_view.show(findings, found, config, failure)
    return int(worst(findings) == "fault")


def rollout(options: argparse.Namespace, config: Config) -> int:
    run_directory = open_for_rollout(config)
    view = LogLines(launch.log_path(run_directory, "rollout"))
    outcome = launch.serve("rollout", config, run_directory, options.address, view)
    view.say("the run is finished" if outcome.finished else "stopped; what was held is handed in")
    return INTERRUPTED if outcome.interrupted else 0


def status(options: argparse.Namespace) -> int:
    found, served = run_status.status(find_run(options.directory), options.address)
    print(run_status.as_json(found, served) if options.json else run_status.as_text(found, served))
    return 0


def stop(options: argparse.Namespace) -> int:
    timeout_s = 0.0 if options.now else options.timeout
    run_status.stop(find_run(options.directory), options.address, timeout_s, say=lambda line: print(line, flush=True))
    return 0


def replay(options: argparse.Namespace) -> int:
    """In a process of its own: this one loads no model."""
    command = [sys.executable, "-m", "learner.replay", "--run", str(find_run(options.directory))]
    for name in ("to_step", "out"):
        if (value := getattr(options, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return subprocess.run([*command, *(["--json"] if options.json else [])], check=False).returncode
