"""Figures of the range study from the rows of its runs, and the tables made of them. Pure.

A figure of a case is a mean over its seeds of a mean over steps; its spread is that between seeds. Steps in which a
value does not exist (no sequence of that sign, say) are left out; a value that never exists is shown as "-".
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
LAST = 10  # steps


@dataclass(frozen=True)
class Figure:
    """One value a seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation between seeds; None of a single one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Cell:
    """A case with the rows of each of its runs."""

    label: str
    runs: tuple[list[Row], ...]

    def over_steps(self, key: str | Callable[[Row], float | None], last: int | None = None) -> Figure | None:
        """Mean over steps (the last ones only, if given) for each seed; None if no seed has any value."""
        value_of = (lambda row: row[key]) if isinstance(key, str) else key
        means = []
        for rows in self.runs:
            values = [value for row in rows[-last if last else 0 :] if (value := value_of(row)) is not None]
            if values:
                means.append(statistics.fmean(values))
        return Figure(tuple(means)) if means else None

    def at_step(self, key: str, index: int) -> Figure | None:
        """The value of one step for each seed that has it."""
        values = tuple(float(rows[index][key]) for rows in self.runs if rows[index][key] is not None)
        return Figure(values) if values else None

    def chance(self, last: int) -> float:
        """Standard error of one seed's reward in the last steps, from sampling alone, of rewards that are 0 or 1."""
        errors = []
        for rows in self.runs:
            scored = [row for row in rows[-last:] if row["reward_mean"] is not None]
            variances = [row["num_rollouts"] * row["reward_mean"] * (1 - row["reward_mean"]) for row in scored]
            errors.append(math.sqrt(sum(variances)) / max(1, sum(row["num_rollouts"] for row in scored)))
        return statistics.fmean(errors)

    def by_minibatch(self, key: str) -> list[Figure | None]:
        """`over_steps` of each entry of a list by mini-batch."""
        num_minibatches = len(self.runs[0][0][key])
        return [self.over_steps(lambda row, i=i: row[key][i]) for i in range(num_minibatches)]  # type: ignore[misc]


@dataclass(frozen=True)
class Comparison:
    """Reward of the last steps of `one` against `other`, in the same order of seeds."""

    one: str
    other: str
    first: Figure
    second: Figure

    @property
    def verdict(self) -> str:
        """A difference only where every seed of one lies beyond every seed of the other, with two seeds or more."""
        if min(len(self.first.values), len(self.second.values)) < 2:
            return "one seed"
        if min(self.first.values) > max(self.second.values):
            return "above"
        if max(self.first.values) < min(self.second.values):
            return "below"
        return "overlap"

    @property
    def by_seed(self) -> tuple[float, ...]:
        """The differences of runs of the same seed, which are asked the same prompts."""
        return tuple(a - b for a, b in zip(self.first.values, self.second.values, strict=False))

    @property
    def difference(self) -> float:
        """Their mean: seeds that only one of the two has say nothing about the other."""
        return sum(self.by_seed) / len(self.by_seed)


def compare(one: Cell, other: Cell, last: int = LAST) -> Comparison:
    """ValueError when either has no reward at all."""
    first, second = one.over_steps("reward_mean", last), other.over_steps("reward_mean", last)
    if first is None or second is None:
        raise ValueError(f"{one.label} or {other.label} has no scored rollout")
    return Comparison(one.label, other.label, first, second)


def learning_table(cells: Sequence[Cell], last: int = LAST) -> str:
    """Reward, held-out pass rate and time."""
    rows = [
        (
            cell.label,
            with_spread(cell.over_steps("reward_mean", last)),
            seeds_of(cell.over_steps("reward_mean", last)),
            f"{cell.chance(last):.3f}",
            with_spread(cell.at_step("held_out_before", 0)),
            with_spread(cell.at_step("held_out_after", -1)),
            plain(cell.over_steps("step_s"), ".2f"),
            plain(cell.over_steps("train_s"), ".2f"),
            with_share(cell.over_steps("anchor_s"), cell.over_steps("train_s"), ".2f"),
        )
        for cell in cells
    ]
    header = (
        "case", f"reward, last {last} steps", "each seed", "of it chance", "held out, before", "held out, after",
        "s a step", "of it training", "of it recomputing",
    )  # fmt: skip
    return table(_without_empty_columns(header, rows))


