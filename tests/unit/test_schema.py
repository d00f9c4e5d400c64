"""The data contract: round trip, size on the wire, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import schema
from shared.errors import SchemaError
from shared.records import Group, GroupId, Rollout, Segment, Ticket
from shared.schema import decode_group, encode_group, step_table

MakeGroup = Callable[..., Group]
TICKET = Ticket(GroupId(17, 1), 2)

# A changed column needs a new SCHEMA_VERSION and a new line here; lines of released versions stay as they are.
FINGERPRINTS = {1: "b3ea8f83a1867ab7fdbb3c91992888341f0caf2b61bea2aac09fc8f98f9008ef"}


def test_columns_change_only_with_the_schema_version() -> None:
    assert schema.fingerprint() == FINGERPRINTS[schema.SCHEMA_VERSION]


def assert_same(a: Group, b: Group) -> None:
    def plain(group: Group) -> Any:
        rollouts = tuple(
            replace(
                rollout,
                completion_ids=rollout.completion_ids.tolist(),
                behavior_logprobs=None if rollout.behavior_logprobs is None else rollout.behavior_logprobs.tolist(),
            )
            for rollout in group.rollouts
        )
        return replace(group, prompt_ids=group.prompt_ids.tolist(), rollouts=rollouts)

    assert plain(a) == plain(b)


@pytest.mark.parametrize("with_logprobs", [True, False])
@pytest.mark.parametrize("reward", [None, 0.0, 0.3])
@pytest.mark.parametrize("spans", [(), ((7, 1),), ((7, 57), (8, 71))])
def test_round_trip_is_exact(make_group: MakeGroup, spans: Any, reward: float | None, with_logprobs: bool) -> None:
    group = make_group(TICKET, spans=spans, reward=reward, with_logprobs=with_logprobs, num_rollouts=3)
    back = decode_group(encode_group(group))
    assert_same(back, group)
    assert back.rollouts[0].completion_ids.dtype == np.int32
    assert back.rollouts[0].seq_loglik == group.rollouts[0].seq_loglik


def test_rollouts_of_one_group_may_differ_in_length_and_kind(make_group: MakeGroup) -> None:
    kinds = [
        make_group(TICKET, spans=spans, with_logprobs=with_logprobs, num_rollouts=1).rollouts[0]
        for spans, with_logprobs in (((), True), (((3, 9),), False), (((3, 2), (4, 40)), True))
    ]
    group = replace(make_group(TICKET), rollouts=tuple(kinds))
    assert_same(decode_group(encode_group(group)), group)


@given(st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=5), st.booleans())
def test_any_cut_survives_the_wire(make_group: MakeGroup, cuts: list[list[int]], with_logprobs: bool) -> None:
    rollouts = tuple(
        make_group(TICKET, spans=list(enumerate(cut)), with_logprobs=with_logprobs, num_rollouts=1).rollouts[0]
        for cut in cuts
    )
    group = replace(make_group(TICKET), rollouts=rollouts)
    assert_same(decode_group(encode_group(group)), group)


def test_bytes_per_token_on_the_wire(make_group: MakeGroup) -> None:
    def size(num_tokens: int, segments: int = 1, **kind: Any) -> int:
        spans = [(version, num_tokens // segments) for version in range(segments)]
        return len(encode_group(make_group(TICKET, spans=spans, num_rollouts=8, num_prompt_tokens=40, **kind)))

    assert size(64) / (8 * 64) <= 12
    assert size(1024) / (8 * 1024) <= 8.1
    fixed = size(64, with_logprobs=False) - 4 * 8 * 64
    assert fixed <= 1500  # once per group: columns, prompt, one segment for each of 8 rollouts
    assert (size(1024, with_logprobs=False) - fixed) / (8 * 1024) <= 4
    assert (size(64, segments=4, with_logprobs=False) - size(64, with_logprobs=False)) / (8 * 3) <= 33


def test_the_prompt_travels_once(make_group: MakeGroup) -> None:
    sizes = [len(encode_group(make_group(TICKET, num_rollouts=8, num_prompt_tokens=length))) for length in (1000, 5000)]
    assert sizes[1] - sizes[0] <= 4 * 4000 + 100


BAD_ROLLOUTS: dict[str, tuple[Callable[[Rollout], Rollout], str]] = {
    "gap between segments": (
        lambda r: replace(r, segments=(r.segments[0], replace(r.segments[1], start=3))),
        r"segments\[1\].*starts at 2",
    ),
    "overlapping segments": (
        lambda r: replace(r, segments=(r.segments[0], replace(r.segments[1], start=1))),
        r"segments\[1\].*starts at 2",
    ),
    "segments end early": (lambda r: replace(r, segments=r.segments[:1]), "end at 5 tokens"),
    "empty segment": (
        lambda r: replace(r, segments=(*r.segments, Segment(2, 5, 5, 0.0))),
        r"segments\[2\].*not empty",
    ),
    "log-likelihood NaN": (
        lambda r: replace(r, segments=(replace(r.segments[0], loglik=float("nan")), r.segments[1])),
        r"segments\[0\]\.loglik = nan",
    ),
    "log-likelihood of other tokens": (
        lambda r: replace(r, segments=(replace(r.segments[0], loglik=-0.5), r.segments[1])),
        r"segments\[0\]\.loglik = -0.5.*sum to",
    ),
    "negative version": (
        lambda r: replace(r, segments=(replace(r.segments[0], policy_version=-1), r.segments[1])),
        "policy_version = -1",
    ),
    "unknown kv state": (
        lambda r: replace(r, segments=(replace(r.segments[0], kv="old"), r.segments[1])),  # type: ignore[arg-type]
        r"kv = old",
    ),
    "one log-probability short": (
        lambda r: replace(r, behavior_logprobs=r.behavior_logprobs[:-1]),  # type: ignore[index]
        r"float32\[4\].*float32 \[5\] is expected",
    ),
    "log-probability NaN": (
        lambda r: replace(r, behavior_logprobs=np.full(5, np.nan, np.float32)),
        "behavior_logprobs = NaN or infinite",
    ),
    "ids of another type": (
        lambda r: replace(r, completion_ids=r.completion_ids.astype(np.int64)),
        r"int64\[5\]: int32",
    ),
    "negative id": (lambda r: replace(r, completion_ids=-r.completion_ids - 1), "a negative id"),
    "reward NaN": (lambda r: replace(r, reward=float("nan")), "reward = nan"),
    "reward part infinite": (lambda r: replace(r, reward_parts={"length": float("inf")}), "length = inf"),
    "unknown finish reason": (lambda r: replace(r, finish_reason="abort"), "abort"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("fault", BAD_ROLLOUTS)
def test_a_bad_rollout_is_named(make_group: MakeGroup, fault: str) -> None:
    spoil, message = BAD_ROLLOUTS[fault]
    group = make_group(TICKET, spans=((0, 2), (1, 3)))
    spoiled = replace(group, rollouts=(group.rollouts[0], spoil(group.rollouts[1])))
    with pytest.raises(SchemaError, match=rf"group 17\.1 of worker 'worker-0': rollouts\[1\].*{message}"):
        encode_group(spoiled)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollouts": ()}, "give the group up"),
        ({"prompt_ids": np.zeros(0, np.int32)}, "prompt_ids = none"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"generate_s": float("nan")}, "generate_s = nan"),
        ({"num_rejected": -1}, "num_rejected = -1"),
        ({"worker_id": ""}, "worker_id"),
        ({"prompt_id": None}, "prompt_id = None"),
        ({"attempt": 2**40}, "does not fit its column"),
    ],
)
def test_a_bad_group_is_named(make_group: MakeGroup, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        encode_group(replace(make_group(TICKET), **change))


def rewrite(payload: bytes, change: Callable[[pa.Table], pa.Table], batches: int = 1) -> bytes:
    """The payload with its table changed, sealed again."""
    with pa.ipc.open_stream(pa.input_stream(pa.py_buffer(payload), compression="zstd")) as reader:
        table = change(reader.read_all())
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
        for _ in range(batches):
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_the_receiving_side_checks_too(make_group: MakeGroup) -> None:
    payload = encode_group(make_group(TICKET))
    other_version = {b"seqrelay.schema_version": b"2"}
    with pytest.raises(SchemaError, match="no Arrow stream"):
        decode_group(payload[:-40])
    with pytest.raises(SchemaError, match="no Arrow stream"):
        decode_group(b"junk")
    with pytest.raises(SchemaError, match="schema version 2, this release reads and writes 1"):
        decode_group(rewrite(payload, lambda table: table.replace_schema_metadata(other_version)))
    with pytest.raises(SchemaError, match="schema version none"):
        decode_group(rewrite(payload, lambda table: table.replace_schema_metadata({})))
    with pytest.raises(SchemaError, match="unknown.*surprise"):
        decode_group(rewrite(payload, lambda table: table.append_column("surprise", pa.array([1]))))
    with pytest.raises(SchemaError, match="missing.*prompt_id: string"):
        decode_group(rewrite(payload, lambda table: table.drop_columns(["prompt_id"])))
    with pytest.raises(SchemaError, match="one batch of one row"):
        decode_group(rewrite(payload, lambda table: table, batches=2))

    def nan_temperature(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index("temperature")
        return table.set_column(index, table.schema.field(index), pa.array([float("nan")]))

    with pytest.raises(SchemaError, match="temperature = nan"):
        decode_group(rewrite(payload, nan_temperature))


def test_a_missing_value_is_refused_wherever_it_hides(make_group: MakeGroup) -> None:
    payload = encode_group(make_group(TICKET))

    def without(name: str) -> Callable[[pa.Table], pa.Table]:
        def change(table: pa.Table) -> pa.Table:
            row = table.to_pylist()[0]
            if name in row:
                row[name] = None
            else:
                row["rollouts"][1][name] = None
            return pa.Table.from_pylist([row], schema=table.schema)

        return change

    for name in ("worker_id", "rollouts", "completion_ids", "finish_reason"):
        with pytest.raises(SchemaError, match=f"null in .*{name}"):
            decode_group(rewrite(payload, without(name)))


def test_parquet_reads_as_plain_columns_everywhere(make_group: MakeGroup, tmp_path: Path) -> None:
    unscored = [make_group(Ticket(GroupId(n)), reward=None, with_logprobs=False) for n in (0, 1)]
    scored = [make_group(Ticket(GroupId(n)), reward=0.5, spans=((0, 2), (1, 4))) for n in (2, 3)]
    for step, groups in enumerate((unscored, scored)):
        pq.write_table(step_table(groups, step), tmp_path / f"step-{step}.parquet")
    files = str(tmp_path / "*.parquet")

    both = pd.concat(pd.read_parquet(path) for path in sorted(tmp_path.iterdir()))
    assert both["step"].tolist() == [0] * 4 + [1] * 4
    assert both["group_number"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert both["member"].tolist() == [0, 1] * 4
    assert both["reward"].isna().tolist() == [True] * 4 + [False] * 4
    assert both["prompt_ids"].iloc[-1].tolist() == list(range(7))

    query = duckdb.sql(
        f"select sum(len(completion_ids)), sum(list_sum(behavior_logprobs)), max(segments[2].policy_version), "
        f"max(reward_parts[1].name) from '{files}'"
    )
    ((tokens, total, newest, part),) = query.fetchall()
    expected = sum(rollout.seq_loglik for group in scored for rollout in group.rollouts)
    assert (tokens, newest, part) == (4 * 5 + 4 * 6, 1, "correct")
    assert total == pytest.approx(expected, rel=1e-6)


def test_a_step_has_one_schema_whatever_its_values(make_group: MakeGroup) -> None:
    empty = step_table([], 0)
    null_only = step_table([make_group(TICKET, reward=None, with_logprobs=False, spans=())], 0)
    assert empty.schema.equals(null_only.schema, check_metadata=True)
    assert null_only.schema.equals(schema.STEP_SCHEMA, check_metadata=True)
