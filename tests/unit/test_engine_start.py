"""What a vLLM engine is started with: every option has its effect, the user's environment is left alone."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollout import engine_start
from rollout.engine import sampling_params, scoring_params
from rollout.engine_start import (
    cpu_kv_bytes,
    engine_args,
    engine_environment,
    memory_fault,
    start_error,
    thread_environment,
)
from shared.config import Config, SamplingConfig
from shared.errors import ConfigError
from shared.kv_cache import kv_cache_bytes
from shared.protocols import GenerateRequest


def config(**rollout: Any) -> Config:
    return Config.model_validate({"model": {"path": "/models/m"}, "run": {"seed": 5}, "rollout": rollout})


@pytest.mark.parametrize(
    ("option", "value", "argument", "expected"),
    [
        ("max_model_len", 99, "max_model_len", 99),
        ("max_num_seqs", 7, "max_num_seqs", 7),
        ("memory_share", 0.33, "gpu_memory_utilization", 0.33),
    ],
)
def test_each_option_reaches_the_engine(option: str, value: Any, argument: str, expected: Any) -> None:
    assert engine_args(config(**{option: value}), 0, on_cpu=True)[argument] == expected
    assert engine_args(config(), 0, on_cpu=True).get(argument) != expected


def test_nothing_that_changes_the_distribution_is_left_to_a_default() -> None:
    args = engine_args(config(), 0, on_cpu=True)
    assert args["logprobs_mode"] == "processed_logprobs"
    assert args["generation_config"] == "vllm"
    assert args["trust_remote_code"] is False
    assert args["enable_prefix_caching"] is True
    assert args["weight_transfer_config"] == {"backend": "seqrelay"}
    assert args["enforce_eager"] is True
    assert engine_args(config(), 0, on_cpu=False)["enforce_eager"] is False


def test_every_engine_has_its_own_seed() -> None:
    seeds = [engine_args(config(), index, on_cpu=True)["seed"] for index in range(4)]
    assert len(set(seeds)) == 4


def test_requests_carry_every_sampling_field() -> None:
    params = sampling_params(GenerateRequest("r", [1], max_tokens=33, temperature=0.6, seed=2**63, cache_salt="4"))
    wanted = {"temperature": 0.6, "max_tokens": 33, "seed": 2**63, "n": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    wanted |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
    wanted |= {"logprobs": 0, "detokenize": False, "ignore_eos": False, "stop": None, "stop_token_ids": None}
    assert {name: params[name] for name in wanted} == wanted
    assert scoring_params() | {"prompt_logprobs": None} == sampling_params(GenerateRequest("", (), 1, 1.0, 0, ""))
    assert scoring_params()["prompt_logprobs"] == 0


@pytest.mark.parametrize(
    ("index", "threads", "num_cores", "bind"),
    [(0, 1, 2, "0"), (1, 1, 2, "nobind"), (0, 1, 1, "nobind"), (0, 2, 8, "0,1"), (2, 2, 8, "4,5"), (3, 2, 8, "nobind")],
)
def test_engines_of_one_host_share_its_cores_and_leave_one(index: int, threads: int, num_cores: int, bind: str) -> None:
    chosen = thread_environment(index, threads, range(num_cores), {})
    assert chosen["VLLM_CPU_OMP_THREADS_BIND"] == bind
    assert chosen.get("OMP_NUM_THREADS") == (str(threads) if bind == "nobind" else None)


def test_the_users_binding_is_left_alone() -> None:
    assert thread_environment(0, 1, range(4), {"VLLM_CPU_OMP_THREADS_BIND": "3"}) == {}
    assert "OMP_NUM_THREADS" not in thread_environment(9, 1, range(4), {"OMP_NUM_THREADS": "2"})


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ["ours"])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    before = dict(os.environ)
    with engine_environment(config(), 0):
        assert os.environ["SEQRELAY_ENGINE"] == "1"
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
        assert os.environ["VLLM_PLUGINS"] == "other,seqrelay"
    assert dict(os.environ) == before


def test_a_missing_plugin_is_an_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [])
    with pytest.raises(ConfigError, match="pip"), engine_environment(config(), 0):
        pass


GIB = 1 << 30


def test_memory_share_is_checked_in_both_directions() -> None:
    assert memory_fault(0.5, 16 * GIB, 10 * GIB, 4 * GIB) is None
    too_much = memory_fault(0.9, 16 * GIB, 10 * GIB, 4 * GIB)
    assert too_much is not None
    assert "rollout.memory_share = 0.9" in too_much
    assert "at most 0.59" in too_much
    too_little = memory_fault(0.1, 16 * GIB, 10 * GIB, 4 * GIB)
    assert too_little is not None
    assert "rollout.memory_share = 0.1" in too_little
    assert "at least 0.38" in too_little


def test_without_a_share_the_kv_cache_has_room_for_all_sequences(tmp_path: Path) -> None:
    """Two layers of two key-value heads of 16, float32: 512 bytes a token; 100 tokens take a block of 128."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    model = {"path": str(tmp_path), "precision": "float32"}
    rollout = {"max_model_len": 100, "max_num_seqs": 3}
    here = Config.model_validate({"model": model, "rollout": rollout, "sampling": {"max_tokens": 9}})
    assert kv_cache_bytes(here) == 3 * 128 * 512
    assert cpu_kv_bytes(here, available_bytes=GIB) == 3 * 128 * 512
    assert cpu_kv_bytes(here, available_bytes=1000) == 500
    assert cpu_kv_bytes(config(memory_share=0.5), available_bytes=1000) is None
    assert engine_args(here, 0, True, kv_bytes=7)["kv_cache_memory_bytes"] == 7
    assert not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & engine_args(here, 0, False).keys()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="num_attention_heads.*rollout.memory_share"):
        kv_cache_bytes(here)


def test_without_a_share_what_is_needed_must_be_free() -> None:
    assert memory_fault(None, 16 * GIB, 3 * GIB, 2 * GIB) is None
    fault = memory_fault(None, 16 * GIB, 2 * GIB, 2 * GIB)
    assert fault is not None and "3.0 GiB of memory, 2.0 GiB are free" in fault and "rollout.max_num_seqs" in fault


def test_a_failed_start_is_one_short_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_start, "_memory_fault_here", lambda _: None)
    error = start_error(config(), RuntimeError("Engine core initialization failed.\nlong\ntext"))
    assert "/models/m did not start: Engine core initialization failed." in str(error)
    assert "rollout.memory_share" in str(error)
    assert "\n" not in str(error)
    monkeypatch.setattr(engine_start, "_memory_fault_here", lambda _: "too little")
    assert str(start_error(config(), RuntimeError("x"))) == "too little"


def test_what_vllm_itself_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_start, "_memory_fault_here", lambda _: None)
    with pytest.raises(ValidationError) as refused:
        SamplingConfig(top_p=0.5)
    assert str(refused.value).startswith("1 validation error")
    error = str(start_error(config(), refused.value))
    assert "did not start: sampling.top_p = 0.5 would" in error
    assert "1 validation error" not in error
