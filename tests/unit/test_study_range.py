"""The range study: its cases and their keys, its parts, and its tables on rows that are made up."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from study_range import arms_of, main, part, part_of
from study_range_cases import DEMO_CASES, MOE_CASES, NOISE, SHORT_CASES, Case
from study_range_report import document, load, parts_of
from study_range_tables import (
    Cell,
    clipped_table,
    compare,
    comparison_table,
    learning_table,
    minutes,
    table,
    variance_table,
)
from study_results import Results

pytestmark = pytest.mark.usefixtures("in_the_repository")


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


def row(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "reward_mean": 0.5,
        "num_rollouts": 64,
        "held_out_before": None if step else 0.25,
        "held_out_after": 0.75,
        "step_s": 3.0,
        "train_s": 2.0,
        "anchor_s": 0.5,
        "clip_fraction_positive": 0.1,
        "clip_fraction_negative": 0.3,
        "clip_fraction_by_minibatch": [0.0, 0.4],
        "clip_fraction_positive_by_minibatch": [0.0, 0.2],
        "clip_fraction_negative_by_minibatch": [0.0, 0.6],
        "clip_scale": 2.0 + step,
        "clip_noise_mean": 0.01,
        "measured_spread": 0.06,
        "mismatch_spread": 0.05,
        "log_ratio_variance": 4e-4,
        "log_ratio_variance_mismatch": 3e-4,
        "log_ratio_variance_stale_cache": None,
        "log_ratio_variance_lag": 1e-4,
        "log_ratio_rms_by_minibatch": [0.02, 0.05],
    } | values


def cell(label: str, *rewards_by_seed: list[float]) -> Cell:
    runs = [[row(i, reward_mean=reward) for i, reward in enumerate(rewards)] for rewards in rewards_by_seed]
    return Cell(label, tuple(runs))


def cells_of(line: str) -> list[str]:
    return [text.strip() for text in line.strip("|").split("|")]


def test_each_combination_is_run_with_the_same_seeds() -> None:
    assert len(MOE_CASES) == 14
    assert len(arms_of(MOE_CASES)) == 42
    for case in MOE_CASES:
        assert case.anchor == "engine" or (case.range, case.calibration) == ("wide", "none")
    compared = {(c.range, c.calibration, c.anchor, bool(c.noise)) for c in MOE_CASES}
    assert len(compared) == 14
    assert [(c.precision, c.range, c.calibration, c.anchor) for c in DEMO_CASES] == [
        ("float32", "middle", "none", "engine"),
        ("float32", "wide", "none", "engine"),
        ("bfloat16", "middle", "none", "engine"),
        ("bfloat16", "middle", "measured", "engine"),
        ("bfloat16", "middle", "none", "recompute"),
        ("bfloat16", "wide", "none", "engine"),
        ("bfloat16", "wide", "measured", "engine"),
        ("bfloat16", "wide", "none", "recompute"),
    ]
    assert [len(c.seeds) for c in DEMO_CASES] == [1, 1, 1, 1, 1, 2, 2, 2]


def test_an_arm_sets_all_that_the_study_varies() -> None:
    case = next(c for c in MOE_CASES if c.range == "sized" and c.calibration == "measured" and c.noise)
    arm = case.arm(2)
    clip = arm.config.clip
    assert (clip.low, clip.high, clip.sizing, clip.calibration) == (3e-4, 4e-4, "drift", "measured")
    assert (arm.config.run.seed, arm.config.learner.steps, arm.config.sync.max_staleness) == (2, 40, 0)
    assert (arm.noise, arm.config.max_mismatch, arm.config.evaluation.samples) == (NOISE, 0.25, 1)
    exact = replace(case, noise=None).arm(2)
    assert (exact.noise, exact.config.max_mismatch) == (None, 1e-4)
    demo = next(c for c in DEMO_CASES if c.anchor == "recompute").arm(0)
    assert (demo.config.model.precision, demo.config.learner.anchor) == ("bfloat16", "recompute")
    assert (demo.config.sync.max_staleness, demo.config.evaluation.samples, demo.config.learner.steps) == (1, 0, 15)


def test_every_run_has_a_file_of_its_own() -> None:
    arms = arms_of(MOE_CASES) + arms_of(DEMO_CASES)
    results = Results("range", 1, Path("nowhere"))
    assert len({arm.name for arm in arms}) == len(arms) == 53
    assert len({results.path(arm.name, arm.settings) for arm in arms}) == len(arms)


def test_another_version_or_seed_or_noise_is_another_file() -> None:
    case = MOE_CASES[-1]
    arm = case.arm(0)
    paths = [
        Results("range", 1).path(arm.name, arm.settings),
        Results("range", 2).path(arm.name, arm.settings),
        Results("range", 1).path(arm.name, case.arm(1).settings),
        Results("range", 1).path(arm.name, replace(case, noise=replace(NOISE, spread=0.01)).arm(0).settings),
    ]
    assert len(set(paths)) == 4


def test_parts_are_disjoint_even_and_together_everything() -> None:
    arms = arms_of(MOE_CASES)
    halves = [part_of(arms, number, 2) for number in (1, 2)]
    assert [len(half) for half in halves] == [21, 21]
    assert sorted(arm.name for half in halves for arm in half) == sorted(arm.name for arm in arms)
    assert part_of(arms, 1, 1) == arms


def test_seeds_come_one_after_the_other() -> None:
    arms = arms_of(MOE_CASES)
    assert [arm.config.run.seed for arm in arms] == [0] * 14 + [1] * 14 + [2] * 14
    uneven = [replace(MOE_CASES[0], seeds=(0, 1)), replace(MOE_CASES[1], seeds=(0,))]
    assert [arm.config.run.seed for arm in arms_of(uneven)] == [0, 0, 1]


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "-1/2", "a/b"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 1/2"):
        part(text)
    assert part("2/3") == (2, 3)


def test_a_part_makes_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--part", "1/2", "--report-only"])
    assert "--part" in capsys.readouterr().err


def test_figures_are_means_over_the_last_steps_of_each_seed() -> None:
    figure = cell("wide", [0.0, 0.2, 0.4], [0.0, 0.4, 0.6]).over_steps("reward_mean", last=2)
    assert figure is not None
    assert figure.values == pytest.approx((0.3, 0.5))
    assert figure.mean == pytest.approx(0.4)
    assert figure.spread == pytest.approx(0.1 * 2**0.5)


def test_steps_without_a_value_are_left_out() -> None:
    rows = [row(0, clip_fraction_positive=None), row(1, clip_fraction_positive=0.4)]
    figure = Cell("wide", (rows,)).over_steps("clip_fraction_positive")
    assert figure is not None
    assert figure.values == (0.4,)
    assert figure.spread is None
    assert Cell("wide", ([row(0, measured_spread=None)],)).over_steps("measured_spread") is None


def test_shares_by_minibatch() -> None:
    rows = [row(0, clip_fraction_by_minibatch=[0.0, None]), row(1, clip_fraction_by_minibatch=[0.2, 0.6])]
    figures = Cell("wide", (rows,)).by_minibatch("clip_fraction_by_minibatch")
    assert [figure and figure.mean for figure in figures] == [pytest.approx(0.1), pytest.approx(0.6)]


def test_the_tables_show_what_the_rows_hold() -> None:
    cells = [cell("wide, fixed", [0.2, 0.4], [0.4, 0.6])]
    learned = cells_of(learning_table(cells, last=1).splitlines()[2])
    assert learned == [
        "wide, fixed", "0.500 ± 0.141", "0.400, 0.600", "0.061", "0.250 ± 0.000", "0.750 ± 0.000",
        "3.00", "2.00", "0.50 (25%)"
    ]  # fmt: skip
    clipped = cells_of(clipped_table(cells).splitlines()[2])
    assert clipped == [
        "wide, fixed", "10.0%", "30.0%", "0.0% / 40.0%", "0.0% / 20.0%", "0.0% / 60.0%", "3", "1.0e-02"
    ]  # fmt: skip
    parts = cells_of(variance_table(cells).splitlines()[2])
    assert parts == [
        "wide, fixed", "0.06", "0.05", "4.0e-04", "3.0e-04 (75%)", "-", "1.0e-04 (25%)", "2.0e-02 / 5.0e-02"
    ]  # fmt: skip
    assert minutes(cells) == pytest.approx(4 * 3.0 / 60)


def test_chance_is_that_of_so_many_rollouts() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.binomial(64, [0.2, 0.6], size=(4000, 2)) / 64
    assert cell("any", [0.9, 0.2, 0.6]).chance(last=2) == pytest.approx(rewards.mean(axis=1).std(), rel=0.05)


def test_held_out_rates_have_no_column_where_nothing_is_held_out() -> None:
    runs = ([row(0, held_out_before=None, held_out_after=None)],)
    assert "held out" not in learning_table([Cell("wide, fixed", runs)])
    assert "held out, after" in learning_table([cell("wide, fixed", [0.5])])


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        ((0.6, 0.7), (0.4, 0.5), "above"),
        ((0.1, 0.2), (0.4, 0.5), "below"),
        ((0.4, 0.7), (0.5, 0.6), "overlap"),
        ((0.5, 0.7), (0.3, 0.5), "overlap"),  # they touch
        ((0.9,), (0.1, 0.2), "one seed"),
    ],
)
def test_nothing_is_ranked_where_seeds_overlap(one: Any, other: Any, verdict: str) -> None:
    first, second = cell("one", *([r] for r in one)), cell("other", *([r] for r in other))
    assert compare(first, second).verdict == verdict


def test_differences_are_between_runs_of_one_seed() -> None:
    comparison = compare(cell("one", [0.4], [0.7], [0.6]), cell("other", [0.5], [0.6]))
    assert comparison.by_seed == pytest.approx((-0.1, 0.1))
    line = cells_of(comparison_table([comparison]).splitlines()[2])
    assert line == ["one", "other", "+0.000", "-0.100, +0.100", "overlap"]


def test_a_table_is_markdown() -> None:
    assert table([("a", "b"), ("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def written(cases: tuple[Case, ...], folder: Path) -> Results:
    results = Results("range", 1, folder)
    for arm in arms_of(cases):
        results.write(arm.name, arm.settings, pa.Table.from_pylist([row(i) for i in range(3)]))
    return results


def test_a_report_has_each_part_with_its_tables(tmp_path: Path) -> None:
    results = written(MOE_CASES + DEMO_CASES, tmp_path)
    parts = parts_of(MOE_CASES, DEMO_CASES, results)
    assert [len(part.cells) for part in parts] == [7, 7, 2, 6]
    text = document(parts)
    assert text.count("`python scripts/study_range.py`, 2") == 4 * 4
    assert text.count("| paper, calibrated | paper, fixed |") == 2
    assert parts[0].cell("wide", "recompute") is parts[0].cells[-1]
    assert parts[2].cell("wide", "measured") is None
    assert len(parts[3].cells[-1].runs) == 2


def test_a_report_needs_every_run(tmp_path: Path) -> None:
    results = written(SHORT_CASES[:1], tmp_path)
    assert load("there", SHORT_CASES[:1], results, last=5) is not None
    assert load("nothing", (), results, last=5) is None
    with pytest.raises(ValueError, match="without --report-only"):
        load("missing", SHORT_CASES, results, last=5)
