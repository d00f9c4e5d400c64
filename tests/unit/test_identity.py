"""Who belongs to a run: digests that see what matters and nothing else, and a refusal that names it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import shared.identity
from shared.config import Config
from shared.errors import ConfigError
from shared.identity import BLOCK_BYTES, LOCAL_OPTIONS, NUM_BLOCKS, SHARED_OPTIONS, check_same, identity_of
from shared.records import Identity

MODEL_CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 4, "text_config": {"num": 1}}
SMALL, LARGE = "model-1.safetensors", "model-2.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small file, which is read whole, and one of 8 MiB, of which half is sampled."""
    folder = tmp_path_factory.mktemp("model")
    generator = np.random.default_rng(0)
    save_file({"a": generator.normal(size=100).astype(np.float32)}, folder / SMALL)
    save_file({"b": generator.normal(size=1 << 21).astype(np.float32)}, folder / LARGE)
    write_json(folder / "config.json", MODEL_CONFIG)
    write_json(folder / "generation_config.json", {"eos_token_id": 2, "top_p": 0.9})
    write_json(folder / "tokenizer.json", {"vocabulary": ["a", "b"]})
    write_json(folder / "tokenizer_config.json", {"eos_token": "b"})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("a model")
    return folder


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def of(folder: Path, make_config: Callable[..., Config], **sections: dict[str, Any]) -> Identity:
    model = {"path": str(folder)} | sections.pop("model_section", {})
    return identity_of(make_config(model=model, **sections))


def flip(file: Path, position: int) -> None:
    blob = bytearray(file.read_bytes())
    blob[position] ^= 1
    file.write_bytes(blob)


def relabel(folder: Path) -> None:
    labels = {"_name_or_path": "/home/me", "transformers_version": "4.0", "dtype": "bfloat16", "torch_dtype": "float16"}
    text_config = {"num": 1, "dtype": "bfloat16"}
    write_json(folder / "config.json", labels | dict(reversed(MODEL_CONFIG.items())) | {"text_config": text_config})
    write_json(folder / "tokenizer_config.json", {"name_or_path": "elsewhere", "eos_token": "b"})
    write_json(folder / "generation_config.json", {"eos_token_id": 2})
    (folder / "README.md").write_text("the same model")


def test_equal_checkpoints_in_different_folders_are_equal(
    original: Path, model: Path, make_config: Callable[..., Config]
) -> None:
    relabel(model)
    assert of(model, make_config) == of(original, make_config)


CHANGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a byte of a small file": ("model", lambda m: flip(m / SMALL, 300)),
    "the first byte of a large file": ("model", lambda m: flip(m / LARGE, 0)),
    "the last byte of a large file": ("model", lambda m: flip(m / LARGE, -1)),
    "a byte of a header": ("model", lambda m: flip(m / LARGE, 12)),
    "two files swapped": ("model", lambda m: swap(m / SMALL, m / LARGE)),
    "a file more": ("model", lambda m: shutil.copy(m / SMALL, m / "model-3.safetensors")),
    "config.json": ("model", lambda m: write_json(m / "config.json", MODEL_CONFIG | {"hidden_size": 8})),
    "end-of-sequence ids": ("model", lambda m: write_json(m / "generation_config.json", {"eos_token_id": [2, 3]})),
    "tokenizer.json": ("tokenizer", lambda m: write_json(m / "tokenizer.json", {"vocabulary": ["b", "a"]})),
    "tokenizer_config.json": ("tokenizer", lambda m: write_json(m / "tokenizer_config.json", {"eos_token": "a"})),
    "the chat template": ("tokenizer", lambda m: (m / "chat_template.jinja").write_text("{{ message }}")),
    "a vocabulary more": ("tokenizer", lambda m: (m / "vocab.txt").write_text("a")),
}


def swap(first: Path, second: Path) -> None:
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


@pytest.mark.parametrize("change", CHANGES)
def test_what_makes_another_model_or_tokenizer_is_seen(
    change: str, original: Path, model: Path, make_config: Callable[..., Config]
) -> None:
    field, edit = CHANGES[change]
    edit(model)
    before, after = of(original, make_config), of(model, make_config)
    assert getattr(before, field) != getattr(after, field)
    assert replace(before, **{field: ""}) == replace(after, **{field: ""})


def test_a_large_file_is_sampled_evenly(original: Path, model: Path, make_config: Callable[..., Config]) -> None:
    num_bytes = (model / LARGE).stat().st_size
    assert num_bytes > NUM_BLOCKS * BLOCK_BYTES
    flip(model / LARGE, num_bytes - BLOCK_BYTES - 1)
    assert of(model, make_config) == of(original, make_config), "just before the last block: documented as unseen"
    values = np.fromfile(model / LARGE, dtype=np.uint8)
    spacing = (num_bytes - BLOCK_BYTES) // (NUM_BLOCKS - 1)
    for start in range(0, num_bytes - spacing, spacing):  # whatever lies in one spacing and a block is seen in part
        changed = values.copy()
        changed[start : start + spacing] ^= 1
        (model / LARGE).write_bytes(changed.tobytes())
        assert of(model, make_config).model != of(original, make_config).model