def clipped_table(cells: Sequence[Cell]) -> str:
    """Clipped shares by sign and by mini-batch, and what the range was."""
    rows = [
        (
            cell.label,
            percent(cell.over_steps("clip_fraction_positive")),
            percent(cell.over_steps("clip_fraction_negative")),
            " / ".join(percent(f) for f in cell.by_minibatch("clip_fraction_by_minibatch")),
            " / ".join(percent(f) for f in cell.by_minibatch("clip_fraction_positive_by_minibatch")),
            " / ".join(percent(f) for f in cell.by_minibatch("clip_fraction_negative_by_minibatch")),
            plain(cell.at_step("clip_scale", -1), ".3g"),
            plain(cell.over_steps("clip_noise_mean"), ".1e"),
        )
        for cell in cells
    ]
    header = (
        "case", "A > 0", "A < 0", "by mini-batch", "by mini-batch, A > 0", "by mini-batch, A < 0", "scale at the end",
        "added for noise",
    )  # fmt: skip
    return table([header, *rows])


def variance_table(cells: Sequence[Cell]) -> str:
    """The parts of the variance of log s in the first mini-batch, against the engine's numbers."""
    rows = []
    for cell in cells:
        total = cell.over_steps("log_ratio_variance")
        parts = [cell.over_steps(f"log_ratio_variance_{part}") for part in ("mismatch", "stale_cache", "lag")]
        rows.append(
            (
                cell.label,
                plain(cell.over_steps("measured_spread"), ".2g"),
                plain(cell.over_steps("mismatch_spread"), ".2g"),
                plain(total, ".1e"),
                *(with_share(part, total, ".1e") for part in parts),
                " / ".join(plain(f, ".1e") for f in cell.by_minibatch("log_ratio_rms_by_minibatch")),
            )
        )
    header = (
        "case", "spread measured", "spread used", "variance of log s", "mismatch", "stale cache", "lag",
        "rms of log s by mini-batch",
    )  # fmt: skip
    return table([header, *rows])


def comparison_table(comparisons: Iterable[Comparison]) -> str:
    rows = [
        (
            c.one,
            c.other,
            f"{c.difference:+.3f}",
            ", ".join(f"{difference:+.3f}" for difference in c.by_seed),
            c.verdict,
        )
        for c in comparisons
    ]
    return table([("case", "against", "difference", "by seed", "every seed beyond every seed"), *rows])


def minutes(cells: Sequence[Cell]) -> float:
    """Wall minutes in the steps of all runs."""
    return sum(row["step_s"] for cell in cells for rows in cell.runs for row in rows) / 60


def with_spread(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    return f"{figure.mean:.3f}" + ("" if figure.spread is None else f" ± {figure.spread:.3f}")


def seeds_of(figure: Figure | None) -> str:
    return "-" if figure is None else ", ".join(f"{value:.3f}" for value in figure.values)


def percent(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.mean:.1%}"


def plain(figure: Figure | None, form: str) -> str:
    return "-" if figure is None else format(figure.mean, form)


def with_share(part: Figure | None, whole: Figure | None, form: str) -> str:
    """A part and what share of the whole it is."""
    if part is None or whole is None or not part.mean:
        return "-"
    return f"{plain(part, form)} ({part.mean / whole.mean:.0%})"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Markdown; the first line is the header."""
    header, *rows = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *rows))


def _without_empty_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    kept = [i for i in range(len(header)) if any(row[i] != "-" for row in rows)]
    return [[line[i] for i in kept] for line in (header, *rows)]
