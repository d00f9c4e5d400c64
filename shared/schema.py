"""The data contract of a rollout: columns declared once, and everything derived from that declaration.

Owns the Arrow types, the wire codec and the Parquet table. Gate: every group passes `check_group` (shared.group_check)
on its way in and on its way out, so whatever is stored or trained tiles, aligns and is finite.

On the wire a group is one record batch of one row: the group's columns, and `rollouts`, a list of structs, so that the
prompt travels once. In Parquet there is one row per rollout with plain columns and the group's values repeated
(dictionary pages make that nearly free). The stream travels zstd-compressed, because the description of the columns
alone is 4 KiB: a group then costs about 1.2 kB, plus at most 4 bytes per completion token for the id and 4 for the
log-probability. `pyarrow.input_stream(payload, compression="zstd")` is an ordinary Arrow IPC stream.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa

from shared.errors import SchemaError
from shared.group_check import check_group
from shared.records import FinishReason, Float32Array, Group, GroupId, Int32Array, KvState, Rollout, Segment

SCHEMA_VERSION = 1
_CODEC = "zstd"
_VERSION_KEY = b"seqrelay.schema_version"


def _column(name: str, kind: pa.DataType, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable)


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


SEGMENT = pa.struct([
    _column("policy_version", pa.int64()),
    _column("start", pa.int32()),
    _column("end", pa.int32()),
    _column("loglik", pa.float64()),  # nats
    _column("kv", pa.string()),
])  # fmt: skip
REWARD_PART = pa.struct([_column("name", pa.string()), _column("value", pa.float64())])

GROUP_COLUMNS: tuple[pa.Field, ...] = (
    _column("group_number", pa.int64()),
    _column("replacement", pa.int32()),
    _column("attempt", pa.int32()),
    _column("worker_id", pa.string()),
    _column("prompt_id", pa.string()),
    _column("prompt_ids", _list_of(pa.int32())),
    _column("temperature", pa.float64()),
    _column("num_rejected", pa.int32()),
    _column("started_at_s", pa.float64()),  # Unix seconds
    _column("generate_s", pa.float64()),
    _column("reward_s", pa.float64()),
)
ROLLOUT_COLUMNS: tuple[pa.Field, ...] = (
    _column("member", pa.int32()),
    _column("completion_ids", _list_of(pa.int32())),
    _column("behavior_logprobs", _list_of(pa.float32()), nullable=True),  # nats
    _column("segments", _list_of(SEGMENT)),
    _column("finish_reason", pa.string()),
    _column("reward", pa.float64(), nullable=True),
    _column("reward_parts", _list_of(REWARD_PART)),
)
_METADATA = {_VERSION_KEY: str(SCHEMA_VERSION).encode()}
_ROLLOUT = pa.struct(list(ROLLOUT_COLUMNS))
WIRE_SCHEMA = pa.schema([*GROUP_COLUMNS, _column("rollouts", _list_of(_ROLLOUT))], metadata=_METADATA)
STEP_SCHEMA = pa.schema([_column("step", pa.int64()), *GROUP_COLUMNS, *ROLLOUT_COLUMNS], metadata=_METADATA)


def fingerprint() -> str:
    """Digest of every column's name, type and nullability; tests pin it to `SCHEMA_VERSION`."""
    text = "\n".join(f"{f.name}: {f.type}: {f.nullable}" for schema in (WIRE_SCHEMA, STEP_SCHEMA) for f in schema)
    return hashlib.sha256(text.encode()).hexdigest()


def encode_group(group: Group) -> bytes:
    """The group as a compressed Arrow IPC stream of one record batch. SchemaError when it breaks the contract."""
    check_group(group)
    try:
        batch = pa.record_batch([*_group_arrays(group), _rollouts_array(group)], schema=WIRE_SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError) as error:
        raise SchemaError(f"group {group.group}: a value does not fit its column: {error}") from error
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, _CODEC) as stream, pa.ipc.new_stream(stream, WIRE_SCHEMA) as writer:
        writer.write_batch(batch)
    return cast(bytes, sink.getvalue().to_pybytes())


def decode_group(payload: bytes) -> Group:
    """The group in `payload`. Its arrays are read-only.

    SchemaError when the bytes are no Arrow stream, of another schema version or other columns, or fail `check_group`.
    """
    batch = _read_batch(payload)
    return _group_of(batch, batch.column("rollouts")[0].values)


