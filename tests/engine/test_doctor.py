"""`seqrelay doctor` as a user runs it: real vLLM, real Ray, the tiny Mixture-of-Experts model in float32."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]
REPOSITORY = Path(__file__).parents[2]


def test_a_shipped_config_is_examined_without_a_fault_and_every_number_is_told() -> None:
    command = [sys.executable, "-m", "shared.cli", "doctor", "scripts/configs/tiny_moe.toml", "--json"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=540)
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout)
    assert told["verdict"] != "fault"
    found, limit = told["measured"], told["max_mismatch"]
    for (report,), version in ((found["sampled"], 0), (found["resampled"], 1)):
        assert (report["version"], report["fault"], report["num_sequences"]) == (version, "", 256)
        assert report["mismatch"]["num_tokens"] > 256
        assert report["max_abs"] < limit
        assert 0 < report["smallest_shift"] <= limit
        assert report["fixed_clip"] == report["calibrated_clip"] == [0, 0]
    (sync,), (probe,) = found["syncs"], found["probes"]
    assert (sync["version"], probe["version"], probe["released"]) == (1, 1, True)
    assert probe["max_abs"] < limit
    assert 0 < sync["load_s"] < 60
    rewards, memory = found["rewards"], found["memory"]
    assert (rewards["num_groups"], rewards["num_rollouts"], rewards["num_unscored"]) == (32, 256, 0)
    assert 0 < rewards["mean"] < 1
    assert 0 < rewards["num_mixed"] <= 32
    assert {sample["reward"] for sample in rewards["samples"]} == {0, 1}
    assert all(sample["prompt"][-1] == "=" for sample in rewards["samples"])
    assert sync["num_bytes"] == memory["published_bytes"] >= 4 * memory["num_parameters"] > 1e6
    assert 0 <= found["num_unmet_experts"] < found["num_experts"] == 4 * 8
