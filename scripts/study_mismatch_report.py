"""From the finished runs of the mismatch study to docs/study_mismatch.md and its picture."""

from collections.abc import Callable, Sequence
from pathlib import Path

from study_mismatch_analysis import NUM_DRAWS, LengthFigures, Verdict, verdicts
from study_mismatch_figure import draw
from study_mismatch_runs import MAX_TOKENS, Scores, arrays
from study_mismatch_tables import (
    Cell,
    analyze,
    cost_table,
    lengths_table,
    percent,
    probability_table,
    sureness_table,
    table,
    tokens_table,
)
from study_mismatch_text import TEXT
from study_results import Results

# The acceptance is about these modes, from this length on.
JUDGED = ("bfloat16", "bfloat16-float32-head")
FROM_LENGTH = 16
# Of longer windows there are too few to tell single percents.
TOLD_LENGTH = 64
THIRDS = {"surest": 0, "least_sure": 2}
SIGNS = ("good", "bad")
OUTCOMES = {"passed": "pass", "failed": "FAIL", "open": "open"}


def acceptance(cells: Sequence[Cell]) -> list[tuple[Cell, LengthFigures, Verdict]]:
    """The lines that say whether the calibrated range does what it is for, in bfloat16."""
    return [
        (cell, figures, verdict)
        for cell in _judged(cells)
        for figures in cell.by_length
        if figures.length >= FROM_LENGTH
        for verdict in verdicts(figures)
    ]


def report(all_scores: Sequence[Scores], results: Results, folder: Path | None, num_draws: int = NUM_DRAWS) -> int:
    """Print the acceptance: 1 if a line of it fails, else 0. Write study_mismatch.md and .png into `folder`, if any."""
    cells = [analyze(scores, results, num_draws) for scores in all_scores]
    lines = acceptance(cells)
    for cell, figures, verdict in lines:
        name = f"{cell.name} T={cell.temperature} {figures.length} tokens"
        print(f"{verdict.outcome:4}  {name:45} {verdict.what:45} {verdict.figures}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        draw(cells, folder / "study_mismatch.png")
        (folder / "study_mismatch.md").write_text(document(cells, lines))
        print(f"wrote {folder / 'study_mismatch.md'} and {folder / 'study_mismatch.png'}")
    return int(any(verdict.outcome == "FAIL" for _, _, verdict in lines))


def document(cells: Sequence[Cell], lines: Sequence[tuple[Cell, LengthFigures, Verdict]]) -> str:
    """The whole text of docs/study_mismatch.md."""
    bins_of = [c for c in cells if c.name in ("float32", "bfloat16") and c.temperature == 1]
    rounded = [c for c in cells if c.scores.samples.precision != "float32"]
    exact = [f for c in cells if c not in rounded for f in c.by_length]
    tables = {
        "tokens": tokens_table(cells),
        "probability": probability_table(bins_of),
        "log_s": lengths_table(cells, {"median": _scaled(0), "99 %": _scaled(2), "largest": _scaled(3)}),
        "independence_table": lengths_table(cells, {"": lambda f: f"{f.independence:.2f}"}),
        "fixed": lengths_table(
            rounded, {"A > 0": lambda f: percent(f.fixed.good), "A < 0": lambda f: percent(f.fixed.bad)}
        ),
        "calibrated": lengths_table(
            rounded, {"A > 0": lambda f: percent(f.calibrated.good), "A < 0": lambda f: percent(f.calibrated.bad)}
        ),
        "half_width": lengths_table(rounded, {"": lambda f: f"{f.half_width:.1e}"}),
        "shifted": lengths_table(
            _judged(cells),
            {"up, A > 0": lambda f: f"{f.shifted_good:.1%}", "down, A < 0": lambda f: f"{f.shifted_bad:.1%}"},
        ),
        "sureness": sureness_table([c for c in cells if c.name == "bfloat16"]),
        "acceptance": acceptance_table(lines),
        "cost": cost_table(cells),
    }
    largest = f"{max(f.quantiles[-1] for f in exact):.0e}"
    return TEXT.format(**tables, largest_exact=largest, **_figures(cells, lines))


def _figures(cells: Sequence[Cell], lines: Sequence[tuple[Cell, LengthFigures, Verdict]]) -> dict[str, str]:
    """The figures that the words name, at temperature 1."""
    by_name = {cell.name: cell for cell in cells if cell.temperature == 1}
    float32, float16, bfloat16 = (by_name[name] for name in ("float32", "float16", "bfloat16"))
    head, other = by_name["bfloat16-float32-head"], by_name["bfloat16 engine, float32 learner"]
    lengths = {f.length: f for f in bfloat16.by_length}
    cold = next(cell for cell in cells if cell.name == "bfloat16" and cell.temperature < 1)
    clipped = [f.calibrated for c in _judged(cells) for f in c.by_length if FROM_LENGTH <= f.length <= TOLD_LENGTH]
    shares = [share.value for both in clipped for share in (both.good, both.bad)]
    outcomes = [verdict.outcome for _, _, verdict in lines]
    ratios = [f.independence for f in bfloat16.by_length]
    completions = [n for c in cells if c.name == "bfloat16" for n in map(len, arrays(c.sampled, "completion_ids"))]
    return {
        "machine": bfloat16.sampled.made["machine"],
        "date": max(str(cell.scored.made["on"]) for cell in cells),
        "engine_min": f"{sum({c.sampled.path: c.sampled.made['cpu_s'] for c in cells}.values()) / 60:.0f}",
        "learner_min": f"{sum(c.scored.made['cpu_s'] for c in cells) / 60:.0f}",
        "f32_abs": f"{float32.tokens.mean_abs:.1e}",
        "moe_abs": f"{by_name['tiny MoE, float32'].tokens.mean_abs:.1e}",
        "bf16_abs": f"{bfloat16.tokens.mean_abs:.1e}",
        **{
            f"fixed_{sign}_{n}": f"{100 * getattr(lengths[n].fixed, sign).value:.0f} %"
            for sign in SIGNS
            for n in (16, 512)
        },
        **{f"width_{n}": f"{lengths[n].half_width:.1e}" for n in (16, 512)},
        "num_lines": f"{len(outcomes)}",
        **{f"num_{name}": f"{outcomes.count(o)}" for name, o in OUTCOMES.items()},
        **{
            f"{sure}_{kind}": f"{100 * getattr(cold.sureness[0], kind)[third]:.0f} %"
            for sure, third in THIRDS.items()
            for kind in ("uniform", "by_token")
        },
        "calibrated_range": f"{100 * min(shares):.1f} to {100 * max(shares):.1f} %",
        "least_shifted": f"{100 * min(min(f.shifted_good, f.shifted_bad) for _, f, _ in lines):.1f} %",
        "independence": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "bf16_spread": f"{bfloat16.tokens.measured.spread:.3f}",
        "head_spread": f"{head.tokens.measured.spread:.3f}",
        "other_spread": f"{other.tokens.measured.spread:.3f}",
        "head_cost": f"{100 - 100 * _scored_per_cpu_s(head) / _scored_per_cpu_s(bfloat16):.0f} %",
        "f16_factor": f"{bfloat16.tokens.measured.spread / float16.tokens.measured.spread:.0f}",
        "num_long": f"{sum(n == MAX_TOKENS for n in completions)}",
        "num_bf16": f"{len(completions)}",
    }


def _scored_per_cpu_s(cell: Cell) -> float:
    return float(cell.scored.made["num_tokens"] / cell.scored.made["cpu_s"])


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
