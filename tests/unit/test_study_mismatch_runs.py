"""What the mismatch study runs, with an engine made of hashes, and the document it writes from finished runs."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from fake_engine import FakeEngine
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from study_mismatch import plan
from study_mismatch_report import report
from study_mismatch_runs import Samples, Scores, arrays, run_all, without_end_token
from study_results import Results
from tiny_moe import make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(vocab_size=128, eos_token_id=1, pad_token_id=0, bos_token_id=2).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


class Study:
    """A small study of one model; counts the engines it starts."""

    def __init__(self, model: Path, results: Results) -> None:
        self.results, self.engines = results, []
        self.samples = [Samples(str(model), "float32", temperature, 6, 12) for temperature in (1.0, 0.6)]
        self.scores = [Scores(s, precision, 4) for s in self.samples for precision in ("float32", "bfloat16")]

    def run(self) -> None:
        async def make_engine(config: Any) -> FakeEngine:
            self.engines.append(FakeEngine())
            return self.engines[-1]

        asyncio.run(run_all(self.samples, self.scores, self.results, make_engine, lambda *_: None))

    def files(self) -> set[str]:
        return {path.name for path in self.results.folder.iterdir()}


@pytest.fixture
def study(model: Path, tmp_path: Path) -> Study:
    return Study(model, Results("mismatch", 1, tmp_path))


def test_every_sample_has_both_sides_log_probabilities(study: Study) -> None:
    study.run()
    assert len(study.engines) == 1 and study.engines[0].closed
    for scores in study.scores:
        sampled = study.results.find(scores.samples.arm, scores.samples.settings)
        scored = study.results.find(scores.arm, scores.settings)
        assert sampled is not None and scored is not None
        completions, engine = arrays(sampled, "completion_ids"), arrays(sampled, "engine_logprobs")
        learner = arrays(scored, "learner_logprobs")
        assert [len(ids) for ids in completions] == [len(values) for values in engine]
        assert [len(values) for values in learner] == [len(ids) for ids in completions[:4]]
        assert all(np.isfinite(values).all() and (values <= 0).all() for values in learner)
        assert sampled.made["num_tokens"] == sum(map(len, completions))
        assert scored.made["cpu_s"] > 0


def test_a_study_that_is_whole_runs_nothing(study: Study) -> None:
    study.run()
    files = study.files()
    study.run()
    assert len(study.engines) == 1
    assert study.files() == files


def test_a_missing_scoring_run_needs_no_engine(study: Study) -> None:
    study.run()
    files = study.files()
    study.results.path(study.scores[1].arm, study.scores[1].settings).unlink()
    study.run()
    assert len(study.engines) == 1
    assert study.files() == files


def test_a_sample_is_scored_at_the_temperature_it_was_drawn_at(study: Study, model: Path) -> None:
    study.run()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for scores in study.scores:
        if scores.precision != "float32":
            continue
        sampled = study.results.find(scores.samples.arm, scores.samples.settings)
        scored = study.results.find(scores.arm, scores.settings)
        assert sampled is not None and scored is not None
        prompt, completion = (arrays(sampled, name)[0] for name in ("prompt_ids", "completion_ids"))
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / scores.samples.temperature).log_softmax(-1)[range(len(completion)), completion.tolist()]
        np.testing.assert_allclose(arrays(scored, "learner_logprobs")[0], expected, atol=1e-4)


def test_the_end_token_is_the_only_change_to_the_copy(model: Path, tmp_path: Path) -> None:
    copy = without_end_token(model, tmp_path / "copy")
    before, after = (json.loads((path / "config.json").read_text()) for path in (model, copy))
    assert after == before | {"eos_token_id": before["bos_token_id"]}
    assert json.loads((copy / "tokenizer_config.json").read_text())["eos_token"] == "<bos>"
    assert (copy / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def made_up(results: Results, spread: float, offset: float = 0.0, short: bool = False) -> list[Scores]:
    """Finished runs of the whole plan with gaussian mismatch, larger in bfloat16; `offset`: of all tokens of a
    sequence together.
    """
    all_samples, all_scores = plan(short)
    rng = np.random.default_rng(0)
    cost = {"wall_s": 2.0, "cpu_s": 1.0, "num_tokens": 512 * 8}
    length = all_samples[0].max_tokens
    logprobs = [rng.uniform(-5, 0, length).astype(np.float32) for _ in range(8)]
    for samples in all_samples:
        columns = {"completion_ids": logprobs, "engine_logprobs": logprobs}
        results.write(samples.arm, samples.settings, pa.table(columns), cost)
    for scores in all_scores:
        sigma = spread if scores.samples.precision == "bfloat16" else 1e-6
        means = rng.choice([-offset, offset], len(logprobs)) - sigma**2 / 2
        values = [x + rng.normal(m, sigma, length).astype(np.float32) for x, m in zip(logprobs, means, strict=True)]
        results.write(scores.arm, scores.settings, pa.table({"learner_logprobs": values}), cost)
    return all_scores


def test_the_document_says_what_the_tables_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results("mismatch", 1, tmp_path / "runs")
    all_scores = made_up(results, 0.06)
    assert report(all_scores, results, tmp_path / "docs", num_draws=50) in (0, 1)
    text = (tmp_path / "docs" / "study_mismatch.md").read_text()
    assert not re.search(r"\{\w+\}", text)
    assert re.search(r"spread 0\.0(59|60|61) instead of\s+0\.0(59|60|61)", text)
    assert (tmp_path / "docs" / "study_mismatch.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert printed.count("meets 1-5 %") == 4 * 6 * 2  # cells, lengths from 16, signs
    assert "tiny MoE, float32 | 0.6" in text


def test_the_report_fails_where_noise_does_not_average_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results("mismatch", 1, tmp_path / "runs")
    assert report(made_up(results, 0.06, offset=0.03), results, None, num_draws=50) == 1
    assert re.search(r"^FAIL .* 512 tokens +clipped share", capsys.readouterr().out, re.MULTILINE)


def test_the_short_form_has_its_figures_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results("mismatch", 1, tmp_path / "runs")
    assert report(made_up(results, 0.06, short=True), results, None, num_draws=20) in (0, 1)
    assert "32 tokens" in capsys.readouterr().out


def test_nothing_is_reported_without_all_runs(tmp_path: Path) -> None:
    results = Results("mismatch", 1, tmp_path / "runs")
    all_scores = made_up(results, 0.06)
    results.path(all_scores[3].arm, all_scores[3].settings).unlink()
    with pytest.raises(ValueError, match="run the study"):
        report(all_scores, results, None, num_draws=5)
