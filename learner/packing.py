"""Which tokens go through the model together: mini-batches of whole groups, and micro-batches of rows. Pure NumPy.

A row is a prompt followed by one or more of its completions, padded on the right. Completions in one row do not see
each other (`MicroBatch.attention_mask`) and all start at the position after the prompt, so a row computes what
separate rows would, without running the prompt once per completion. Eight completions of 12 tokens on a prompt of 25:
121 tokens instead of 296.

Everything is decided by lengths, never by token values: pad id = eos id is normal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.integer]

# Attention in a shared row also computes the pairs its mask hides. Up to this length those cost little next to the
# layers themselves; longer completions get rows of their own.
SHARED_ROW_TOKENS = 512
PADDING = -1


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward pass. `B` rows of `L` tokens, `S` completions in the order their tokens come out.

    `block_ids` [B, L]: 0 in the prompt, 1.. in the row's completions, PADDING (-1) behind them.
    `rows_S`, `starts_S`, `lengths_S`: where each completion lies. `indices_S`: its place in the list given to `pack`.
    """

    token_ids: Int64Array
    position_ids: Int64Array
    block_ids: Int64Array
    prompt_lengths_B: Int64Array
    rows_S: Int64Array
    starts_S: Int64Array
    lengths_S: Int64Array
    indices_S: Int64Array

    @property
    def is_plain(self) -> bool:
        """One completion per row: ordinary causal attention is right and no mask is needed."""
        return len(self.rows_S) == len(self.token_ids)

    def attention_mask(self) -> npt.NDArray[np.bool_]:
        """bool [B, 1, L, L], True where the query (third axis) may see the key: the prompt and its own completion."""
        length = self.token_ids.shape[1]
        causal = np.tril(np.ones((length, length), dtype=bool))
        query, key = self.block_ids[:, :, None], self.block_ids[:, None, :]
        return (causal & ((key == 0) | (key == query)))[:, None]

    def target_columns(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """For each of the T completion tokens: its row, its column, and the column whose output predicts it.

        The first token of a completion is predicted by the last token of the prompt.
        """
        rows_T = np.repeat(self.rows_S, self.lengths_S)
        first_S = np.cumsum(self.lengths_S) - self.lengths_S
        offsets_T = np.arange(len(rows_T)) - np.repeat(first_S, self.lengths_S)
        columns_T = np.repeat(self.starts_S, self.lengths_S) + offsets_T
        sources_T = np.where(offsets_T == 0, self.prompt_lengths_B[rows_T] - 1, columns_T - 1)
        return rows_T, columns_T, sources_T


@dataclass(frozen=True)
class _Row:
    prompt: TokenArray
    completions: tuple[tuple[int, TokenArray], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(len(c) for _, c in self.completions)


def split_minibatches(group_indices: Sequence[int], num_minibatches: int, seed: int) -> list[list[int]]:
    """Shuffle whole groups with a generator of our own and deal them into equal mini-batches.

    Raises:
        ValueError: the groups cannot be dealt evenly.
    """
    if num_minibatches < 1 or len(group_indices) % num_minibatches:
        raise ValueError(
            f"{len(group_indices)} groups do not split into {num_minibatches} equal mini-batches: "
            f"set learner.minibatches to a divisor of learner.prompts_per_step"
        )
    shuffled = np.random.default_rng(seed).permutation(np.asarray(group_indices, dtype=np.int64))
    return [part.tolist() for part in np.split(shuffled, num_minibatches)]


def pack(
    sequences: Sequence[tuple[TokenArray, TokenArray]],
    micro_batch_tokens: int,
    *,
    share_prompts: bool,
    pad_id: int = 0,
) -> list[MicroBatch]:
    """Micro-batches of at most `micro_batch_tokens` padded tokens (rows times longest row), longest rows first.

    Args:
        sequences: (prompt_ids, completion_ids), both non-empty.
        share_prompts: put completions of one prompt into one row. Needs a model with full causal attention.
        pad_id: any valid token id.

    Raises:
        ValueError: a prompt or completion is empty, or one sequence alone exceeds the budget.
    """
    for index, (prompt, completion) in enumerate(sequences):
        _check_sequence(index, len(prompt), len(completion), micro_batch_tokens)
    limit = min(SHARED_ROW_TOKENS, micro_batch_tokens) if share_prompts else 0
    rows = sorted(_make_rows(sequences, limit), key=lambda row: (-row.num_tokens, row.completions[0][0]))
    batches: list[MicroBatch] = []
    while rows:
        num_rows = micro_batch_tokens // rows[0].num_tokens
        batches.append(_lay_out(rows[:num_rows], pad_id))
        rows = rows[num_rows:]
    return batches


def _check_sequence(index: int, prompt_tokens: int, completion_tokens: int, micro_batch_tokens: int) -> None:
    if not prompt_tokens or not completion_tokens:
        raise ValueError(
            f"sequence {index} has {prompt_tokens} prompt and {completion_tokens} completion tokens: "
            f"both must be at least 1; exclude empty completions first"
        )
    if prompt_tokens + completion_tokens > micro_batch_tokens:
        raise ValueError(
            f"sequence {index} has {prompt_tokens + completion_tokens} tokens, more than learner.micro_batch_tokens = "
            f"{micro_batch_tokens}: raise it to at least that"
        )


def _make_rows(sequences: Sequence[tuple[TokenArray, TokenArray]], limit: int) -> list[_Row]:
    """Rows of at most `limit` tokens per prompt, filled longest completion first; one completion always fits."""
    by_prompt: dict[bytes, list[int]] = {}
    for index, (prompt, _) in enumerate(sequences):
        by_prompt.setdefault(np.asarray(prompt, dtype=np.int64).tobytes(), []).append(index)
    rows: list[_Row] = []
    for indices in by_prompt.values():
        prompt = sequences[indices[0]][0]
        bins: list[list[int]] = []
        used: list[int] = []
        for index in sorted(indices, key=lambda i: -len(sequences[i][1])):
            size = len(sequences[index][1])
            place = next((b for b, tokens in enumerate(used) if tokens + size <= limit), None)
            if place is None:
                bins.append([index])
                used.append(len(prompt) + size)
            else:
                bins[place].append(index)
                used[place] += size
        rows += [_Row(prompt, tuple((i, sequences[i][1]) for i in members)) for members in bins]
    return rows


def _lay_out(rows: Sequence[_Row], pad_id: int) -> MicroBatch:
    shape = (len(rows), max(row.num_tokens for row in rows))
    token_ids = np.full(shape, pad_id, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    block_ids = np.full(shape, PADDING, dtype=np.int64)
    places: list[tuple[int, int, int, int]] = []
    for r, row in enumerate(rows):
        start = len(row.prompt)
        token_ids[r, :start] = row.prompt
        position_ids[r, :start] = np.arange(start)
        block_ids[r, :start] = 0
        for block, (index, completion) in enumerate(row.completions, start=1):
            end = start + len(completion)
            token_ids[r, start:end] = completion
            position_ids[r, start:end] = len(row.prompt) + np.arange(len(completion))
            block_ids[r, start:end] = block
            places.append((r, start, len(completion), index))
            start = end
    rows_S, starts_S, lengths_S, indices_S = np.array(places, dtype=np.int64).T
    prompt_lengths_B = np.array([len(row.prompt) for row in rows], dtype=np.int64)
    return MicroBatch(token_ids, position_ids, block_ids, prompt_lengths_B, rows_S, starts_S, lengths_S, indices_S)
