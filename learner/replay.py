"""`python -m learner.replay --run RUN_DIR`: train a run again from its recorded rollouts, and compare.

Reads the run directory and changes nothing in it; needs neither Ray nor an engine. Each step starts from the weights
that the replay itself came to, so equal digests mean that plans, rollouts, optimizer and weights are all the run's.
Exit codes: 0 all digests are equal, 1 one differs, 2 the arguments or the run directory cannot be used.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from learner.optim import Optimizer
from learner.policy import Policy
from learner.publish import published_digest
from learner.redo import redo_step
from learner.step import StepResult
from shared.config import Config
from shared.config_file import load_resolved
from shared.errors import ConfigError, SchemaError
from shared.ledger_rows import StepRow
from shared.metrics import mean, ratio
from shared.records import RecordedStep
from shared.run_files import read_recorded_step, read_steps
from shared.schema import decode_group

_HEADER = f"{'step':>5}{'reward':>8}{'loss':>11}{'clip +':>8}{'clip -':>8}  digest"


@dataclass(frozen=True)
class ReplayedStep:
    """One step trained again. None where a mean or a share is over nothing; the formulas are in shared.metrics.

    `equal`: the weights after it have the digest that the run recorded.
    """

    step: int
    reward_mean: float | None
    loss: float | None
    clip_fraction_positive: float | None
    clip_fraction_negative: float | None
    num_updates: int
    digest: str
    recorded_digest: str

    @property
    def equal(self) -> bool:
        return self.digest == self.recorded_digest


def replay(
    config: Config, run_directory: Path, to_step: int | None = None, out: Path | None = None
) -> Iterator[ReplayedStep]:
    """Train steps 0 to `to_step` - 1 (all committed ones without it) again; after the last, save the weights to `out`.

    Raises:
        ConfigError: `to_step` is not 1 to the number of committed steps, `out` exists, or the model cannot be loaded.
        SchemaError: the ledger or a step's rollouts cannot be read.
    """
    committed = [row for row in read_steps(run_directory) if row.weights_digest is not None]
    num_steps = len(committed) if to_step is None else to_step
    if not 1 <= num_steps <= len(committed):
        raise ConfigError(
            f"--to-step = {num_steps}: {run_directory} has {len(committed)} committed steps. "
            f"Give a number from 1 to {len(committed)}."
            if committed
            else f"{run_directory}: no step is committed yet, so there is nothing to replay."
        )
    if out is not None and out.exists():
        raise ConfigError(f"--out = {out}: it exists already and is never overwritten. Choose another name.")
    return _replay(config, run_directory, committed[:num_steps], out)


def _replay(config: Config, run_directory: Path, rows: Sequence[StepRow], out: Path | None) -> Iterator[ReplayedStep]:
    torch.set_num_threads(config.learner.threads)
    policy = _initial_policy(config)
    optimizer = Optimizer(policy, config)
    for row in rows:
        recorded = read_recorded_step(run_directory, row)
        result = redo_step(policy, optimizer, recorded, config)
        yield _account(recorded, result, published_digest(policy, config))
    if out is not None:
        policy.save(out)


def _initial_policy(config: Config) -> Policy:
    path = Path(config.model.path)
    if not path.is_dir():
        raise ConfigError(
            f"model.path = {config.model.path!r}: no such folder"
            + ("." if path.is_absolute() else f" in {Path.cwd()}; the path counts from where the run was started.")
            + " Replay needs the model that the run began with; start it in the folder the run was started in."
        )
    return Policy.load(config)


def _account(recorded: RecordedStep, result: StepResult, digest: str) -> ReplayedStep:
    rollouts = [rollout for payload in recorded.groups for rollout in decode_group(payload).rollouts]
    total = result.metrics
    return ReplayedStep(
        step=recorded.plan.step,
        reward_mean=mean([rollout.reward for rollout in rollouts if rollout.reward is not None]),
        loss=mean([minibatch.loss for minibatch in result.minibatches]),
        clip_fraction_positive=ratio(total.num_clipped_positive, total.num_positive),
        clip_fraction_negative=ratio(total.num_clipped_negative, total.num_negative),
        num_updates=result.num_updates,
        digest=digest,
        recorded_digest=recorded.weights_digest,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        config = load_resolved(options.run / "config.json")
        steps: list[ReplayedStep] = []
        for step in replay(config, options.run, options.to_step, options.out):
            _show(step, options.json, first=not steps)
            steps.append(step)
    except (ConfigError, SchemaError) as error:
        print(f"seqrelay replay: {error}", file=sys.stderr)
        return 2
    return _summarize(steps, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m learner.replay", description="Train a recorded run again.")
    parser.add_argument("--run", type=Path, required=True, metavar="RUN_DIR", help="the run's directory")
    parser.add_argument("--to-step", type=int, metavar="K", help="train steps 0 to K - 1 only")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="save the weights after the last step here")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    return parser


def _show(step: ReplayedStep, json_lines: bool, first: bool) -> None:
    if json_lines:
        print(json.dumps({"kind": "step", **asdict(step), "equal": step.equal}), flush=True)
        return
    if first:
        print(_HEADER)
    clipped = [(share, 8, 2) for share in (step.clip_fraction_positive, step.clip_fraction_negative)]
    numbers = [(step.reward_mean, 8, 3), (step.loss, 11, 5), *clipped]
    cells = "".join(f"{'-' if value is None else f'{value:.{digits}f}':>{width}}" for value, width, digits in numbers)
    print(f"{step.step:>5}{cells}  {'equal' if step.equal else 'DIFFERENT'} {step.digest[:12]}", flush=True)


def _summarize(steps: Sequence[ReplayedStep], json_lines: bool) -> int:
    num_equal = sum(step.equal for step in steps)
    first = next((step for step in steps if not step.equal), None)
    if json_lines:
        summary = {"num_steps": len(steps), "num_equal": num_equal, "first_different": first.step if first else None}
        print(json.dumps({"kind": "summary", **summary}), flush=True)
    elif first is None:
        print(f"all {len(steps)} steps gave the recorded weights")
    else:
        print(
            f"step {first.step} is the first of {len(steps) - num_equal} (of {len(steps)}) that gave other weights: "
            f"{first.digest[:12]}, recorded {first.recorded_digest[:12]}"
        )
    return 0 if first is None else 1


if __name__ == "__main__":
    sys.exit(main())
