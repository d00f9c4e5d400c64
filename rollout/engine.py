"""The rollout engine: vLLM behind the `Engine` protocol. The only file that talks to vLLM's engine.

What an option does is decided by pure functions (`engine_args`, `sampling_params`, `thread_environment`); `VllmEngine`
carries it out. Nothing is taken from the model's generation_config.json except further end-of-sequence ids. Weights
change in one order: check, pause (requests kept), load, label, reset the prefix cache with running requests (their
tokens stay, their cache is computed again under the new weights), resume. A token's log-probability is therefore
exactly that of the version it is labeled with. Where the old weights were wrong, the pause ends all requests instead.

A load that is refused leaves the old version serving. A load that fails half-way leaves a model of two versions: the
engine then ends all its requests and refuses to serve until a later `load` succeeds in full.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.completions import build_completion, sampled_logprobs
from rollout.coverage import check_coverage, model_tensors
from rollout.engine_start import cpu_kv_bytes, cpu_memory, engine_args, engine_environment, start_error
from rollout.weight_receiver import HALF_WRITTEN
from shared.config import Config
from shared.errors import EngineDied, RolloutRejected, RunFailed, WeightSyncError
from shared.protocols import Completion, GenerateRequest, RequestsInLoad
from shared.records import Float32Array, Manifest
from shared.weights import SAFETENSORS_DTYPES, check_manifest

ALIVE_POLL_S = 1.0
DIED_LOADING = "the engine's process ended during a load; restart this worker."
SHUTDOWN_S = 20.0  # vLLM's children need 2 to 3 s to clean up, shared memory included; on a busy host more


def sampling_params(request: GenerateRequest) -> dict[str, Any]:
    """Every sampling field of a request, neutral ones included, so that no default can change the distribution."""
    return {
        "n": 1,
        "temperature": request.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "watermarking": False,
        "max_tokens": request.max_tokens,
        "min_tokens": 0,
        "seed": request.seed,
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": False,
        "logprobs": 0,  # the sampled token's only
        "prompt_logprobs": None,
        "detokenize": False,
        "skip_special_tokens": False,
    }


def scoring_params() -> dict[str, Any]:
    """One token is sampled and thrown away; temperature 1 for form, `prompt_logprobs` ignores it."""
    request = GenerateRequest("", (), max_tokens=1, temperature=1.0, seed=0, cache_salt="")
    return sampling_params(request) | {"prompt_logprobs": 0}


class VllmEngine:
    """One vLLM `AsyncLLM` and its child processes, which end with this process. Made by `create`."""

    def __init__(self, config: Config) -> None:
        self._llm: Any = None
        self._expected = model_tensors(Path(config.model.path))
        self._dtype = SAFETENSORS_DTYPES[config.model.mode.engine]
        self._max_model_len = config.rollout.max_model_len
        self._loading = asyncio.Lock()
        self._half_written: str | None = None
        self._num_half_written = 0
        self._num_scores = 0

    @classmethod
    async def create(cls, config: Config, worker_index: int = 0) -> "VllmEngine":
        """Start vLLM with the model's own weights as version 0 (blocks for about 20 s).

        `worker_index` counts the engines of this host and decides cores and seed. ConfigError, naming the option,
        when the engine cannot start.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        engine = cls(config)
        try:
            engine._llm = _start(config, worker_index)
            await engine._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
            await engine._llm.update_weight_version("0")
        except BaseException:
            await engine.close()
            raise
        return engine

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion, or what there is of it when a load ends it. RolloutRejected when it cannot be trusted.

        vLLM ends the request when this call is canceled. EngineDied when a process of the engine ends meanwhile.
        """
        output = await self._run(request.request_id, request.prompt_ids, sampling_params(request), request.cache_salt)
        completion = output.outputs[0]
        spans = completion.weight_versions
        return build_completion(
            list(completion.token_ids),
            _positions(completion.logprobs),
            None if spans is None else [(span.version, span.start, span.end) for span in spans],
            completion.finish_reason,
        )

    async def score(self, token_ids: Sequence[int], first: int) -> Float32Array:
        """Log-probabilities (nats, temperature 1, no prefix cache) of `token_ids[first:]` under the active weights.

        ValueError when `first` is not in [1, len]; RolloutRejected when the engine's context is too short for them,
        one of them cannot be trusted, or a load ended the request.
        """
        if not 1 <= first <= len(token_ids):
            raise ValueError(f"first = {first}: only tokens 1 .. {len(token_ids)} have something to be predicted from.")
        if len(token_ids) >= self._max_model_len:
            raise RolloutRejected(
                f"{len(token_ids)} tokens cannot be scored: they need rollout.max_model_len > {len(token_ids)}, "
                f"it is {self._max_model_len}."
            )
        self._num_scores += 1
        output = await self._run(f"score-{self._num_scores}", token_ids, scoring_params(), cache_salt="score")
        return sampled_logprobs(token_ids[first:], _positions(output.prompt_logprobs[first:]))

    async def load(
        self, manifest: Manifest, files: Sequence[Path], requests: RequestsInLoad = "recompute"
    ) -> dict[str, float]:
        """Swap to the manifest's weights, read from one staged safetensors file per bucket.

        Running requests go on under the new weights, or, with "abort", end at once and return what they have. With no
        files, only the version label moves. Returns seconds by part: pause_s, load_s, resume_s.
        WeightSyncError when the weights are refused; the engine then still serves the old version, or, when the
        message says half-written, nothing until a load succeeds. EngineDied when a process of it ends meanwhile.
        """
        if files:
            check_manifest(manifest)
            check_coverage(self._expected, self._dtype, ((t.name, t.dtype, t.shape) for t in manifest.tensors))
        # A cancelled caller must not leave the engine paused in the middle of an update.
        return await asyncio.shield(asyncio.ensure_future(self._load_while_alive(manifest.version, files, requests)))

    async def close(self) -> None:
        """End every process of the engine. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown(timeout=SHUTDOWN_S)

    async def _run(self, request_id: str, prompt_ids: Sequence[int], params: dict[str, Any], cache_salt: str) -> Any:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        self._refuse_if_half_written()
        num_half_written = self._num_half_written
        # NumPy integers do not survive the way to the engine's process.
        prompt = TokensPrompt(prompt_token_ids=[int(token_id) for token_id in prompt_ids], cache_salt=cache_salt)
        vllm_params = SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            async for output in self._live().generate(prompt, vllm_params, request_id):
                final = output
        except EngineDeadError as error:
            raise EngineDied("the engine's process ended; restart this worker.") from error
        if num_half_written != self._num_half_written:
            raise WeightSyncError("a load failed half-way while this request ran; its tokens were thrown away.")
        return final

    async def _load_while_alive(
        self, version: int, files: Sequence[Path], requests: RequestsInLoad
    ) -> dict[str, float]:
        """`_load`, which alone would wait forever: vLLM 0.32 never answers a call that its process died over."""
        loading = asyncio.ensure_future(self._load(version, files, requests))
        while not loading.done() and not self._live().errored:
            await asyncio.wait({loading}, timeout=ALIVE_POLL_S)
        if not loading.done():
            loading.cancel()
            raise EngineDied(DIED_LOADING)
        if (error := loading.exception()) and self._live().errored:  # its own error is only how it noticed
            raise EngineDied(DIED_LOADING) from error
        return loading.result()

    async def _load(self, version: int, files: Sequence[Path], requests: RequestsInLoad) -> dict[str, float]:
        async with self._loading:
            llm = self._live()
            if not files:
                self._refuse_if_half_written()
                await llm.update_weight_version(str(version))
                return {"pause_s": 0.0, "load_s": 0.0, "resume_s": 0.0}
            started_s = time.monotonic()
            await llm.pause_generation(mode="keep" if requests == "recompute" else "abort", clear_cache=False)
            paused_s = time.monotonic()
            try:
                await self._replace_weights(llm, version, files)
            except Exception as error:
                await self._note_failure(llm, error)
                raise WeightSyncError(f"version {version} was not loaded: {error}") from error
            finally:
                loaded_s = time.monotonic()
                await llm.resume_generation()
            return {
                "pause_s": paused_s - started_s,
                "load_s": loaded_s - paused_s,
                "resume_s": time.monotonic() - loaded_s,
            }

    async def _replace_weights(self, llm: Any, version: int, files: Sequence[Path]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info={"files": [str(file) for file in files]}))
        await llm.finish_weight_update(weight_version=str(version))
        if not await llm.reset_prefix_cache(reset_running_requests=True):
            # Blocks of the old weights would be read as if they were of the new ones.
            raise RuntimeError(f"{HALF_WRITTEN}: the prefix cache was not reset")
        self._half_written = None

    async def _note_failure(self, llm: Any, error: Exception) -> None:
        if HALF_WRITTEN in str(error):
            self._half_written = str(error)
            self._num_half_written += 1
            await llm.pause_generation(mode="abort", clear_cache=True)

    def _refuse_if_half_written(self) -> None:
        if self._half_written is not None:
            raise WeightSyncError(
                f"the engine serves nothing until a load succeeds or it is restarted: {self._half_written}"
            )

    def _live(self) -> Any:
        if self._llm is None:
            raise RunFailed("the engine was closed; start a new worker.")
        return self._llm


def _start(config: Config, worker_index: int) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    with engine_environment(config, worker_index):
        try:
            on_cpu = current_platform.is_cpu()
            kv_bytes = cpu_kv_bytes(config, cpu_memory()[1]) if on_cpu else None
            arguments = engine_args(config, worker_index, on_cpu, kv_bytes)
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except Exception as error:
            raise start_error(config, error) from error


def _positions(logprobs: Any) -> list[dict[int, float | None] | None] | None:
    """vLLM's per-position maps as plain data: token id -> log-probability."""
    if logprobs is None:
        return None
    return [
        None if position is None else {token_id: entry.logprob for token_id, entry in position.items()}
        for position in logprobs
    ]
