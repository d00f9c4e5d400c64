"""What a vLLM engine is started with: arguments, environment, and what a failed start means. Pure but for
`engine_environment`, which sets and restores variables, and `start_error`, which reads this machine's memory.

Engines of one host share its cores: engine i takes its own `rollout.threads` cores, and the last core stays with the
learner; an engine for which none are left runs unbound. Whatever the user set in the environment stays as it is.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollout.weight_receiver import BACKEND, ENGINE_VARIABLE
from shared.config import Config
from shared.errors import ConfigError
from shared.kv_cache import kv_cache_bytes

BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
PLUGIN_GROUP = "vllm.general_plugins"
# Resident memory of a vLLM worker before it holds any weights (measured: 0.7 to 0.9 GiB).
WORKER_BYTES = 1 << 30

# Tokens the engine may process in one step; at least this many, so that short requests are prefilled together.
MIN_BATCHED_TOKENS = 2048


def engine_args(config: Config, worker_index: int, on_cpu: bool, kv_bytes: int | None = None) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs`. `kv_bytes`: of a CPU engine's KV cache, without `rollout.memory_share`.

    `gpu_memory_utilization` is, on CPU, the share of the host's RAM that weights and KV cache may take together.
    """
    rollout = config.rollout
    memory = {"gpu_memory_utilization": rollout.memory_share, "kv_cache_memory_bytes": kv_bytes}
    return {name: value for name, value in memory.items() if value is not None} | {
        "model": config.model.path,
        "dtype": config.model.mode.engine,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "seed": (config.run.seed + worker_index) % 2**31,
        "enforce_eager": on_cpu,  # no Triton on CPU
        # vLLM 0.32 on CPU dies when it prefills a seeded request in two parts: it winds the request's generator back
        # after the first part, which CPU generators cannot do. Can go when `_bookkeeping_sync` no longer sets offsets.
        "enable_chunked_prefill": not on_cpu,
        "max_num_batched_tokens": max(rollout.max_model_len, MIN_BATCHED_TOKENS),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled, after temperature
        "generation_config": "vllm",  # no hidden top_p or top_k from the model's folder
        "trust_remote_code": False,
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,
    }


def thread_environment(
    worker_index: int, threads: int, cores: Sequence[int], environ: Mapping[str, str]
) -> dict[str, str]:
    """Environment variables that place a CPU engine's threads; nothing that `environ` already sets.

    Example: 4 cores, 1 thread: engines 0, 1, 2 are bound to cores 0, 1, 2; core 3 is the learner's; engine 3 floats.
    """
    if BIND_VARIABLE in environ:
        return {}
    first = worker_index * threads
    if first + threads < len(cores):
        return {BIND_VARIABLE: ",".join(str(core) for core in cores[first : first + threads])}
    chosen = {BIND_VARIABLE: "nobind", "OMP_NUM_THREADS": str(threads)}
    return {name: value for name, value in chosen.items() if name not in environ}


def cpu_kv_bytes(config: Config, available_bytes: int) -> int | None:
    """Bytes of a CPU engine's KV cache, None where `rollout.memory_share` decides. ConfigError as `kv_cache_bytes`."""
    return None if config.rollout.memory_share else min(kv_cache_bytes(config), available_bytes // 2)


def memory_fault(memory_share: float | None, total_bytes: int, available_bytes: int, model_bytes: int) -> str | None:
    """Why a CPU engine with this share of `total_bytes` cannot start, with a share that would do; None if it can.

    `model_bytes`: of the weights, and of the KV cache too where there is no share.
    """
    needed_bytes = model_bytes + WORKER_BYTES
    if memory_share is None:
        if needed_bytes <= available_bytes:
            return None
        return (
            f"the engine needs {_gib(needed_bytes)} of memory, {_gib(available_bytes)} are free: free some, or lower "
            f"rollout.max_num_seqs or rollout.max_model_len, which decide the size of its KV cache."
        )
    wanted_bytes = int(memory_share * total_bytes)
    if wanted_bytes > available_bytes:
        return (
            f"rollout.memory_share = {memory_share} asks for {_gib(wanted_bytes)} of memory, {_gib(available_bytes)} "
            f"are free. Set it to at most {available_bytes / total_bytes * 0.95:.2f}."
        )
    if wanted_bytes < needed_bytes:
        return (
            f"rollout.memory_share = {memory_share} gives the engine {_gib(wanted_bytes)}; the model and its process "
            f"need {_gib(needed_bytes)} before any KV cache. Set it to at least {needed_bytes / total_bytes * 1.2:.2f}."
        )
    return None


def start_error(config: Config, error: Exception) -> ConfigError:
    """A failed start as one short error. vLLM's children print their own traceback; it is not repeated here."""
    if fault := _memory_fault_here(config):
        return ConfigError(fault)
    # The first line of vLLM's own validation says only how many errors there are.
    text = error.errors()[0]["msg"].removeprefix("Value error, ") if isinstance(error, ValidationError) else str(error)
    lines = text.strip().splitlines() or [type(error).__name__]
    return ConfigError(
        f"the engine for model.path = {config.model.path} did not start: {lines[0]} "
        f"Its processes logged the cause above; if it is memory, set rollout.memory_share."
    )


@contextlib.contextmanager
def engine_environment(config: Config, worker_index: int) -> Iterator[None]:
    """The environment in which vLLM starts its processes, put back afterwards. ConfigError without our plugin."""
    from importlib.metadata import entry_points

    if not entry_points(group=PLUGIN_GROUP, name=BACKEND):
        raise ConfigError(
            "vLLM cannot find the seqrelay plugin: install this package with pip (an editable one will do)."
        )
    chosen = thread_environment(worker_index, config.rollout.threads, sorted(os.sched_getaffinity(0)), os.environ) | {
        ENGINE_VARIABLE: "1",
        # A forked child would inherit "plugins are loaded" and run without our watchdog.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if "VLLM_PLUGINS" in os.environ:
        chosen["VLLM_PLUGINS"] = ",".join([*filter(None, os.environ["VLLM_PLUGINS"].split(",")), BACKEND])
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _memory_fault_here(config: Config) -> str | None:
    """`memory_fault` with the memory that vLLM looks at."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    total_bytes, available_bytes = cpu_memory()
    model_bytes = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    kv_bytes = cpu_kv_bytes(config, available_bytes) or 0
    return memory_fault(config.rollout.memory_share, total_bytes, available_bytes, model_bytes + kv_bytes)


def cpu_memory() -> tuple[int, int]:
    """Total and available bytes where vLLM looks: the NUMA node of its first core, within the cgroup."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    memory = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    return memory.total_memory, memory.available_memory


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