def step_table(groups: Sequence[Group], step: int) -> pa.Table:
    """One row per rollout of the step's groups, in their order: `STEP_SCHEMA`, whatever the values are."""
    tables = []
    for group in groups:
        rollouts = _rollouts_array(group)[0].values
        repeated = [_repeat(array, len(rollouts)) for array in _group_arrays(group)]
        steps = pa.array([step] * len(rollouts), pa.int64())
        tables.append(pa.table([steps, *repeated, *rollouts.flatten()], schema=STEP_SCHEMA))
    return pa.concat_tables(tables).combine_chunks() if tables else STEP_SCHEMA.empty_table()


def groups_of_table(table: pa.Table) -> list[Group]:
    """The groups that `step_table` made the table of, exactly, in order. Their arrays are read-only.

    SchemaError for another schema version or other columns, a missing value, rows of a group that are not together, in
    member order and of one mind about the group, or what `check_group` refuses.
    """
    _check_schema(table.schema, STEP_SCHEMA)
    _check_present(table, STEP_SCHEMA)
    batch = pa.record_batch([column.combine_chunks() for column in table.columns], schema=STEP_SCHEMA)
    starts = np.flatnonzero(batch.column("member").to_numpy() == 0).tolist()
    if batch.num_rows and starts[:1] != [0]:
        raise SchemaError("the first row is not member 0 of a group; the rows of a group are together, in order")
    return [_group_of_rows(batch.slice(start, end - start)) for start, end in pairwise([*starts, batch.num_rows])]


def _group_of_rows(rows: pa.RecordBatch) -> Group:
    for field in GROUP_COLUMNS:
        column = rows.column(field.name)
        if not column.equals(_repeat(column, len(column))):
            number = rows.column("group_number")[0]
            raise SchemaError(f"group {number}: {field.name} differs between its rows; every row repeats the group's")
    columns = [rows.column(field.name) for field in ROLLOUT_COLUMNS]
    return _group_of(rows, pa.StructArray.from_arrays(columns, fields=list(ROLLOUT_COLUMNS)))


def _group_of(batch: pa.RecordBatch, rollouts: pa.StructArray) -> Group:
    """The group whose own columns are in the first row of `batch`, checked."""
    values = {field.name: batch.column(field.name)[0].as_py() for field in GROUP_COLUMNS if field.name != "prompt_ids"}
    prompt_ids = batch.column("prompt_ids")[0].values
    if prompt_ids.null_count or rollouts.null_count:
        raise SchemaError(f"group {values['group_number']}: null in prompt_ids or rollouts; send values only")
    number, replacement = values.pop("group_number"), values.pop("replacement")
    group = Group(
        group=GroupId(number, replacement),
        prompt_ids=prompt_ids.to_numpy(zero_copy_only=False),
        rollouts=_rollouts_of(rollouts),
        **values,
    )
    check_group(group)
    return group


def _repeat(array: pa.Array, times: int) -> pa.Array:
    return array.take(pa.array(np.zeros(times, np.int64)))


def _group_arrays(group: Group) -> list[pa.Array]:
    """The group's columns in order, one row each."""
    values: dict[str, Any] = {
        "group_number": group.group.number,
        "replacement": group.group.replacement,
        **{f.name: getattr(group, f.name) for f in GROUP_COLUMNS if f.name not in ("group_number", "replacement")},
    }
    return [pa.array([values[field.name]], field.type) for field in GROUP_COLUMNS]


def _rollouts_array(group: Group) -> pa.Array:
    """The `rollouts` column, one row."""
    rollouts = group.rollouts
    columns: dict[str, list[Any]] = {
        "member": list(range(len(rollouts))),
        "completion_ids": [rollout.completion_ids for rollout in rollouts],
        "behavior_logprobs": [rollout.behavior_logprobs for rollout in rollouts],
        "segments": [[_segment_row(segment) for segment in rollout.segments] for rollout in rollouts],
        "finish_reason": [rollout.finish_reason for rollout in rollouts],
        "reward": [rollout.reward for rollout in rollouts],
        "reward_parts": [[{"name": k, "value": v} for k, v in r.reward_parts.items()] for r in rollouts],
    }
    arrays = [pa.array(columns[field.name], field.type) for field in ROLLOUT_COLUMNS]
    structs = pa.StructArray.from_arrays(arrays, fields=list(ROLLOUT_COLUMNS))
    return pa.ListArray.from_arrays(pa.array([0, len(rollouts)], pa.int32()), structs, type=_list_of(_ROLLOUT))


