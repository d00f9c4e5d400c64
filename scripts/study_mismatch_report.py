"""From the finished runs of the mismatch study to docs/study_mismatch.md and its picture."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from study_mismatch_analysis import (
    LENGTHS,
    Bin,
    Clipped,
    CrossFit,
    Interval,
    LengthFigures,
    TokenFigures,
    Verdict,
    by_probability,
    length_figures,
    token_figures,
    verdicts,
)
from study_mismatch_runs import SMOLLM2, Samples, Scores, arrays
from study_results import Results, Run

MODES = ("float32", "float16", "bfloat16", "bfloat16-float32-head")
JUDGED = ("bfloat16", "bfloat16-float32-head")
# The acceptance holds from this length on; a token or two decide shorter ones.
FROM_LENGTH = 16


@dataclass(frozen=True)
class Cell:
    """One scoring run, analyzed. `by_length` in the order of LENGTHS, without those that no sequence reaches."""

    scores: Scores
    sampled: Run
    scored: Run
    tokens: TokenFigures
    by_length: list[LengthFigures]
    bins: list[Bin]

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


def analyze(scores: Scores, results: Results) -> Cell:
    """ValueError when the runs are not there."""
    sampled = results.find(scores.samples.arm, scores.samples.settings)
    scored = results.find(scores.arm, scores.settings)
    if sampled is None or scored is None:
        raise ValueError(f"{scores.arm} is not in {results.folder}: run the study without --report-only first")
    learner = arrays(scored, "learner_logprobs")
    engine = arrays(sampled, "engine_logprobs")[: len(learner)]
    differences = [ours.astype(np.float64) - theirs for ours, theirs in zip(learner, engine, strict=True)]
    fit = CrossFit(differences)
    lengths = [length_figures(differences, length, fit) for length in LENGTHS]
    return Cell(
        scores,
        sampled,
        scored,
        token_figures(differences),
        [figures for figures in lengths if figures],
        by_probability(differences, engine),
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


def lengths_table(cells: Sequence[Cell]) -> str:
    header = (
        "mode", "T", "tokens", "windows", "median", "90 %", "99 %", "largest", "half-width", "sd sqrt(tokens) / spread"
    )  # fmt: skip
    rows = [
        (
            cell.name,
            f"{cell.temperature}",
            f"{f.length}",
            f"{f.num_windows}",
            *(f"{value:.1e}" for value in f.quantiles),
            f"{f.half_width:.1e}",
            f"{f.independence:.2f}",
        )
        for cell in cells
        for f in cell.by_length
    ]
    return table(header, rows)


def clipped_table(cells: Sequence[Cell]) -> str:
    header = (
        "mode", "T", "tokens", "windows", "paper, A > 0", "paper, A < 0", "calibrated, A > 0", "calibrated, A < 0",
        "moved up, A > 0", "moved down, A < 0",
    )  # fmt: skip
    rows = [
        (
            cell.name,
            f"{cell.temperature}",
            f"{f.length}",
            f"{f.num_windows}",
            *(share(s) for clipped in (f.fixed, f.calibrated) for s in (clipped.good, clipped.bad)),
            f"{f.shifted_good:.0%}",
            f"{f.shifted_bad:.0%}",
        )
        for cell in cells
        for f in cell.by_length
    ]
    return table(header, rows)


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


def acceptance(cells: Sequence[Cell]) -> list[tuple[Cell, LengthFigures, Verdict]]:
    """The lines that say whether the calibrated range does what it is for, in bfloat16."""
    return [
        (cell, figures, verdict)
        for cell in cells
        if cell.scores.precision in JUDGED
        for figures in cell.by_length
        if figures.length >= FROM_LENGTH
        for verdict in verdicts(figures)
    ]


def share(interval: Interval) -> str:
    return f"{interval.value:.1%} ({interval.low:.1%} to {interval.high:.1%})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_report(all_scores: Sequence[Scores], results: Results, folder: Path) -> int:
    """Print the acceptance and write `study_mismatch.md` and `.png`: 1 if a line of the acceptance fails, else 0."""
    from study_mismatch_figure import draw

    cells = [analyze(scores, results) for scores in all_scores]
    lines = acceptance(cells)
    for cell, figures, verdict in lines:
        name = f"{cell.name} T={cell.temperature} {figures.length} tokens"
        print(f"{verdict.outcome:4}  {name:45} {verdict.what:45} {verdict.figures}")
    folder.mkdir(parents=True, exist_ok=True)
    draw(cells, folder / "study_mismatch.png")
    (folder / "study_mismatch.md").write_text(document(cells, lines))
    print(f"wrote {folder / 'study_mismatch.md'} and {folder / 'study_mismatch.png'}")
    return int(any(verdict.outcome == "FAIL" for _, _, verdict in lines))


def document(cells: Sequence[Cell], lines: Sequence[tuple[Cell, LengthFigures, Verdict]]) -> str:
    raise NotImplementedError
