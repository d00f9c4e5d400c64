"""The bytes of a weight sync: what a bucket holds, and whether it is what the manifest says.

A *bucket* is one safetensors blob: eight bytes of header length, a JSON header, the tensors. Whoever publishes derives
the manifest's entries from the blob itself (`bucket_entries`); whoever receives checks every tensor's name, dtype,
shape, range and BLAKE3 digest (`verify_bucket`) before anything is loaded. NumPy only: no torch, nothing unpickled.
"""

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shared.errors import WeightSyncError
from shared.records import Manifest, TensorEntry

Blob = npt.NDArray[np.uint8]

HEADER_LENGTH_BYTES = 8
METADATA_KEY = "__metadata__"
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def bucket_entries(blob: Blob, bucket: int) -> tuple[TensorEntry, ...]:
    """The manifest entries of a bucket, in file order, byte ranges counted from the start of the blob.

    WeightSyncError when the blob is not a safetensors file, names a tensor twice, or a range does not fit.
    """
    return tuple(
        TensorEntry(name, dtype, shape, bucket, start, end, _digest(blob[start:end]))
        for name, dtype, shape, start, end in bucket_layout(blob)
    )


def bucket_layout(blob: Blob) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """(name, dtype, shape, start, end) per tensor in file order, from the header alone. Errors as `bucket_entries`."""
    header, data_start = _parse_header(blob)
    layout = []
    for name, fields in header:
        dtype, shape, start, end = _fields_of(name, fields, data_start, blob.size)
        layout.append((name, dtype, shape, start, end))
    return sorted(layout, key=lambda item: item[3])


def verify_bucket(blob: Blob, entries: Iterable[TensorEntry]) -> None:
    """Raise WeightSyncError naming the first tensor in which the blob differs from the manifest's entries for it."""
    expected = {entry.name: entry for entry in entries}
    layout = bucket_layout(blob)
    for name, dtype, shape, start, end in layout:
        entry = expected.get(name)
        if entry is None:
            raise WeightSyncError(f"tensor {name!r} is in the bucket but not in the manifest; publish both together.")
        seen = {"dtype": (dtype, entry.dtype), "shape": (shape, entry.shape)}
        seen["byte range"] = ((start, end), (entry.start, entry.end))
        for field, (found, wanted) in seen.items():
            if found != wanted:
                raise WeightSyncError(f"tensor {name!r}: {field} {found}, the manifest says {wanted}; fetch it again.")
    if missing := sorted(expected.keys() - {item[0] for item in layout}):
        raise WeightSyncError(f"tensor {missing[0]!r} is in the manifest but not in its bucket; fetch it again.")
    for name, _, _, start, end in layout:
        if (digest := _digest(blob[start:end])) != expected[name].digest:
            raise WeightSyncError(
                f"tensor {name!r}: digest {digest[:12]}, the manifest says {expected[name].digest[:12]}: "
                f"its bytes changed on the way; fetch it again."
            )


def check_manifest(manifest: Manifest) -> None:
    """Raise WeightSyncError unless names are unique across buckets and bucket numbers run 0, 1, 2 without a gap."""
    seen: set[str] = set()
    for entry in manifest.tensors:
        if entry.name in seen:
            raise WeightSyncError(f"tensor {entry.name!r} is in the manifest twice; publish every tensor once.")
        seen.add(entry.name)
    numbers = sorted({entry.bucket for entry in manifest.tensors})
    if numbers != list(range(len(numbers))):
        raise WeightSyncError(f"bucket numbers of version {manifest.version} are {numbers}; number them from 0.")


def weights_digest(manifest: Manifest) -> str:
    """One BLAKE3 hex for all weights: independent of buckets, order and version, equal exactly when all bytes are."""
    lines = sorted([t.name, t.dtype, list(t.shape), t.digest] for t in manifest.tensors)
    return blake3(json.dumps(lines, separators=(",", ":")).encode()).hexdigest()


def _digest(blob: Blob) -> str:
    return blake3(blob.data).hexdigest()


def _parse_header(blob: Blob) -> tuple[list[tuple[str, Any]], int]:
    if blob.size < HEADER_LENGTH_BYTES:
        raise WeightSyncError(f"a bucket of {blob.size} bytes is no safetensors file; fetch it again.")
    data_start = HEADER_LENGTH_BYTES + int.from_bytes(blob[:HEADER_LENGTH_BYTES].tobytes(), "little")
    if data_start > blob.size:
        raise WeightSyncError(
            f"a bucket of {blob.size} bytes has a header of {data_start}; it was cut, fetch it again."
        )
    try:
        pairs = json.loads(blob[HEADER_LENGTH_BYTES:data_start].tobytes(), object_pairs_hook=list)
        header = [(str(name), fields) for name, fields in pairs if name != METADATA_KEY]
    except (ValueError, TypeError) as error:
        raise WeightSyncError(f"the header of a bucket cannot be read ({error}); fetch it again.") from error
    names: set[str] = set()
    for name, _ in header:  # a plain dict would keep the last of two silently
        if name in names:
            raise WeightSyncError(f"tensor {name!r} is in one bucket twice; publish every tensor once.")
        names.add(name)
    return header, data_start


def _fields_of(name: str, fields: Any, data_start: int, size: int) -> tuple[str, tuple[int, ...], int, int]:
    try:
        values = dict(fields)
        dtype, shape = str(values["dtype"]), tuple(int(n) for n in values["shape"])
        start, end = (data_start + int(offset) for offset in values["data_offsets"])
        num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise WeightSyncError(f"tensor {name!r}: its header entry cannot be read ({error!r}).") from error
    if not data_start <= start <= end <= size or end - start != num_bytes:
        raise WeightSyncError(
            f"tensor {name!r}: bytes [{start}, {end}) of a bucket of {size} cannot hold {dtype} {list(shape)}."
        )
    return dtype, shape, start, end
