"""The picture of the range study: for each part the rewards by step, with a band over seeds, and the clipped shares."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from study_range_tables import Cell

_WINDOW = 5  # steps over which a curve is averaged
_COLORS = {"paper": "C3", "middle": "C1", "sized": "C2", "wide": "C0"}


def draw(parts: Sequence[tuple[str, Sequence[Cell]]], out: Path) -> None:
    """One row for each part."""
    figure, axes = plt.subplots(len(parts), 2, figsize=(13, 4.2 * len(parts)), layout="constrained", squeeze=False)
    for (title, cells), (rewards, clipped) in zip(parts, axes, strict=True):
        for cell in cells:
            _draw_reward(rewards, cell)
            shares = [figure and figure.mean for figure in cell.by_minibatch("clip_fraction_by_minibatch")]
            points = [(i + 1, share) for i, share in enumerate(shares) if share is not None]
            clipped.plot(*zip(*points, strict=True), marker="o", label=cell.label, **_style(cell))
        rewards.set(xlabel="learner step", ylabel=f"reward, mean of {_WINDOW} steps", title=title)
        clipped.set(xlabel="mini-batch of the step", ylabel="clipped share of A ≠ 0", title="Clipped", ylim=(-0.02, 1))
        clipped.set_xticks(range(1, 1 + len(cells[0].by_minibatch("clip_fraction_by_minibatch"))))
        for axis in (rewards, clipped):
            axis.grid(alpha=0.3)
            axis.legend(fontsize="x-small")
    figure.savefig(out, dpi=100)
    plt.close(figure)


def _draw_reward(axis: plt.Axes, cell: Cell) -> None:
    """Mean over seeds, and the band from the lowest to the highest."""
    by_seed = np.array([[row["reward_mean"] for row in rows] for rows in cell.runs], dtype=np.float64)
    window = min(_WINDOW, by_seed.shape[1])
    smooth = np.array([np.convolve(rewards, np.ones(window) / window, mode="valid") for rewards in by_seed])
    steps = np.arange(window - 1, by_seed.shape[1])
    axis.plot(steps, smooth.mean(axis=0), label=cell.label, **_style(cell))
    if len(smooth) > 1:
        axis.fill_between(steps, smooth.min(axis=0), smooth.max(axis=0), color=_style(cell)["color"], alpha=0.08)


def _style(cell: Cell) -> dict[str, Any]:
    name, _, how = cell.label.partition(", ")
    if "recompute" in how:
        return {"color": "black", "linestyle": ":"}
    return {"color": _COLORS[name], "linestyle": "-" if how == "calibrated" else "--"}
