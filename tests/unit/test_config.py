"""The run configuration: what is refused at the door, and whether the message says what to change."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.config import Config
from shared.config_file import load_config, load_resolved, parse_config
from shared.errors import ConfigError

MODEL = '[model]\npath = "models/m"\n'
Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load_text(text: str = MODEL, *overrides: str, name: str = "sums.toml") -> Config:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return load_text


def refusal(load: Load, text: str = MODEL, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


def test_a_file_needs_a_model_and_nothing_else(load: Load) -> None:
    config = load()
    assert (config.model.path, config.run.name) == ("models/m", "sums")
    assert "model.path is missing; add it to the file or give it as an override" in refusal(load, "")
    assert "model.path is missing" in refusal(load, "[model]\n")


def test_counts_that_do_not_fit_are_all_named_with_values_that_would(load: Load) -> None:
    message = refusal(load, MODEL, "learner.minibatches=3", "learner.prompts_per_step=8")
    for part in ("learner.minibatches = 3", "learner.prompts_per_step = 8", "[1, 2, 4, 8]"):
        assert part in message
    for minibatches in (1, 2, 4, 8):
        assert load(MODEL, f"learner.minibatches={minibatches}").learner.minibatches == minibatches


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ("sampling.max_tokens=512", "rollout.max_model_len=512"),
            ("sampling.max_tokens = 512", "rollout.max_model_len = 512", "Lower the first or raise the second"),
        ),
        (
            ("learner.micro_batch_tokens=511", "rollout.max_model_len=512"),
            ("learner.micro_batch_tokens = 511", "rollout.max_model_len = 512", "at least 512"),
        ),
        (("prompts.num_held_out=80",), ("prompts.num_held_out = 80", "prompts.digits = 1", "at most 40")),
    ],
)
def test_fields_that_contradict_each_other_are_named(
    load: Load, overrides: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    message = refusal(load, MODEL, *overrides)
    for part in parts:
        assert part in message


def test_a_misspelled_key_is_answered_with_the_nearest_one(load: Load) -> None:
    wrong = MODEL + "[clip]\nhgih = 3e-4\n"
    assert "unknown key 'clip.hgih'; did you mean 'high'?" in refusal(load, wrong)
    assert "unknown key 'clip.hgih'; did you mean 'high'?" in refusal(load, MODEL, "clip.hgih=1")
    assert "unknown key 'lerner'; did you mean 'learner'?" in refusal(load, MODEL + "[lerner]\nsteps = 3\n")
    assert "known here: path" in refusal(load, MODEL, "model.zzz=1")


def test_a_key_in_the_wrong_section_is_answered_with_the_right_one(load: Load) -> None:
    assert "unknown key 'lr'; did you mean 'learner.lr'?" in refusal(load, MODEL, "lr=1e-5")
    assert "did you mean 'sampling.temperature'?" in refusal(load, MODEL, "learner.temperature=0.5")
    assert "did you mean 'rollout.threads' or 'learner.threads'?" in refusal(load, MODEL, "sync.threads=2")


@pytest.mark.parametrize(("name", "value", "neutral"), [("top_p", 0.95, 1.0), ("top_k", 50, 0), ("min_p", 0.05, 0.0)])
def test_filters_of_the_sampled_distribution_are_refused(load: Load, name: str, value: float, neutral: float) -> None:
    message = refusal(load, MODEL, f"sampling.{name}={value}")
    assert f"sampling.{name} = {value} would filter the sampled distribution" in message
    assert f"Set sampling.{name} = {neutral}." in message
    load(MODEL, f"sampling.{name}={neutral}")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("learner.lr=0", "learner.lr = 0: Input should be greater than 0"),
        ("learner.lr=nan", "learner.lr = nan: Input should be a finite number"),
        ("learner.steps=0", "learner.steps = 0: Input should be greater than 0"),
        ("learner.steps=true", "learner.steps = True: Input should be a valid integer"),
        ('learner.steps="7"', "learner.steps = '7': Input should be a valid integer"),
        ("learner.steps=7.0", "learner.steps = 7.0: Input should be a valid integer"),
        ("learner.steps=7\nlr=3", "learner.steps = '7\\nlr=3': Input should be a valid integer"),
        ("sampling.group_size=1", "a group of one has none. Set sampling.group_size to 2 or more"),
        ("sampling.group_size=0", "sampling.group_size = 0: Input should be greater than 0"),
        ("sampling.temperature=0", "sampling.temperature = 0: Input should be greater than or equal to 0.05"),
        ("rollout.payload=tokens", "rollout.payload = 'tokens': Input should be 'token' or 'sequence'"),
        ("sync.max_staleness=-1", "sync.max_staleness = -1: Input should be greater than or equal to 0"),
        ("run.name=../up", "run.name = '../up': String should match pattern"),
        ("run.name=2026-01-01", 'put it in quotes: run.name = "2026-01-01"'),
        ("learner=3", "learner = 3: learner is a section; give its keys, such as [learner] in a file: steps, "),
        ("learner.lr.x=3", "learner.lr = {'x': 3}: Input should be a valid number"),
        ("model.path.x=3", "override 'model.path.x=3': 'path' is a value, not a section"),
        ("learner.lr", "override 'learner.lr' is not of the form section.key=value, such as learner.lr=1e-5"),
        ("=3", "override '=3' is not of the form section.key=value"),
        ("learner.=3", "override 'learner.=3' is not of the form section.key=value"),
    ],
)
def test_a_bad_value_is_named_with_what_would_do(load: Load, override: str, part: str) -> None:
    assert part in refusal(load, MODEL, override)


def test_every_fault_of_a_file_is_told_at_once(load: Load) -> None:
    message = refusal(load, MODEL + "[learner]\nlr = -1\nstepz = 3\n[sync]\nmax_staleness = -2\n")
    assert "sums.toml: " in message
    for part in ("learner.lr = -1", "'learner.stepz'; did you mean 'steps'?", "sync.max_staleness = -2"):
        assert part in message


def test_a_file_that_is_no_toml_is_named_with_the_place(load: Load, tmp_path: Path) -> None:
    assert "sums.toml: not valid TOML: Invalid value (at line 3, column 5)" in refusal(load, MODEL + "x = = 3")
    (tmp_path / "latin.toml").write_bytes(b"[model]\npath = '\xe9'\n")
    with pytest.raises(ConfigError, match="latin.toml: not valid TOML"):
        load_config(tmp_path / "latin.toml")
    with pytest.raises(
        ConfigError, match=r"nowhere.toml: cannot be read \(No such file.*Give the path of a run's TOML"
    ):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_overrides_are_toml_values_or_text_and_win_over_the_file(load: Load) -> None:
    config = load(
        MODEL + "[learner]\nlr = 1e-3\nsteps = 5\n",
        "learner.lr=1e-5",
        "learner.activation_checkpointing=true",
        "model.path=/models/with space",
        'run.name="12"',
        "run.directory = out ",
    )
    assert (config.learner.lr, config.learner.steps, config.learner.activation_checkpointing) == (1e-5, 5, True)
    assert (config.model.path, config.run.name, config.run.directory) == ("/models/with space", "12", "out")
    assert load(MODEL, "learner.steps=3", "learner.steps=4").learner.steps == 4
    assert load(MODEL, "learner.lr=1").learner.lr == 1.0


def test_a_config_cannot_be_changed_after_it_was_checked() -> None:
    config = parse_config({"model": {"path": "m"}})
    with pytest.raises(ValidationError, match="frozen"):
        config.learner.steps = 7
    with pytest.raises(ValidationError, match="frozen"):
        config.run = config.run


def test_the_resolved_config_reads_back_the_same(load: Load, tmp_path: Path) -> None:
    config = load(MODEL, "learner.lr=1e-5", "sampling.temperature=1")
    path = tmp_path / "config.json"
    path.write_text(config.model_dump_json(indent=2), encoding="utf-8")
    assert load_resolved(path) == config
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values | {"lerner": {}}), encoding="utf-8")
    with pytest.raises(ConfigError, match="config.json: unknown key 'lerner'"):
        load_resolved(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a run's config.json"):
        load_resolved(path)


def test_a_bad_config_ends_the_command_with_code_2_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(MODEL + "[clip]\nhgih = 3e-4\n", encoding="utf-8")
    code = (
        "import sys; from shared.cli import main; code = main(['train', sys.argv[1]]); "
        "print(code, {'ray', 'torch', 'vllm', 'transformers', 'pyarrow'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split(maxsplit=1) == ["2", "set()\n"]
    assert "did you mean 'high'?" in done.stderr
