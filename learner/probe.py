"""The probe of a policy version: a few recent sequences with the learner's own log-probabilities under its weights.

An engine that loaded the version scores them again; where the two differ by more than the precision explains, its
weights are not the learner's (rollout.verify).
"""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import torch

from learner.packing import PADDING, pack
from learner.policy import Policy
from learner.routing import ExpertCount
from shared.records import Group, ProbeSequence


@torch.no_grad()
def make_probe(
    policy: Policy,
    groups: Sequence[Group],
    num: int,
    *,
    max_tokens: int,
    micro_batch_tokens: int,
    chunk_tokens: int,
    count: ExpertCount | None = None,
) -> tuple[ProbeSequence, ...]:
    """`num` non-empty rollouts, of as many groups as there are, with the policy's log-probabilities at temperature 1.

    Prompt and completion are cut after `max_tokens`, the most that the engine can score. They are computed in the
    precision the policy trains in, each sequence in a row of its own. `count` is told which tokens are no padding.
    """
    by_group = ([(g.prompt_ids, r.completion_ids) for r in g.rollouts] for g in groups)
    rollouts = (rollout for members in zip_longest(*by_group) for rollout in members if rollout is not None)
    cut = ((prompt, completion[: max(0, max_tokens - len(prompt))]) for prompt, completion in rollouts)
    sequences = [(prompt, completion) for prompt, completion in cut if len(completion)][:num]
    probe: list[ProbeSequence | None] = [None] * len(sequences)
    for batch in pack(sequences, micro_batch_tokens, share_prompts=False):
        if count is not None:
            count.real_tokens = torch.from_numpy(batch.block_ids != PADDING)
        logprobs_T = policy.completion_logprobs(batch, 1.0, chunk_tokens).cpu()
        for index, logprobs in zip(batch.indices_S, logprobs_T.split(batch.lengths_S.tolist()), strict=True):
            prompt, completion = sequences[index]
            token_ids = np.concatenate([prompt, completion]).astype(np.int32)
            probe[index] = ProbeSequence(token_ids, first=len(prompt), logprobs=logprobs.numpy().copy())
    return tuple(p for p in probe if p is not None)
