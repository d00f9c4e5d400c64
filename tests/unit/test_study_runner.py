"""The training loop of studies, with an engine made of hashes: order, resets, staleness, resuming."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from tiny_models import tiny_model

from shared.config import Config
from shared.errors import ConfigError
from study_noise import Noise
from study_results import Results
from study_runner import Arm, engine_needed, run_arms, run_training
from tiny_moe import make_tokenizer

TIMES = ("_s", "_per_s")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(vocab_size=128, eos_token_id=1, pad_token_id=0).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def config_for(model: Path, max_staleness: int = 0, steps: int = 3, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": str(model), "precision": "float32"},
        "prompts": {"style": "plain", "digits": 2, "num_held_out": 4},
        "reward": {"function": "example_rewards:even_length"},
        "sampling": {"group_size": 6, "max_tokens": 6},
        "rollout": {"max_model_len": 32},
        "learner": {"steps": steps, "prompts_per_step": 8, "minibatches": 2, "lr": 1e-3},
        # The engine's numbers are those of another model.
        "sync": {"max_staleness": max_staleness, "max_mismatch": 1e6},
        "evaluation": {"samples": 1},
    }
    return Config.model_validate(values | sections)


async def all_rows(engine: Any, config: Config, noise: Noise | None = None) -> list[dict[str, Any]]:
    return [row async for row in run_training(engine, config, noise)]


def decided(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What does not depend on the clock."""
    return [{name: value for name, value in row.items() if not name.endswith(TIMES)} for row in rows]


def test_the_synchronous_loop_trains_what_the_present_weights_sampled(model: Path) -> None:
    engine = FakeEngine()
    rows = asyncio.run(all_rows(engine, config_for(model)))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["staleness_max"] for row in rows] == [0, 0, 0]
    assert engine.num_loads == 1 + 3  # the model's own weights, then one version a step
    for row in rows:
        assert row["num_updates"] == 2
        assert row["generate_s"] > 0 and row["train_s"] > 0 and row["load_s"] > 0 and row["probe_s"] > 0
    assert rows[0]["check_s"] > 0 and rows[1]["check_s"] == 0
    assert [row["held_out_before"] is not None for row in rows] == [True, False, False]
    assert [row["held_out_after"] is not None for row in rows] == [False, False, True]
    assert rows[1]["measured_spread"] is not None and rows[1]["mismatch_spread"] is not None
    assert rows[1]["probe_k3"] is not None


def test_what_a_step_measures_counts_from_the_next_one_and_step_0_once(model: Path) -> None:
    config = config_for(model, sync={"max_staleness": 0, "max_mismatch": 1e6, "probe_sequences": 0})
    rows = asyncio.run(all_rows(FakeEngine(), config))
    checked, same, later = (row["mismatch_k3"] for row in rows)
    assert checked == same != later  # step 0's rollouts were measured by the sampling check
    assert [row["probe_k3"] for row in rows] == [None] * 3


def test_a_step_behind_every_step_but_the_first_trains_the_version_before(model: Path) -> None:
    rows = asyncio.run(all_rows(FakeEngine(), config_for(model, max_staleness=1)))
    assert [(row["staleness_mean"], row["staleness_max"]) for row in rows] == [(0.0, 0), (1.0, 1), (1.0, 1)]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_arm_begins_from_the_models_own_weights_whatever_ran_before(model: Path, max_staleness: int) -> None:
    engine = FakeEngine()
    config = config_for(model, max_staleness)
    first = asyncio.run(all_rows(engine, config))
    again = asyncio.run(all_rows(engine, config))
    assert decided(again) == decided(first)


def test_timing_decides_nothing(model: Path) -> None:
    config = config_for(model, max_staleness=1)
    fast = asyncio.run(all_rows(FakeEngine(), config))
    slow = asyncio.run(all_rows(FakeEngine(token_s=0.02), config))
    assert decided(slow) == decided(fast)


def test_noise_is_in_the_numbers_that_are_trained_on(model: Path) -> None:
    config = config_for(model)
    plain = asyncio.run(all_rows(FakeEngine(), config))
    noisy = asyncio.run(all_rows(FakeEngine(), config, Noise(0.1)))
    assert noisy[0]["reward_mean"] == plain[0]["reward_mean"]
    assert noisy[0]["log_ratio_mean"] != plain[0]["log_ratio_mean"]


def test_only_what_is_set_decides_a_run(model: Path) -> None:
    """Options to come leave the runs that were made where they are."""
    said = {"model": {"path": str(model)}, "learner": {"steps": 3}}
    arm = Arm("arm", Config.model_validate(said))
    assert arm.settings == {"config": said, "noise": None}
    other = Arm("arm", Config.model_validate(said | {"learner": {"steps": 3, "lr": 1e-6}}))
    assert other.settings != arm.settings


def test_more_staleness_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="max_staleness = 2"):
        asyncio.run(all_rows(FakeEngine(), config_for(model, max_staleness=2)))


def test_finished_arms_are_skipped_and_the_others_share_an_engine(model: Path, tmp_path: Path) -> None:
    results, engines, told = Results("example", 1, tmp_path), [], []

    async def make_engine(config: Config) -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    def arms(*names: str) -> list[Arm]:
        return [Arm(n, config_for(model, steps=1), Noise(0.1) if n == "noisy" else None) for n in names]

    def run(*names: str) -> Any:
        return asyncio.run(run_arms(arms(*names), results, lambda *told_: told.append(told_), make_engine))

    runs = run("plain", "noisy")
    assert [run.arm for run in runs] == ["plain", "noisy"]
    assert len(engines) == 1 and engines[0].closed
    assert told == [("plain", 1, 1), ("noisy", 1, 1)]
    told.clear()
    assert [r.table.to_pylist() for r in run("plain", "noisy")] == [r.table.to_pylist() for r in runs]
    assert len(engines) == 1 and not told
    run("plain", "another")
    assert len(engines) == 2 and told == [("another", 1, 1)]


def test_an_arm_that_fails_leaves_no_run(model: Path, tmp_path: Path) -> None:
    results, engines = Results("example", 1, tmp_path), []

    async def make_engine(config: Config) -> FakeEngine:
        engines.append(FakeEngine(reject=lambda request: "never"))
        return engines[-1]

    arm = Arm("arm", config_for(model, steps=1))
    with pytest.raises(Exception, match="never"):
        asyncio.run(run_arms([arm], results, lambda *_: None, make_engine))
    assert results.find("arm", arm.settings) is None
    assert engines[0].closed


def test_arms_share_an_engine_where_it_would_be_the_same(model: Path) -> None:
    one = config_for(model)
    same = config_for(model, max_staleness=1, clip={"low": 0.1, "high": 0.1})
    other = config_for(model, rollout={"max_model_len": 64})
    assert engine_needed(one) == engine_needed(same) != engine_needed(other)
