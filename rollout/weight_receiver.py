"""vLLM plugin: the weight-transfer backend `seqrelay`, and a watchdog that ends orphaned engine processes.

Runs inside vLLM's processes (entry point group `vllm.general_plugins`) and only in engines started by this product:
without SEQRELAY_ENGINE=1 `register` does nothing. An update is one transaction in `update_weights`: the staged files
are compared with the model's own tensors first, and a refusal leaves the model untouched. Only then are they loaded,
layer by layer. If that fails half-way the layers not yet replaced are put back and the error starts with HALF_WRITTEN:
the model is then a mix of two versions and must not serve until a complete update has succeeded.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

ENGINE_VARIABLE = "SEQRELAY_ENGINE"
BACKEND = "seqrelay"
HALF_WRITTEN = "seqrelay: the model is half-written"
PARENT_POLL_S = 1.0
END_S = 3.0


def register() -> None:
    """Entry point. vLLM calls it in the process that holds the engine, in EngineCore and in every worker."""
    if os.environ.get(ENGINE_VARIABLE) != "1":
        return
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "StagedFilesEngine")
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_die_with, args=(parent,), name="seqrelay-watchdog", daemon=True).start()


def _die_with(parent: Any) -> None:
    """End this process once its parent is gone, however it went: kill -9 leaves no chance to say goodbye.

    It is asked first, so that it can remove its shared memory, and killed after `END_S`.

    The sentinel is a pipe that breaks when the parent ends, unless another child of the parent inherited its other
    end; hence the look at the parent's pid as well. A parent-death signal of the kernel would not do: it fires when
    the *thread* that started us ends.
    """
    while not connection.wait([parent.sentinel], timeout=PARENT_POLL_S):
        if os.getppid() != parent.pid:
            break
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os.kill(os.getpid(), signal.SIGKILL)


def __getattr__(name: str) -> Any:
    """The backend class is made on first use: importing this module must not import vLLM."""
    if name == "StagedFilesEngine":
        return _backend()
    raise AttributeError(name)


def _backend() -> type:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    from rollout.coverage import check_coverage, file_tensors, model_tensors
    from shared.weights import SAFETENSORS_DTYPES

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        pass

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        files: list[str] = field(default_factory=list)

    class StagedFilesEngine(WeightTransferEngine):
        """Loads one version from staged safetensors files, memory-mapped, in checkpoint names."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self._expected = model_tensors(Path(self.model_config.model))
            self._dtype = SAFETENSORS_DTYPES[str(self.model_config.dtype).removeprefix("torch.")]

        def start_weight_update(self) -> None:
            pass

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # The base class synchronizes an accelerator after this, which fails on CPU; host bytes need no sync.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: UpdateInfo) -> None:
            files = [Path(file) for file in update_info.files]
            check_coverage(self._expected, self._dtype, (t for file in files for t in file_tensors(file)))
            load_transaction(self.model, self.model_config, files)

        def finish_weight_update(self) -> None:
            pass

        def shutdown(self) -> None:
            pass

    return StagedFilesEngine


def load_transaction(model: Any, model_config: Any, files: list[Path]) -> None:
    """Replace all weights of a live vLLM model. RuntimeError starting with HALF_WRITTEN when it fails on the way."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    try:
        _forget_moe_kernels(model)
        initialize_layerwise_reload(model)
        model.load_weights(_tensors(files))
        tied = _check_all_written(model)
        finalize_layerwise_reload(model, model_config)
        _pack_tied_heads(tied)
    except Exception as error:
        _put_back(model)
        raise RuntimeError(f"{HALF_WRITTEN}: {error}") from error


def _tensors(files: list[Path]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, opened.get_tensor(name)


def _forget_moe_kernels(model: Any) -> None:
    """Make the reload prepack the experts again.

    vLLM 0.32 prepacks expert weights for CPU only when a layer has no kernel yet. From the second load on it would,
    depending on the CPU, read the new, unpacked weights as packed ones or compute with the old packed copy: wrong
    log-probabilities without an error. Can go once `UnquantizedFusedMoEMethod._setup_kernel` prepacks on weight updates
    too; the engine tests that sync experts, changed and unchanged, then pass without it.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _check_all_written(model: Any) -> list[Any]:
    """Raise unless every parameter received something; return the layers that own none: tied output heads.

    A layer is complete, and back on its old storage, once its last element has arrived. A tied head never gets
    anything: its old tensor, put back at the end, is the very tensor that the embedding was written into. Buffers
    (rotary tables) are computed, never sent.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    waiting = {layer: get_layerwise_info(layer) for layer in model.modules() if get_layerwise_info(layer).can_load()}
    written = {id(value) for layer in model.modules() if layer not in waiting for value in layer._parameters.values()}
    tied = []
    for prefix, layer in model.named_modules():
        if layer not in waiting or waiting[layer].kernel_tensors is None:
            continue
        received = {name for name, _ in waiting[layer].loaded_weights}
        unwritten = {name: old for name, old in waiting[layer].kernel_tensors[0].items() if name not in received}
        for name, old in unwritten.items():
            if id(old) not in written:
                raise ValueError(f"parameter {f'{prefix}.{name}'!r} of the engine was written by no tensor")
        if unwritten:
            tied.append(layer)
    return tied


def _pack_tied_heads(tied: list[Any]) -> None:
    """Make tied output heads compute with the new embedding.

    vLLM 0.32 on CPU multiplies by a packed copy of the weight (oneDNN), and the reload packs only layers that received
    a tensor: a tied head would go on with the embedding of the version before, without an error. Does nothing on
    GPU. Can go once the reload processes tied layers too; the engine test that changes only the embedding then
    passes without it.
    """
    for layer in tied:
        layer.quant_method.process_weights_after_loading(layer)


def _put_back(model: Any) -> None:
    """Give every layer that still waits for weights its old tensors, so that the next update can start cleanly."""
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()
