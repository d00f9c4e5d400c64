"""A step's Parquet file read back: the very groups that were written, or an error that names the file."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import SchemaError
from shared.records import Group, GroupId, Rollout, Segment, Ticket
from shared.schema import decode_group, encode_group, groups_of_table, step_table
from shared.store import read_trajectories, write_trajectories

MakeGroup = Callable[..., Group]
finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**31 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    ids = draw(st.lists(counts, min_size=sum(sizes), max_size=sum(sizes)))
    logprobs = np.array(draw(st.lists(st.floats(-99, 0, width=32), min_size=sum(sizes), max_size=sum(sizes))), "f4")
    segments, start = [], 0
    for size in sizes:
        # Not always the exact sum: it was added up elsewhere, in another order.
        loglik = float(logprobs[start : start + size].sum(dtype=np.float64)) + draw(st.floats(-9e-6, 9e-6))
        segments.append(
            Segment(draw(counts), start, start + size, loglik, draw(st.sampled_from(["fresh", "kept", "unknown"])))
        )
        start += size
    return Rollout(
        completion_ids=np.array(ids, "i4"),
        behavior_logprobs=logprobs if draw(st.booleans()) else None,
        segments=tuple(segments),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        reward=draw(st.none() | finite),
        reward_parts=draw(st.dictionaries(names, finite, max_size=2)),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    seconds = st.floats(0, 2e9)
    return Group(
        group=GroupId(draw(st.integers(0, 2**63 - 1)), draw(counts)),
        attempt=draw(counts),
        worker_id=draw(names),
        prompt_id=draw(names),
        prompt_ids=np.array(draw(st.lists(counts, min_size=1, max_size=5)), "i4"),
        temperature=draw(st.floats(0.05, 2.0)),
        rollouts=tuple(draw(st.lists(rollouts(), min_size=1, max_size=3))),
        num_rejected=draw(counts),
        started_at_s=draw(seconds),
        generate_s=draw(seconds),
        reward_s=draw(seconds),
    )


def bits(value: Any) -> Any:
    """Everything in a record as comparable values; floats as their bytes, so that 0.0 and -0.0 differ."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, tuple):
        return [bits(item) for item in value]
    if isinstance(value, dict):
        return [(name, bits(item)) for name, item in value.items()]
    if isinstance(value, Group | Rollout | Segment | GroupId):
        return {name: bits(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(groups(), max_size=3))
def test_what_is_read_is_what_was_written_bit_for_bit(tmp_path: Path, written: list[Group]) -> None:
    payloads = [encode_group(group) for group in written]
    write_trajectories(tmp_path / "step.parquet", payloads, 7)
    read = read_trajectories(tmp_path / "step.parquet")
    assert [bits(group) for group in read] == [bits(decode_group(payload)) for payload in payloads]
    assert [bits(group) for group in read] == [bits(group) for group in written]
    assert [encode_group(group) for group in read] == payloads


def test_groups_cross_the_table_in_their_order_and_read_only(make_group: MakeGroup) -> None:
    written = [make_group(Ticket(GroupId(number)), num_rollouts=number + 1) for number in (5, 2, 3)]
    read = groups_of_table(step_table(written, 0))
    assert [group.group.number for group in read] == [5, 2, 3]
    assert not read[0].prompt_ids.flags.writeable
    assert not read[0].rollouts[0].completion_ids.flags.writeable
    assert groups_of_table(step_table([], 0)) == []


def spoil(table: pa.Table, column: str, row: int, value: object) -> pa.Table:
    rows = table.to_pylist()
    rows[row][column] = value
    return pa.Table.from_pylist(rows, schema=table.schema)


BAD_TABLES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "a column less": (lambda t: t.drop_columns(["reward"]), "missing.*reward: double"),
    "a column more": (lambda t: t.append_column("extra", pa.array([0] * len(t))), "unknown.*extra"),
    "another version": (lambda t: t.replace_schema_metadata({b"seqrelay.schema_version": b"9"}), "schema version 9"),
    "no version": (lambda t: t.replace_schema_metadata({}), "schema version none"),
    "a member short at the start": (lambda t: t.slice(1), "not member 0"),
    "a member short inside": (lambda t: pa.concat_tables([t.slice(0, 1), t.slice(2)]), r"members? .*\[0, 2\]"),
    "rows out of order": (lambda t: t.take([0, 2, 1, 3, 4, 5]), r"members? .*\[0, 2, 1\]"),
    "rows that disagree": (lambda t: spoil(t, "temperature", 1, 0.5), "group 0: temperature differs"),
    "rows of two groups as one": (lambda t: spoil(t, "member", 3, 3), "group_number differs"),
    "a token that is no token": (lambda t: spoil(t, "completion_ids", 4, [1, 2, 3, 4, -5]), "group 1.0.*negative id"),
    "a reward that is no number": (lambda t: spoil(t, "reward", 5, float("nan")), "group 1.0.*reward = nan"),
}


@pytest.mark.parametrize("fault", BAD_TABLES)
def test_a_file_that_breaks_the_schema_is_refused_by_name(make_group: MakeGroup, tmp_path: Path, fault: str) -> None:
    change, message = BAD_TABLES[fault]
    table = step_table([make_group(Ticket(GroupId(number)), num_rollouts=3) for number in (0, 1)], 0)
    pq.write_table(change(table), tmp_path / "bad.parquet")
    with pytest.raises(SchemaError, match=rf"bad\.parquet: .*{message}"):
        read_trajectories(tmp_path / "bad.parquet")


def test_a_missing_value_is_refused(make_group: MakeGroup) -> None:
    table = step_table([make_group(Ticket(GroupId(0)))], 0)
    index = table.schema.get_field_index("finish_reason")
    column = pa.chunked_array([pa.array(["stop", None])])
    with pytest.raises(SchemaError, match="null in .*finish_reason"):
        groups_of_table(table.set_column(index, table.schema.field(index), column))


def test_a_file_that_is_no_parquet_is_refused_by_name(make_group: MakeGroup, tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    with pytest.raises(SchemaError, match=r"step\.parquet: no Parquet file"):
        read_trajectories(path)
    write_trajectories(path, [encode_group(make_group(Ticket(GroupId(0))))], 0)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(SchemaError, match=r"step\.parquet: no Parquet file"):
        read_trajectories(path)


def test_a_sequence_payload_has_no_log_probabilities_in_the_file(make_group: MakeGroup, tmp_path: Path) -> None:
    group = make_group(Ticket(GroupId(0)), with_logprobs=False, reward=None)
    written = replace(group, rollouts=(*group.rollouts, make_group(Ticket(GroupId(0)), spans=()).rollouts[0]))
    write_trajectories(tmp_path / "step.parquet", [encode_group(written)], 0)
    (read,) = read_trajectories(tmp_path / "step.parquet")
    assert [rollout.behavior_logprobs is None for rollout in read.rollouts] == [True, True, False]
    assert [rollout.reward for rollout in read.rollouts] == [None, None, 1.0]
    assert [rollout.num_tokens for rollout in read.rollouts] == [5, 5, 0]
