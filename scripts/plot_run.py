"""Draw the curve of one or more runs: pass rate, held-out pass rate and clip fraction by step.

python scripts/plot_run.py runs/demo [runs/other ...] --out docs/demo.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from shared.run_files import read_evaluations, read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    figure, (reward_axis, clip_axis) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for index, run in enumerate(options.runs):
        rows = read_metrics(run)
        if not rows:
            parser.error(f"{run} has no metrics.jsonl with a finished step")
        color = f"C{index}"
        steps = [row["step"] for row in rows]
        reward_axis.plot(steps, [row["reward_mean"] for row in rows], color=color, label=f"{run.name}: training")
        held_out = read_evaluations(run)
        reward_axis.plot(
            [e.version for e in held_out], [e.pass_rate for e in held_out],
            "o", color=color, markerfacecolor="white", label=f"{run.name}: held out",
        )  # fmt: skip
        for number, style in enumerate(["-", "--", ":", "-."][: len(rows[0]["clip_fraction_by_minibatch"])]):
            fractions = [row["clip_fraction_by_minibatch"][number] for row in rows]
            points = [(s, f) for s, f in zip(steps, fractions, strict=True) if f is not None]
            clip_axis.plot(*zip(*points, strict=True), style, color=color, label=f"{run.name}: mini-batch {number + 1}")
    reward_axis.set(xlabel="learner step", ylabel="pass rate", ylim=(0, 1.02), title="Pass rate")
    clip_axis.set(xlabel="learner step", ylabel="share of sequences with A ≠ 0", ylim=(0, 1), title="Clip fraction")
    for axis in (reward_axis, clip_axis):
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=120)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
