"""The finished runs of the mismatch study as analyzed cells, and the tables made of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from study_mismatch_analysis import (
    LENGTHS,
    Bin,
    CrossFit,
    Interval,
    LengthFigures,
    TokenFigures,
    by_probability,
    length_figures,
    token_figures,
)
from study_mismatch_runs import SMOLLM2, Scores, arrays
from study_mismatch_sureness import Sureness, by_sureness
from study_results import Results, Run

SURENESS_LENGTHS = (16, 64)


@dataclass(frozen=True)
class Cell:
    """One scoring run, analyzed. `by_length` in the order of LENGTHS, without those that no sequence reaches."""

    scores: Scores
    sampled: Run
    scored: Run
    tokens: TokenFigures
    by_length: list[LengthFigures]
    bins: list[Bin]
    sureness: list[Sureness]

    @property
    def name(self) -> str:
        """Model if it is not SmolLM2, engine and learner."""
        engine, learner = self.scores.samples.precision, self.scores.precision
        model = "" if self.scores.samples.model == SMOLLM2 else "tiny MoE, "
        return f"{model}{learner}" if self.is_mode else f"{engine} engine, {learner} learner"

    @property
    def is_mode(self) -> bool:
        """Whether engine and learner compute as one of the values of model.precision says."""
        return self.scores.precision.startswith(self.scores.samples.precision)

    @property
    def temperature(self) -> float:
        return self.scores.samples.temperature


def analyze(scores: Scores, results: Results, num_draws: int) -> Cell:
    """`num_draws` of the bootstrap. ValueError when the runs are not there."""
    sampled = results.find(scores.samples.arm, scores.samples.settings)
    scored = results.find(scores.arm, scores.settings)
    if sampled is None or scored is None:
        raise ValueError(f"{scores.arm} is not in {results.folder}: run the study without --report-only first")
    learner = arrays(scored, "learner_logprobs")
    engine = arrays(sampled, "engine_logprobs")[: len(learner)]
    differences = [ours.astype(np.float64) - theirs for ours, theirs in zip(learner, engine, strict=True)]
    fit = CrossFit(differences, num_draws)
    lengths = [length_figures(differences, length, fit) for length in LENGTHS]
    sureness = [by_sureness(differences, engine, length, fit) for length in SURENESS_LENGTHS]
    return Cell(
        scores,
        sampled,
        scored,
        token_figures(differences),
        [figures for figures in lengths if figures],
        by_probability(differences, engine),
        [shares for shares in sureness if shares],
    )


def tokens_table(cells: Sequence[Cell]) -> str:
    header = (
        "mode", "T", "sequences", "tokens", "mean abs d", "spread", "k3", "mean d", "largest abs d", "excess kurtosis"
    )  # fmt: skip
    rows = [
        (
            cell.name,
            f"{cell.temperature}",
            f"{cell.tokens.num_sequences}",
            f"{cell.tokens.num_tokens:,}",
            f"{cell.tokens.mean_abs:.2g}",
            f"{cell.tokens.measured.spread:.2g}",
            f"{cell.tokens.measured.k3:.2g}",
            f"{cell.tokens.mean:.2g} ± {cell.tokens.mean_error:.1g}",
            f"{cell.tokens.max_abs:.2g}",
            f"{cell.tokens.kurtosis:.1f}",
        )
        for cell in cells
    ]
    return table(header, rows)


def lengths_table(cells: Sequence[Cell], rows: Mapping[str, Callable[[LengthFigures], str]]) -> str:
    """One column a length; for each cell one line for each of `rows`, which name a figure and say how it reads."""
    lines = []
    for cell in cells:
        found = {f.length: f for f in cell.by_length}
        for name, read in rows.items():
            values = (read(found[length]) if length in found else "" for length in LENGTHS)
            lines.append((cell.name, f"{cell.temperature}", *([name] if len(rows) > 1 else []), *values))
    titles = ["mode", "T", *([""] if len(rows) > 1 else [])]
    return table([*titles, *(f"{length} tokens" for length in LENGTHS)], lines)


def probability_table(cells: Sequence[Cell]) -> str:
    header = ("mode", "T", "probability of the token", "tokens", "spread", "k3", "share of the sum of d²")
    rows = [
        (
            cell.name,
            f"{cell.temperature}",
            f"{b.low:g} to {b.high:g}",
            f"{b.num_tokens:,}",
            f"{b.spread:.2g}",
            f"{b.k3:.2g}",
            f"{b.variance_share:.0%}",
        )
        for cell in cells
        for b in cell.bins
    ]
    return table(header, rows)


def sureness_table(cells: Sequence[Cell]) -> str:
    header = ("mode", "T", "tokens", "windows", "range", "surest third", "middle third", "least sure third")
    rows = [
        (
            cell.name,
            f"{cell.temperature}",
            f"{s.length}",
            f"{s.num_windows}",
            name,
            *(f"{100 * value:.1f}" for value in shares),
        )
        for cell in cells
        for s in cell.sureness
        for name, shares in (("calibrated", s.uniform), ("by token", s.by_token))
    ]
    return table(header, rows)


def cost_table(cells: Sequence[Cell]) -> str:
    header = ("mode", "engine, tokens/s", "engine, tokens/CPU s", "learner, tokens/s", "learner, tokens/CPU s")
    by_name: dict[str, list[Cell]] = {}
    for cell in cells:
        by_name.setdefault(cell.name, []).append(cell)
    rows = [
        (name, *rates([c.sampled for c in same]), *rates([c.scored for c in same])) for name, same in by_name.items()
    ]
    return table(header, rows)


def rates(runs: Sequence[Run]) -> tuple[str, str]:
    num_tokens = sum(run.made["num_tokens"] for run in runs)
    return tuple(f"{num_tokens / sum(run.made[s] for run in runs):,.0f}" for s in ("wall_s", "cpu_s"))  # type: ignore


def percent(interval: Interval) -> str:
    return f"{100 * interval.value:.1f} ({100 * interval.low:.1f}-{100 * interval.high:.1f})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