def test_a_long_header_is_read_whole(model: Path, make_config: Callable[..., Config]) -> None:
    header_bytes, gap = 3 * BLOCK_BYTES, BLOCK_BYTES + 100  # between the first two sampled blocks
    (model / LARGE).write_bytes(header_bytes.to_bytes(8, "little") + bytes(NUM_BLOCKS * BLOCK_BYTES * 2))
    before = of(model, make_config).model
    flip(model / LARGE, gap)
    assert of(model, make_config).model != before


@pytest.mark.parametrize(
    ("file", "message"),
    [("config.json", "config.json"), ("*.safetensors", "no \\*.safetensors"), ("*token*", "no tokenizer file")],
)
def test_an_incomplete_checkpoint_is_refused(
    file: str, message: str, model: Path, make_config: Callable[..., Config]
) -> None:
    for path in [*model.glob(file), *(model.glob("chat*") if "token" in file else ())]:
        path.unlink()
    with pytest.raises(ConfigError, match=f"model.path = .*{message}.*Give the folder of a complete checkpoint"):
        of(model, make_config)


def test_a_damaged_config_is_refused(model: Path, make_config: Callable[..., Config]) -> None:
    (model / "config.json").write_text("[1")
    with pytest.raises(ConfigError, match=r"model\.path"):
        of(model, make_config)
    write_json(model / "config.json", [1])
    with pytest.raises(ConfigError, match=r"config\.json holds no JSON object"):
        of(model, make_config)


def test_every_option_is_shared_or_local() -> None:
    options = {
        f"{section}.{name}"
        for section, field in Config.model_fields.items()
        for name in field.annotation.model_fields  # type: ignore[union-attr]
    }
    assert options == SHARED_OPTIONS | LOCAL_OPTIONS, "classify a new option in shared/identity.py"
    assert not SHARED_OPTIONS & LOCAL_OPTIONS


def test_settings_are_the_shared_options_as_json(original: Path, make_config: Callable[..., Config]) -> None:
    settings = of(original, make_config).settings
    assert settings.keys() == SHARED_OPTIONS
    assert settings["model.precision"] == '"bfloat16"'
    assert settings["learner.prompts_per_step"] == "2"
    assert settings["sampling.temperature"] == "1.0"


def test_the_code_digest_follows_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "site"
    for package in ("learner", "rollout", "shared"):
        (copy / package / "inner").mkdir(parents=True)
        (copy / package / "inner" / "a.py").write_text("x = 1")
    monkeypatch.setattr(shared.identity, "__file__", str(copy / "shared" / "identity.py"))
    code = shared.identity._code.__wrapped__
    seen = {code()}
    (copy / "other").mkdir()
    (copy / "other" / "a.py").write_text("not ours")
    assert code() in seen
    for package in ("learner", "rollout", "shared"):
        (copy / package / "inner" / "a.py").write_text("x = 2")
        seen.add(code())
    (copy / "rollout" / "inner" / "a.py").rename(copy / "rollout" / "inner" / "b.py")
    seen.add(code())
    assert len(seen) == 5


def test_equal_sides_pass_whatever_is_local(original: Path, model: Path, make_config: Callable[..., Config]) -> None:
    mine = of(model, make_config, rollout={"threads": 4, "workers": 2}, run={"directory": "/elsewhere"})
    check_same(mine, of(original, make_config, learner={"lr": 1e-4}))


def test_a_refusal_names_all_that_differs_with_both_values(
    original: Path, model: Path, make_config: Callable[..., Config]
) -> None:
    flip(model / SMALL, 300)
    worker = of(model, make_config, model_section={"precision": "float32"}, sampling={"temperature": 0.5})
    learner = of(original, make_config)
    with pytest.raises(ConfigError) as caught:
        check_same(worker, learner)
    assert str(caught.value).splitlines() == [
        "this worker does not belong to the learner's run:",
        f"model: the worker has {worker.model}, the learner {learner.model}: "
        "give both the same checkpoint in model.path.",
        'model.precision: the worker has "float32", the learner "bfloat16": give both the same value.',
        "sampling.temperature: the worker has 0.5, the learner 1.0: give both the same value.",
    ]


def test_another_release_is_refused_even_with_other_options(original: Path, make_config: Callable[..., Config]) -> None:
    learner = of(original, make_config)
    older = replace(learner, code="0.0.9-aa", schema="0-bb", settings={"run.seed": "0", "run.old": "1"})
    with pytest.raises(ConfigError) as caught:
        check_same(older, learner)
    text = str(caught.value)
    assert f"code: the worker has 0.0.9-aa, the learner {learner.code}: install the same release" in text
    assert "schema: the worker has 0-bb" in text
    assert "run.old: the worker has 1, the learner no such option" in text
    assert "model.precision: the worker has no such option" in text
