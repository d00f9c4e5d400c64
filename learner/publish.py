"""A policy version as bytes: buckets in the engine's type, manifest, probe. Only `Publisher` knows Ray."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from learner.policy import Policy
from learner.probe import make_probe
from learner.routing import experts_counted
from shared.config import Config
from shared.errors import WeightSyncError
from shared.records import Group, Manifest, ProbeSequence, Publication, TensorEntry
from shared.weights import Blob, bucket_entries, check_manifest, weights_digest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_publication_parts(
    tensors: Iterable[tuple[str, Tensor]], *, version: int, weights_version: int, dtype: str, bucket_bytes: int
) -> tuple[Manifest, list[Blob]]:
    """Cast floating tensors to `dtype` ("float32", "bfloat16" or "float16") and lay them out in buckets, in order.

    A bucket holds at most `bucket_bytes` of tensor data and is one safetensors blob; a larger tensor gets a bucket of
    its own. The manifest has no probe yet.

    Raises:
        WeightSyncError: a value is not finite in `dtype`, or a name comes twice.
    """
    buckets: list[Blob] = []
    entries: list[TensorEntry] = []
    for group in _group_tensors(tensors, DTYPES[dtype], bucket_bytes):
        blob = np.frombuffer(save(group), dtype=np.uint8)
        entries += bucket_entries(blob, len(buckets))
        buckets.append(blob)
    manifest = Manifest(version, weights_version, tuple(entries))
    check_manifest(manifest)
    return manifest, buckets


def _group_tensors(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int
) -> Iterable[dict[str, Tensor]]:
    group: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        cast = _engine_tensor(name, tensor, dtype)
        if group and (num_bytes + cast.nbytes > bucket_bytes or name in group):
            yield group
            group, num_bytes = {}, 0
        group[name] = cast
        num_bytes += cast.nbytes
    if group:
        yield group


def _engine_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """On the CPU, contiguous, and a copy: safetensors refuses tensors that share memory (experts are views)."""
    cast = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype)
    if cast.is_floating_point() and not bool(torch.isfinite(cast).all()):
        raise WeightSyncError(
            f"tensor {name!r} is not finite in {dtype}: use a wider model.precision or check the training."
        )
    return cast.cpu().clone(memory_format=torch.contiguous_format)


def published_digest(policy: Policy, config: Config) -> str:
    """`shared.weights.weights_digest` of the policy's weights as this run publishes them, in the engine's type."""
    manifest, _ = _current_parts(policy, config, version=0, weights_version=0)
    return weights_digest(manifest)


def _current_parts(
    policy: Policy, config: Config, *, version: int, weights_version: int
) -> tuple[Manifest, list[Blob]]:
    return build_publication_parts(
        policy.checkpoint_tensors(),
        version=version,
        weights_version=weights_version,
        dtype=config.model.mode.engine,
        bucket_bytes=config.sync.bucket_mib * 2**20,
    )


class Publisher:
    """Turns the policy into publications: buckets in Ray's object store, kept alive until the next ones replace them.

    `digest` is that of the weights last published (`shared.weights.weights_digest`). `num_unmet_experts`: experts that
    no token of their probe was routed to, so that it says nothing about them; None for a dense model.
    """

    def __init__(self, policy: Policy, config: Config, incarnation: int = 0) -> None:
        self._policy = policy
        self._config = config
        self._incarnation = incarnation
        self._manifest: Manifest | None = None
        self._references: tuple[Any, ...] = ()
        self.num_unmet_experts: int | None = None

    @property
    def digest(self) -> str:
        """Raises WeightSyncError before the first publication."""
        if self._manifest is None:
            raise WeightSyncError("nothing was published yet: call next() before asking for the digest")
        return weights_digest(self._manifest)

    def next(self, version: int, groups: Sequence[Group], *, changed: bool) -> Publication:
        """The publication of `version`, with a probe from `groups`. Unless `changed`, the weights sent before stand."""
        if changed or self._manifest is None:
            import ray  # here: a replay computes digests without it

            manifest, buckets = _current_parts(
                self._policy, self._config, version=version, weights_version=version if changed else 0
            )
            self._references = tuple(ray.put(bucket) for bucket in buckets)
            self._manifest = replace(manifest, probe=self.probe(groups))
        self._manifest = replace(self._manifest, version=version, incarnation=self._incarnation)
        return Publication(self._manifest, self._references)

    def renew(self, incarnation: int) -> Publication:
        """The publication made last, as one of a new incarnation. Raises WeightSyncError before the first."""
        if self._manifest is None:
            raise WeightSyncError("nothing was published yet: call next() before a new incarnation")
        self._incarnation = incarnation
        self._manifest = replace(self._manifest, incarnation=incarnation)
        return Publication(self._manifest, self._references)

    def probe(self, groups: Sequence[Group]) -> tuple[ProbeSequence, ...]:
        """What checks a load of the policy's present weights."""
        learner = self._config.learner
        with experts_counted(self._policy.model) as count:
            probe = make_probe(
                self._policy,
                groups,
                self._config.sync.probe_sequences,
                max_tokens=self._config.rollout.max_model_len - 1,  # scoring samples one token more
                micro_batch_tokens=learner.micro_batch_tokens,
                chunk_tokens=learner.logprob_chunk_tokens,
                count=count,
            )
        self.num_unmet_experts = count.num_unmet if count.num_experts and probe else None
        return probe
