"""Buckets and manifests: every difference is refused with the tensor's name."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save

from shared.errors import WeightSyncError
from shared.records import Manifest, TensorEntry
from shared.weights import Blob, bucket_entries, check_manifest, verify_bucket, weights_digest

TENSORS = {
    "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.weight": np.ones(4, dtype=np.float16),
    "empty": np.empty((0, 3), dtype=np.float32),
}


def blob_of(tensors: dict[str, np.ndarray]) -> Blob:
    blob = np.frombuffer(save(tensors, metadata={"format": "pt"}), dtype=np.uint8)
    assert not blob.flags.writeable
    return blob


def raw_blob(header: str, data: bytes = b"") -> Blob:
    encoded = header.encode()
    return np.frombuffer(len(encoded).to_bytes(8, "little") + encoded + data, dtype=np.uint8)


def manifest_of(*buckets: dict[str, np.ndarray]) -> Manifest:
    entries = (bucket_entries(blob_of(tensors), number) for number, tensors in enumerate(buckets))
    return Manifest(1, 1, tuple(entry for bucket in entries for entry in bucket))


def test_entries_point_at_the_tensors_bytes() -> None:
    blob = blob_of(TENSORS)
    entries = bucket_entries(blob, 3)
    assert {entry.name for entry in entries} == set(TENSORS)
    for entry in entries:
        assert blob[entry.start : entry.end].tobytes() == TENSORS[entry.name].tobytes()
        assert entry.shape == TENSORS[entry.name].shape
        assert entry.bucket == 3
    verify_bucket(blob, entries)


def test_a_changed_byte_is_refused_with_the_tensors_name() -> None:
    blob = blob_of(TENSORS).copy()
    entries = bucket_entries(blob, 0)
    target = next(entry for entry in entries if entry.name == "b.weight")
    blob[target.end - 1] ^= 1
    with pytest.raises(WeightSyncError, match=r"'b\.weight': digest"):
        verify_bucket(blob, entries)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "F16"}, "dtype"),
        ({"shape": (3, 2)}, "shape"),
        ({"start": 0}, "byte range"),
        ({"digest": "0" * 64}, "digest"),
    ],
)
def test_a_manifest_that_says_otherwise_is_refused(change: dict[str, object], reason: str) -> None:
    blob = blob_of(TENSORS)
    entries = [dataclasses.replace(e, **change) if e.name == "b.weight" else e for e in bucket_entries(blob, 0)]
    with pytest.raises(WeightSyncError, match=rf"'b\.weight': {reason}"):
        verify_bucket(blob, entries)


def test_unnamed_and_missing_tensors_are_refused() -> None:
    blob = blob_of(TENSORS)
    entries = bucket_entries(blob, 0)
    with pytest.raises(WeightSyncError, match=r"'a\.weight' is in the bucket but not in the manifest"):
        verify_bucket(blob, [entry for entry in entries if entry.name != "a.weight"])
    extra = TensorEntry("c.weight", "F32", (1,), 0, 0, 4, "")
    with pytest.raises(WeightSyncError, match=r"'c\.weight' is in the manifest but not in its bucket"):
        verify_bucket(blob, [*entries, extra])


def test_a_name_sent_twice_is_refused() -> None:
    field = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    with pytest.raises(WeightSyncError, match="'x' is in one bucket twice"):
        bucket_entries(raw_blob(f'{{"x":{field},"x":{field}}}', bytes(4)), 0)
    with pytest.raises(WeightSyncError, match=r"'a\.weight' is in the manifest twice"):
        check_manifest(manifest_of(TENSORS, {"a.weight": np.ones(2)}))


@pytest.mark.parametrize(
    "blob",
    [
        np.zeros(4, dtype=np.uint8),
        raw_blob("{not json"),
        raw_blob("[1, 2]"),
        raw_blob("7"),
        blob_of(TENSORS)[:30],
        blob_of(TENSORS)[:-1],
        raw_blob(json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}), bytes(8)),
        raw_blob(json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}), bytes(8)),
        raw_blob(json.dumps({"x": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}), bytes(8)),
        raw_blob(json.dumps({"x": {"shape": [1], "data_offsets": [0, 4]}}), bytes(8)),
        raw_blob(json.dumps({"x": 3}), bytes(8)),
    ],
)
def test_what_is_no_safetensors_file_is_refused(blob: Blob) -> None:
    with pytest.raises(WeightSyncError):
        bucket_entries(blob, 0)


def test_bucket_numbers_have_no_gap() -> None:
    manifest = manifest_of({"a": np.ones(1)}, {"b": np.ones(1)})
    check_manifest(manifest)
    moved = dataclasses.replace(manifest.tensors[1], bucket=2)
    with pytest.raises(WeightSyncError, match=r"\[0, 2\]"):
        check_manifest(Manifest(1, 1, (manifest.tensors[0], moved)))


def test_the_weights_digest_sees_all_bytes_and_nothing_else() -> None:
    one_bucket = weights_digest(manifest_of(TENSORS))
    names = list(TENSORS)
    two_buckets = manifest_of({names[2]: TENSORS[names[2]]}, {name: TENSORS[name] for name in names[:2]})
    assert weights_digest(two_buckets) == one_bucket
    assert weights_digest(dataclasses.replace(two_buckets, version=9)) == one_bucket
    changed = TENSORS | {"b.weight": TENSORS["b.weight"] + np.float32(1e-6)}
    assert weights_digest(manifest_of(changed)) != one_bucket
    renamed = {name + "x": tensor for name, tensor in TENSORS.items()}
    assert weights_digest(manifest_of(renamed)) != one_bucket
