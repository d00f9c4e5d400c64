"""What fills the clip range, and which range learns: the range, its calibration and the anchor, one against another.

python scripts/study_range.py                # runs what is missing (an hour on two idle cores), then reports
python scripts/study_range.py --part 1/2     # on one core, that half of the tiny-MoE runs that is missing; no report
python scripts/study_range.py --report-only  # reads scripts/studies/range, writes docs/study_range.*
python scripts/study_range.py --short        # a minute, three steps of four cases, into a temporary folder

The models come from `make models`. Two parts side by side take half the time: without staleness an engine and its
learner take turns, so that each part needs one core.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study_progress import progress_bars
from study_range_cases import DEMO_CASES, MOE_CASES, SHORT_CASES, Case
from study_range_report import write_report
from study_results import Results
from study_runner import Arm, run_arms

STUDY, VERSION = "range", 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    moe, demo = (SHORT_CASES, ()) if options.short else (MOE_CASES, DEMO_CASES)
    if options.part:
        make_runs(part_of(arms_of(moe), *options.part), Results(STUDY, VERSION), one_core=options.part[0] - 1)
        return 0
    with tempfile.TemporaryDirectory(prefix="seqrelay-study-") as temporary:
        results = Results(STUDY, VERSION, Path(temporary) if options.short else None)
        if not options.report_only:
            make_runs(arms_of(moe) + arms_of(demo), results)
        write_report(moe, demo, results, Path(temporary) if options.short else Path("docs"))
    return 0


def arms_of(cases: Sequence[Case]) -> list[Arm]:
    """Every run of the cases: the first seed of each, then the second, and so on."""
    most = max((len(case.seeds) for case in cases), default=0)
    return [case.arm(case.seeds[i]) for i in range(most) for case in cases if i < len(case.seeds)]


def part_of(arms: Sequence[Arm], number: int, of: int) -> list[Arm]:
    """The `number`-th (from 1) of `of` parts of about equal cost: every `of`-th arm."""
    return list(arms[number - 1 :: of])


def make_runs(arms: Sequence[Arm], results: Results, one_core: int | None = None) -> None:
    """Make what is missing, with a bar for each run. `one_core`: the index of the only core it may use."""
    if one_core is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[one_core % len(cores)]})  # the engine's processes inherit it
    with progress_bars() as progress:
        asyncio.run(run_arms(arms, results, progress))


def _options(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="a minute's form of it, into a temporary folder")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("--part", type=part, metavar="I/N", help="make part I of N of the tiny-MoE runs, no report")
    options = parser.parse_args(arguments)
    if options.part and (options.short or options.report_only):
        parser.error("--part makes runs and nothing else: leave out --short and --report-only")
    return options


def part(text: str) -> tuple[int, int]:
    """(1, 2) of "1/2"; ValueError for what is no part."""
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise ValueError(f"--part {text}: give a part and the number of parts, such as 1/2")
    return int(number), int(of)


if __name__ == "__main__":
    sys.exit(main())
