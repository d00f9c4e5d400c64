"""`seqrelay train` as a user runs it: real vLLM, real Ray, the tiny Mixture-of-Experts model in float32."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.config_file import load_resolved
from shared.protocols import GenerateRequest
from shared.run_files import read_evaluations, read_metrics, read_probes, read_syncs

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "shared.cli", "train", "scripts/configs/tiny_moe.toml", f"run.directory={folder}"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=540)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "tiny-moe"


def test_reward_rises(run_directory: Path) -> None:
    rewards = [row["reward_mean"] for row in read_metrics(run_directory)]
    assert len(rewards) == 60
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.1
    first, last = read_evaluations(run_directory)
    assert last.pass_rate > first.pass_rate + 0.05


def test_after_every_sync_the_engines_score_equals_the_learners(run_directory: Path) -> None:
    syncs, probes = read_syncs(run_directory), read_probes(run_directory)
    assert syncs[-1].version == 60
    assert len(syncs) > 30  # versions may be skipped, not most of them
    assert [p.version for p in probes] == [s.version for s in syncs]
    assert all(p.released for p in probes)
    assert min(p.mismatch.num_tokens for p in probes) > 0
    assert max(p.max_abs for p in probes) < 1e-4


def test_without_staleness_the_first_minibatch_has_ratio_one(run_directory: Path) -> None:
    fresh = [row for row in read_metrics(run_directory) if row["staleness_max"] == 0]
    assert fresh[0]["step"] == 0
    for row in fresh:
        assert row["log_ratio_rms_by_minibatch"][0] < 1e-5
        assert row["clip_fraction_by_minibatch"][0] == 0


def test_final_weights_load_in_transformers_and_serve_in_vllm(run_directory: Path) -> None:
    from rollout.engine import VllmEngine

    final = run_directory / "checkpoints" / "final"
    config = load_resolved(run_directory / "config.json")
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(final)})})
    model, report = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(final)
    prompt = tokenizer.encode("12+34=", add_special_tokens=False)

    async def serve() -> tuple[list[int], np.ndarray]:
        engine = await VllmEngine.create(config)
        try:
            completion = await engine.generate(GenerateRequest("r", prompt, 6, 1.0, 1, "0"))
            token_ids = [*prompt, *completion.token_ids.tolist()]
            return token_ids, await engine.score(token_ids, len(prompt))
        finally:
            await engine.close()

    token_ids, scores = asyncio.run(serve())
    import torch

    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([token_ids])).logits[0], -1)
    expected = [float(logprobs[i - 1, token_ids[i]]) for i in range(len(prompt), len(token_ids))]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
