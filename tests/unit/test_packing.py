"""Mini-batches and micro-batches: everything once, under budget, masks from lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.packing import MicroBatch, pack, split_minibatches

Sequences = list[tuple[np.ndarray, np.ndarray]]


def numbered(shapes: list[tuple[int, int]]) -> Sequences:
    """Prompts by kind (equal kind, equal prompt); completion tokens all different."""
    sequences, counter = [], 1000
    for prompt_tokens, completion_tokens in shapes:
        prompt = np.arange(prompt_tokens, dtype=np.int32)
        sequences.append((prompt, np.arange(counter, counter + completion_tokens, dtype=np.int32)))
        counter += completion_tokens
    return sequences


shapes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), max_size=20)


@given(shapes, st.integers(46, 200), st.booleans())
@settings(deadline=None)
def test_every_token_once_under_the_budget(
    shapes: list[tuple[int, int]], micro_batch_tokens: int, share_prompts: bool
) -> None:
    sequences = numbered(shapes)
    batches = pack(sequences, micro_batch_tokens, share_prompts=share_prompts, pad_id=7)
    assert sorted(i for b in batches for i in b.indices_S) == list(range(len(sequences)))
    for batch in batches:
        assert batch.token_ids.size <= micro_batch_tokens
        assert share_prompts or batch.is_plain
        rows_T, columns_T, sources_T = batch.target_columns()
        expected = np.concatenate([sequences[i][1] for i in batch.indices_S])
        np.testing.assert_array_equal(batch.token_ids[rows_T, columns_T], expected)
        # The predicting token is the one just before, in position and in what it may see.
        np.testing.assert_array_equal(batch.position_ids[rows_T, sources_T] + 1, batch.position_ids[rows_T, columns_T])
        assert batch.attention_mask()[rows_T, 0, columns_T, sources_T].all()


@given(shapes)
@settings(deadline=None)
def test_each_token_sees_its_own_sequence_only(shapes: list[tuple[int, int]]) -> None:
    sequences = numbered(shapes)
    for batch in pack(sequences, 200, share_prompts=True):
        mask = batch.attention_mask()
        for s, index in enumerate(batch.indices_S):
            row, last = batch.rows_S[s], batch.starts_S[s] + batch.lengths_S[s] - 1
            seen = batch.token_ids[row][mask[row, 0, last]]
            np.testing.assert_array_equal(seen, np.concatenate(sequences[index]))


def test_completions_of_one_prompt_share_it() -> None:
    prompt = np.arange(25)
    (batch,) = pack([(prompt, np.arange(12))] * 8, 2048, share_prompts=True)
    assert batch.token_ids.shape == (1, 121)
    (plain,) = pack([(prompt, np.arange(12))] * 8, 2048, share_prompts=False)
    assert plain.token_ids.shape == (8, 37)


def test_long_completions_get_rows_of_their_own() -> None:
    (batch,) = pack([(np.arange(10), np.arange(400))] * 2, 2048, share_prompts=True)
    assert batch.is_plain


def test_padding_is_told_from_a_real_pad_token_by_length() -> None:
    eos = 2
    sequences: Sequences = [(np.array([5, eos]), np.array([eos])), (np.array([6]), np.array([8, 9, eos]))]
    (batch,) = pack(sequences, 64, share_prompts=False, pad_id=eos)
    rows_T, columns_T, _ = batch.target_columns()
    assert batch.token_ids[rows_T, columns_T].tolist() == [8, 9, eos, eos]
    assert batch.indices_S.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("shape", "message"),
    [((0, 3), "0 prompt"), ((3, 0), "0 completion"), ((30, 40), "micro_batch_tokens = 64")],
)
def test_what_cannot_be_packed_is_refused(shape: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([(np.arange(shape[0]), np.arange(shape[1]))], 64, share_prompts=False)


def test_nothing_gives_no_batches() -> None:
    assert pack([], 64, share_prompts=True) == []


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**31))
def test_minibatches_deal_whole_groups_evenly(size: int, num_minibatches: int, seed: int) -> None:
    indices = list(range(100, 100 + size * num_minibatches))
    np.random.seed(1)  # the global generator must not matter
    parts = split_minibatches(indices, num_minibatches, seed)
    assert [len(p) for p in parts] == [size] * num_minibatches
    assert sorted(i for p in parts for i in p) == indices
    np.random.seed(0)
    assert split_minibatches(indices, num_minibatches, seed) == parts


def test_minibatches_depend_on_the_seed() -> None:
    assert split_minibatches(range(20), 2, 1) != split_minibatches(range(20), 2, 2)


def test_uneven_minibatches_are_refused() -> None:
    with pytest.raises(ValueError, match="7 groups do not split into 2"):
        split_minibatches(range(7), 2, 0)


def test_micro_batch_is_plain_only_without_sharing() -> None:
    prompt = np.arange(3)
    batches: list[MicroBatch] = pack([(prompt, np.arange(2)), (prompt, np.arange(2))], 64, share_prompts=True)
    assert [b.is_plain for b in batches] == [False]
