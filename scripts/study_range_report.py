"""From the finished runs of the range study to docs/study_range.md and its picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from study_range_cases import DEMO_STEPS, MOE_SEEDS, MOE_STEPS, NOISE, Case
from study_range_tables import (
    LAST,
    Cell,
    clipped_table,
    compare,
    comparison_table,
    learning_table,
    minutes,
    variance_table,
)
from study_range_text import HEAD, LIMITS, READING, TABLES
from study_results import Results, Run

COMMAND = "python scripts/study_range.py"
DEMO_LAST = 5  # steps
# What is compared, by (range, calibration or anchor): with noise and without.
COMPARED = (
    (("paper", "measured"), ("paper", "none")),
    (("sized", "measured"), ("sized", "none")),
    (("wide", "measured"), ("wide", "none")),
    (("wide", "none"), ("paper", "none")),
    (("sized", "none"), ("paper", "none")),
    (("wide", "none"), ("sized", "none")),
    (("wide", "measured"), ("paper", "measured")),
    (("wide", "none"), ("wide", "recompute")),
    (("wide", "measured"), ("wide", "recompute")),
    (("middle", "none"), ("paper", "none")),
    (("wide", "none"), ("middle", "none")),
    (("middle", "measured"), ("middle", "none")),
    (("middle", "none"), ("middle", "recompute")),
    (("middle", "measured"), ("middle", "recompute")),
    (("wide", "measured"), ("middle", "measured")),
)


@dataclass(frozen=True)
class Part:
    """One section of the report: a title, its cases' figures, and how they were made."""

    title: str
    cases: tuple[Case, ...]
    cells: tuple[Cell, ...]
    runs: tuple[Run, ...]
    last: int

    def cell(self, range_: str, how: str) -> Cell | None:
        """The cell of a range and a calibration, or "recompute"; None where it was not run."""
        for case, cell in zip(self.cases, self.cells, strict=True):
            if case.range == range_ and how == ("recompute" if case.anchor == "recompute" else case.calibration):
                return cell
        return None

    @property
    def made(self) -> str:
        """Command, day, machine and minutes."""
        days = sorted({run.made["on"] for run in self.runs})
        machines = sorted({run.made["machine"].replace("1 cores of", "1 core a run of") for run in self.runs})
        return f"`{COMMAND}`, {' to '.join(days)}, {'; '.join(machines)}, {minutes(self.cells):.0f} minutes of steps"


def load(title: str, cases: Sequence[Case], results: Results, last: int) -> Part | None:
    """The part of these cases; None without any. ValueError when a run is not there."""
    cells, all_runs = [], []
    for case in cases:
        arms = [case.arm(seed) for seed in case.seeds]
        runs = [run for arm in arms if (run := results.find(arm.name, arm.settings)) is not None]
        if len(runs) < len(arms):
            raise ValueError(
                f"{case.arm(0).name} is not in {results.folder}: run the study without --report-only first"
            )
        cells.append(Cell(case.label, tuple(run.table.to_pylist() for run in runs)))
        all_runs += runs
    return Part(title, tuple(cases), tuple(cells), tuple(all_runs), last) if cells else None


def parts_of(moe: Sequence[Case], demo: Sequence[Case], results: Results) -> list[Part]:
    """The sections that have cases, in order."""
    noisy = f"Tiny MoE, float32, with noise of {NOISE.spread} nats a token as of bfloat16"
    parts = [
        load("Tiny MoE, float32, engine and learner agree", [c for c in moe if not c.noise], results, LAST),
        load(noisy, [c for c in moe if c.noise], results, LAST),
        load("SmolLM2, float32, one step behind", [c for c in demo if c.precision == "float32"], results, DEMO_LAST),
        load("SmolLM2, bfloat16, one step behind", [c for c in demo if c.precision != "float32"], results, DEMO_LAST),
    ]
    return [part for part in parts if part]


def section(part: Part) -> str:
    """A part's tables, each with how it was made."""
    compared = []
    for one, other in COMPARED:
        first, second = part.cell(*one), part.cell(*other)
        if first and second:
            compared.append(compare(first, second, part.last))
    tables = [
        ("Learning", learning_table(part.cells, part.last)),
        ("Clipped", clipped_table(part.cells)),
        ("What log s is made of", variance_table(part.cells)),
        *([(f"Compared, reward of the last {part.last} steps", comparison_table(compared))] if compared else []),
    ]
    return f"## {part.title}\n\n" + "\n\n".join(f"{name} ({part.made}):\n\n{text}" for name, text in tables)


def document(parts: Sequence[Part]) -> str:
    settings = f"{MOE_STEPS} steps and {len(MOE_SEEDS)} seeds (tiny MoE), {DEMO_STEPS} steps and one or two (SmolLM2)"
    head = HEAD.format(settings=settings)
    return "\n\n".join([head, READING, TABLES, *(section(part) for part in parts), LIMITS]) + "\n"


def write_report(moe: Sequence[Case], demo: Sequence[Case], results: Results, folder: Path) -> None:
    """Print the tables and write `study_range.md` and `study_range.png` into `folder`."""
    from study_range_figure import draw

    parts = parts_of(moe, demo, results)
    for part in parts:
        print(section(part) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    draw([(part.title, part.cells) for part in parts], folder / "study_range.png")
    (folder / "study_range.md").write_text(document(parts))
    print(f"wrote {folder / 'study_range.md'} and {folder / 'study_range.png'}")
