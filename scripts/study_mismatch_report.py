"""From the finished runs of the mismatch study to docs/study_mismatch.md and its picture."""

from collections.abc import Callable, Sequence
from pathlib import Path

from study_mismatch_analysis import LengthFigures, Verdict, verdicts
from study_mismatch_runs import Scores
from study_mismatch_tables import (
    Cell,
    analyze,
    cost_table,
    lengths_table,
    percent,
    probability_table,
    table,
    tokens_table,
)
from study_results import Results

# The acceptance is about these modes, from this length on.
JUDGED = ("bfloat16", "bfloat16-float32-head")
FROM_LENGTH = 16


def acceptance(cells: Sequence[Cell]) -> list[tuple[Cell, LengthFigures, Verdict]]:
    """The lines that say whether the calibrated range does what it is for, in bfloat16."""
    return [
        (cell, figures, verdict)
        for cell in _judged(cells)
        for figures in cell.by_length
        if figures.length >= FROM_LENGTH
        for verdict in verdicts(figures)
    ]


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
    """The whole text of docs/study_mismatch.md."""
    parts = {
        "tokens": tokens_table(cells),
        "probability": probability_table(
            [c for c in cells if c.name in ("float32", "bfloat16") and c.temperature == 1]
        ),
        "log_s": lengths_table(cells, {"median": _scaled(0), "99 %": _scaled(2), "largest": _scaled(3)}),
        "independence": lengths_table(cells, {"": lambda f: f"{f.independence:.2f}"}),
        "fixed": lengths_table(
            cells, {"A > 0": lambda f: percent(f.fixed.good), "A < 0": lambda f: percent(f.fixed.bad)}
        ),
        "calibrated": lengths_table(
            cells, {"A > 0": lambda f: percent(f.calibrated.good), "A < 0": lambda f: percent(f.calibrated.bad)}
        ),
        "half_width": lengths_table(cells, {"": lambda f: f"{f.half_width:.1e}"}),
        "shifted": lengths_table(
            _judged(cells),
            {"up, A > 0": lambda f: f"{f.shifted_good:.0%}", "down, A < 0": lambda f: f"{f.shifted_bad:.0%}"},
        ),
        "acceptance": acceptance_table(lines),
        "cost": cost_table(cells),
        "machine": cells[0].sampled.made["machine"],
        "date": max(str(cell.scored.made["on"]) for cell in cells),
    }
    return TEXT.format(**parts)


def _judged(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.scores.precision in JUDGED]


def _scaled(quantile: int) -> Callable[[LengthFigures], str]:
    return lambda f: f"{f.quantiles[quantile]:.1e}"


def acceptance_table(lines: Sequence[tuple[Cell, LengthFigures, Verdict]]) -> str:
    """Lines passed by what they ask, and every line that did not pass."""
    by_what: dict[str, list[str]] = {}
    for cell, figures, verdict in lines:
        outcomes = by_what.setdefault(verdict.what, [])
        where = f"{cell.name}, T = {cell.temperature}, {figures.length} tokens: {verdict.figures}"
        outcomes.append("" if verdict.outcome == "pass" else f"{verdict.outcome}: {where}")
    rows = [
        (what, f"{outcomes.count('')} of {len(outcomes)}", "<br>".join(filter(None, outcomes)))
        for what, outcomes in by_what.items()
    ]
    return table(("what", "passed", "the others"), rows)
