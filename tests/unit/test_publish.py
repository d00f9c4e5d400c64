"""Buckets, entries and probe of a policy version."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load
from tiny_models import tiny_group, tiny_policy

from learner.probe import make_probe
from learner.publish import Publisher, build_publication_parts
from shared.errors import WeightSyncError
from shared.weights import verify_bucket, weights_digest


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("bucket_bytes", [1, 5000, 10**9])
def test_buckets_hold_every_tensor_once_in_the_engine_dtype(tmp_path: Path, kind: str, bucket_bytes: int) -> None:
    policy, _ = tiny_policy(tmp_path, kind, tied=True)
    expected = dict(policy.checkpoint_tensors())
    manifest, buckets = build_publication_parts(
        expected.items(), version=4, weights_version=3, dtype="bfloat16", bucket_bytes=bucket_bytes
    )
    assert (manifest.version, manifest.weights_version) == (4, 3)
    assert len(buckets) == {1: len(expected), 10**9: 1}.get(bucket_bytes, len(buckets))
    found: dict[str, torch.Tensor] = {}
    for number, blob in enumerate(buckets):
        entries = [e for e in manifest.tensors if e.bucket == number]
        verify_bucket(blob, entries)
        assert len(entries) == 1 or sum(e.end - e.start for e in entries) <= bucket_bytes
        found |= load(blob.tobytes())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in expected.items())


def test_digest_does_not_depend_on_buckets(tmp_path: Path) -> None:
    policy, _ = tiny_policy(tmp_path)
    digests = {
        weights_digest(
            build_publication_parts(
                policy.checkpoint_tensors(), version=1, weights_version=1, dtype="float32", bucket_bytes=size
            )[0]
        )
        for size in (1, 7000, 10**9)
    }
    assert len(digests) == 1


def test_a_name_sent_twice_is_refused() -> None:
    twice = [("a", torch.zeros(2)), ("a", torch.ones(2))]
    with pytest.raises(WeightSyncError, match="'a'"):
        build_publication_parts(twice, version=1, weights_version=1, dtype="float32", bucket_bytes=10**6)


def test_value_that_does_not_fit_the_engine_dtype_is_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"'big' is not finite in torch\.float16"):
        build_publication_parts(
            [("big", torch.tensor([1e6]))], version=1, weights_version=1, dtype="float16", bucket_bytes=10**6
        )


def test_probe_scores_rollouts_of_every_group_at_temperature_one(tmp_path: Path) -> None:
    policy, _ = tiny_policy(tmp_path)
    groups = [tiny_group(0, [1.0, 0.0], [0, 3], temperature=0.5), tiny_group(1, [1.0, 0.0], [6, 2], temperature=0.5)]
    probe = make_probe(policy, groups, 2, max_tokens=16, micro_batch_tokens=32, chunk_tokens=2)
    chosen = [(groups[1], groups[1].rollouts[0]), (groups[0], groups[0].rollouts[1])]  # the empty one is passed over
    assert len(probe) == 2
    for sequence, (group, rollout) in zip(probe, chosen, strict=True):
        np.testing.assert_array_equal(sequence.token_ids, np.concatenate([group.prompt_ids, rollout.completion_ids]))
        assert sequence.first == len(group.prompt_ids)
        table = torch.log_softmax(policy.model(torch.from_numpy(sequence.token_ids)[None].long()).logits[0], -1)
        positions = torch.arange(sequence.first, len(sequence.token_ids))
        expected = table[positions - 1, torch.from_numpy(sequence.token_ids).long()[positions]]
        np.testing.assert_allclose(sequence.logprobs, expected.detach(), atol=1e-5)
        assert sequence.logprobs.dtype == np.float32


def test_the_probe_fits_into_what_the_engine_can_score(tmp_path: Path) -> None:
    policy, _ = tiny_policy(tmp_path)
    groups = [tiny_group(n, [1.0, 0.0], [8, 2]) for n in range(3)]
    whole, cut = (
        make_probe(policy, groups, 6, max_tokens=limit, micro_batch_tokens=32, chunk_tokens=2)
        for limit in (99, len(groups[0].prompt_ids) + 3)
    )
    assert max(len(sequence.token_ids) for sequence in whole) > len(groups[0].prompt_ids) + 3
    assert [len(cut[0].logprobs), len(cut[3].logprobs)] == [3, 2]  # the first and the second rollout of group 0
    np.testing.assert_allclose(cut[0].logprobs, whole[0].logprobs[:3], atol=1e-5)
    prompt_lengths = sorted(len(group.prompt_ids) for group in groups)
    assert prompt_lengths[0] < prompt_lengths[-1]
    for limit in (prompt_lengths[0], prompt_lengths[-1]):
        few = make_probe(policy, groups, 6, max_tokens=limit, micro_batch_tokens=32, chunk_tokens=2)
        assert all(sequence.first < len(sequence.token_ids) <= limit for sequence in few)


def test_weights_travel_only_when_they_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, config = tiny_policy(tmp_path)
    put: list[np.ndarray] = []
    monkeypatch.setattr("ray.put", lambda value: put.append(value) or len(put))
    publisher = Publisher(policy, config)
    with pytest.raises(WeightSyncError, match="nothing was published"):
        _ = publisher.digest
    groups = [tiny_group(0, [1.0, 0.0])]
    first = publisher.next(1, groups, changed=False)
    digest = publisher.digest
    assert (first.manifest.version, first.manifest.weights_version) == (1, 0)
    second = publisher.next(2, groups, changed=False)
    assert (second.manifest.version, second.manifest.weights_version) == (2, 0)
    assert (second.buckets, publisher.digest, len(put)) == (first.buckets, digest, 1)
    with torch.no_grad():
        policy.model.model.norm.weight.add_(1.0)
    third = publisher.next(3, groups, changed=True)
    assert (third.manifest.version, third.manifest.weights_version, len(put)) == (3, 3, 2)
    assert publisher.digest != digest
