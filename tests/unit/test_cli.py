"""The command line as a person meets it: in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from shared.config_file import load_config

CONFIGS = sorted((Path(__file__).parents[2] / "scripts" / "configs").glob("*.toml"))
MINIMAL = '[model]\npath = "{model}"\n'


def seqrelay(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shared.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    path = tmp_path / "first.toml"
    path.write_text(MINIMAL.format(model=model))
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    assert load_config(path).run.name


def test_there_are_shipped_configs() -> None:
    assert {path.stem for path in CONFIGS} >= {"demo", "tiny_moe"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("clip.hgih=0.1", ["unknown key 'clip.hgih'", "'high'"]),
        ("learner.minibatches=3", ["learner.minibatches = 3", "learner.prompts_per_step = 8", "[1, 2, 4, 8]"]),
        ("sampling.group_size=1", ["sampling.group_size = 1", "Set sampling.group_size to 2 or more"]),
        ("sampling.top_p=0.8", ["sampling.top_p = 0.8", "Set sampling.top_p = 1.0"]),
        ("learner.lr=fast", ["learner.lr = 'fast'"]),
        ("learner", ["not of the form section.key=value"]),
        ("model.path=nowhere", ["model.path = 'nowhere'", "no config.json"]),
        ("run.name=../up", ["run.name = '../up'"]),
    ],
)
@pytest.mark.parametrize("command", ["train", "doctor"])
def test_a_bad_config_ends_with_code_2_and_says_what_to_change(
    toml: Path, command: str, override: str, said: list[str]
) -> None:
    result = seqrelay(command, str(toml), override)
    assert result.returncode == 2, result.stderr
    assert not [text for text in said if text not in result.stderr], result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("order", [("--json", "learner.lr=0"), ("learner.lr=0", "--json")])
def test_options_and_overrides_come_in_any_order(toml: Path, order: tuple[str, str]) -> None:
    result = seqrelay("train", str(toml), *order)
    assert (result.returncode, "learner.lr = 0" in result.stderr) == (2, True), result.stderr
    assert "unrecognized arguments: --jsno" in seqrelay("train", str(toml), *order, "--jsno").stderr


def test_a_run_directory_is_never_overwritten(toml: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    result = seqrelay("train", str(toml), f"run.directory={tmp_path / 'runs'}")
    assert result.returncode == 2
    assert "exists already and is never overwritten" in result.stderr


@pytest.mark.parametrize(
    ("file", "named"),
    [("config.json", "config.json"), ("model.safetensors", "*.safetensors"), ("tokenizer.json", "tokenizer")],
)
def test_an_incomplete_model_ends_with_code_2(toml: Path, tmp_path: Path, file: str, named: str) -> None:
    (tmp_path / "model" / file).rename(tmp_path / "model" / "tokenizer_config.json")
    result = seqrelay("train", str(toml))
    assert result.returncode == 2
    assert f"no {named} there" in result.stderr


def test_a_run_directory_that_cannot_be_made_ends_with_code_2(toml: Path, tmp_path: Path) -> None:
    result = seqrelay("train", str(toml), f"run.directory={toml}")
    assert result.returncode == 2
    assert "cannot be made: Not a directory" in result.stderr
    result = seqrelay("train", str(toml), f"run.directory={tmp_path}", f"run.name={'n' * 300}")
    assert result.returncode == 2
    assert "cannot be made: File name too long" in result.stderr


def test_only_a_run_that_exists_is_resumed_stopped_looked_at_or_replayed(toml: Path, tmp_path: Path) -> None:
    result = seqrelay("train", str(toml), "--resume", f"run.directory={tmp_path}")
    assert (result.returncode, "there is no run in" in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "first").exists()
    for command in ("status", "stop", "replay"):
        result = seqrelay(command, str(tmp_path))
        assert (result.returncode, "not a run directory" in result.stderr) == (2, True), result.stderr


def test_the_number_of_workers_is_checked_like_the_option(toml: Path) -> None:
    result = seqrelay("rollout", str(toml), "--workers", "0")
    assert (result.returncode, "rollout.workers = 0" in result.stderr) == (2, True), result.stderr


def test_a_missing_file_ends_with_code_2(tmp_path: Path) -> None:
    result = seqrelay("train", str(tmp_path / "no.toml"))
    assert result.returncode == 2
    assert "no.toml: cannot be read (No such file or directory)" in result.stderr


def test_a_bad_config_is_refused_before_anything_heavy_is_imported(toml: Path) -> None:
    probe = (
        "import sys; from shared.cli import main; code = main(sys.argv[1:]); "
        "print(code, sorted({'ray', 'torch', 'vllm', 'transformers', 'pyarrow'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", probe, "train", str(toml), "learner.lr=0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "2 []", (result.stdout, result.stderr)
