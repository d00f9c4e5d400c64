"""The calls of vLLM that have no stable interface. Another vLLM must fail here, loudly, before it fails quietly."""

import ast
import inspect
from typing import Any, get_args

import pytest

vllm = pytest.importorskip("vllm")

from vllm.config import WeightTransferConfig  # noqa: E402
from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # noqa: E402
from vllm.distributed.weight_transfer import base as transfer  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod  # noqa: E402
from vllm.model_executor.model_loader.reload import layerwise  # noqa: E402
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo  # noqa: E402
from vllm.outputs import CompletionOutput  # noqa: E402
from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: E402
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info  # noqa: E402
from vllm.v1.engine import PauseMode  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402

from rollout.engine import sampling_params, scoring_params  # noqa: E402
from rollout.engine_start import engine_args  # noqa: E402
from shared.config import Config  # noqa: E402
from shared.protocols import GenerateRequest  # noqa: E402


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_this_is_the_vllm_that_was_tested() -> None:
    assert vllm.__version__.split("+")[0].split(".")[:2] == ["0", "32"]


def test_the_engines_calls() -> None:
    assert parameters(AsyncLLM.pause_generation) == ["mode", "clear_cache"]
    assert {"keep", "abort"} <= set(get_args(PauseMode))
    assert parameters(AsyncLLM.reset_prefix_cache)[0] == "reset_running_requests"
    assert parameters(AsyncLLM.finish_weight_update) == ["weight_version"]
    assert parameters(AsyncLLM.update_weight_version) == ["new_version"]
    assert parameters(AsyncLLM.start_weight_update) == parameters(AsyncLLM.resume_generation) == []
    assert parameters(AsyncLLM.update_weights) == parameters(AsyncLLM.init_weight_transfer_engine) == ["request"]
    assert parameters(AsyncLLM.shutdown) == ["timeout"]
    assert "weight_versions" in CompletionOutput.__dataclass_fields__


def test_the_transfer_backend() -> None:
    assert isinstance(WeightTransferEngineFactory._registry, dict)
    assert parameters(WeightTransferEngineFactory.register_engine) == ["name", "module_path_or_cls", "class_name"]
    assert WeightTransferConfig(backend="seqrelay").backend == "seqrelay"
    abstract = {"init_transfer_engine", "start_weight_update", "finish_weight_update", "receive_weights", "shutdown"}
    assert transfer.WeightTransferEngine.__abstractmethods__ == abstract
    assert parameters(transfer.WeightTransferEngine.update_weights) == ["update_info"]
    assert {"init_info_cls", "update_info_cls"} <= set(transfer.WeightTransferEngine.__annotations__)


def test_the_layerwise_reload() -> None:
    assert parameters(layerwise.initialize_layerwise_reload) == ["model"]
    assert parameters(layerwise.finalize_layerwise_processing) == ["model", "model_config"]
    assert parameters(layerwise._place_kernel_tensors) == ["layer", "info"]
    assert parameters(layerwise.get_layerwise_info) == ["layer"]
    assert {"kernel_tensors", "loaded_weights"} <= set(LayerReloadingInfo.__dataclass_fields__)
    assert {"can_load", "reset"} <= set(vars(LayerReloadingInfo))


def test_the_fault_behind_the_moe_workaround_is_still_there() -> None:
    """Experts are prepacked only if the layer had no kernel. When this fails, try without `_forget_moe_kernels`."""
    tree = ast.parse(inspect.getsource(UnquantizedFusedMoEMethod).strip())
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    guarded = [ast.unparse(node) for node in branches if "is_weight_update" in ast.unparse(node.test)]
    assert any("fused_experts.process_weights_after_loading" in branch for branch in guarded)


def test_arguments_and_sampling_fields_exist() -> None:
    config = Config.model_validate({"model": {"path": "m"}})
    assert set(engine_args(config, 0, on_cpu=True)) <= set(AsyncEngineArgs.__dataclass_fields__)
    assert set(scoring_params()) <= set(SamplingParams.__struct_fields__)
    assert RequestOutputKind.FINAL_ONLY.name == "FINAL_ONLY"


def test_what_is_asked_for_is_what_vllm_samples_with() -> None:
    """vLLM adds the model's generation_config.json to every request: only its end-of-sequence ids may come through."""
    asked = sampling_params(GenerateRequest("r", [1], max_tokens=9, temperature=0.6, seed=3, cache_salt="0"))
    params = SamplingParams(**asked)
    params.update_from_generation_config({"top_p": 0.8, "top_k": 5, "temperature": 0.1, "eos_token_id": [2, 7]}, 2)
    changed = {name: getattr(params, name) for name, value in asked.items() if getattr(params, name) != value}
    assert changed == {"stop": [], "stop_token_ids": [7], "bad_words": []}


def test_the_memory_that_a_share_is_taken_of() -> None:
    memory = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    assert 0 < memory.available_memory <= memory.total_memory