def _segment_row(segment: Segment) -> dict[str, Any]:
    return {field.name: getattr(segment, field.name) for field in SEGMENT}


def _read_batch(payload: bytes) -> pa.RecordBatch:
    try:
        stream = pa.CompressedInputStream(pa.BufferReader(payload), _CODEC)
        with stream, pa.ipc.open_stream(stream) as reader:
            schema = reader.schema
            _check_schema(schema, WIRE_SCHEMA)
            batches = list(reader)
        for batch in batches:
            batch.validate(full=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise SchemaError(f"{len(payload)} bytes that are no Arrow stream of one group: {error}") from error
    if [batch.num_rows for batch in batches] != [1]:
        raise SchemaError(f"record batches of {[b.num_rows for b in batches]} rows; a group is one batch of one row")
    batch = batches[0]
    _check_present(batch, WIRE_SCHEMA)
    return batch


def _check_present(data: pa.RecordBatch | pa.Table, expected: pa.Schema) -> None:
    missing = [field.name for field in expected if not field.nullable and data.column(field.name).null_count]
    if missing:
        raise SchemaError(f"null in {missing}; these columns always have a value")


def _check_schema(schema: pa.Schema, expected: pa.Schema) -> None:
    version = (schema.metadata or {}).get(_VERSION_KEY, b"none").decode(errors="replace")
    if version != str(SCHEMA_VERSION):
        raise SchemaError(
            f"schema version {version}, this release reads and writes {SCHEMA_VERSION}; "
            f"run the same release of seqrelay on every host"
        )
    if not schema.equals(expected, check_metadata=False):
        ours, theirs = ({f"{f.name}: {f.type}" for f in s} for s in (expected, schema))
        raise SchemaError(
            f"schema version {version} with other columns: missing {sorted(ours - theirs)}, "
            f"unknown {sorted(theirs - ours)}; send exactly the columns of shared.schema"
        )


def _rollouts_of(structs: pa.StructArray) -> tuple[Rollout, ...]:
    """Rows of `rollouts` in member order. SchemaError when a value is missing or the members are not 0, 1, 2, ..."""
    columns = dict(zip((field.name for field in ROLLOUT_COLUMNS), structs.flatten(), strict=True))
    for field in ROLLOUT_COLUMNS:
        if not field.nullable and columns[field.name].null_count:
            raise SchemaError(f"null in rollouts.{field.name}; this column always has a value")
    members = columns["member"].to_pylist()
    if members != list(range(len(members))):
        raise SchemaError(f"rollouts.member is {members}; members are numbered 0, 1, 2, ... in order")
    ids, logprobs = (_vectors(columns[name], name) for name in ("completion_ids", "behavior_logprobs"))
    segments, parts = (columns[name].to_pylist() for name in ("segments", "reward_parts"))
    reasons, rewards = (columns[name].to_pylist() for name in ("finish_reason", "reward"))
    return tuple(
        Rollout(
            completion_ids=cast(Int32Array, ids[i]),
            behavior_logprobs=cast(Float32Array | None, logprobs[i]),
            segments=tuple(_segment(row) for row in segments[i]),
            finish_reason=cast(FinishReason, reasons[i]),
            reward=rewards[i],
            reward_parts={part["name"]: part["value"] for part in parts[i]},
        )
        for i in members
    )


def _segment(row: dict[str, Any]) -> Segment:
    return Segment(row["policy_version"], row["start"], row["end"], row["loglik"], cast(KvState, row["kv"]))


def _vectors(column: pa.ListArray, name: str) -> list[np.ndarray | None]:
    """Each row of a list column as a NumPy view; None where the row is null."""
    if column.flatten().null_count:
        raise SchemaError(f"null inside rollouts.{name}; every token has a value")
    values = column.values.to_numpy(zero_copy_only=False)
    offsets, present = column.offsets.to_numpy(), column.is_valid().to_numpy(zero_copy_only=False)
    return [values[offsets[i] : offsets[i + 1]] if present[i] else None for i in range(len(column))]
