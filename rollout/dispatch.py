"""From a ticket to engine requests: which seed, which cache salt, how many tokens. Pure.

A seed is a hash of everything that names a request, so that no two requests of a run share a random stream: counting
seeds up from a base (`seed + i`) would make neighbouring prompts draw the same numbers, and reusing a seed after a
retry or a cut would repeat the first tokens.
"""

from collections.abc import Sequence

from shared.config import Config
from shared.protocols import GenerateRequest
from shared.records import Ticket
from shared.seeds import derive_seed


def rollout_request(
    config: Config,
    ticket: Ticket,
    member: int,
    request_count: int,
    prompt_ids: Sequence[int],
    active_version: int,
    kept_ids: Sequence[int] = (),
) -> GenerateRequest:
    """The request for member `member` of a group; `request_count` counts requests made for it, from 0.

    `kept_ids`: tokens that it already has, fewer than its token budget; the request continues them. The budget never
    exceeds what the context leaves. ValueError when the prompt alone fills the context.
    """
    group = ticket.group
    numbers = (group.number, group.replacement, ticket.attempt, member, request_count)
    return GenerateRequest(
        request_id="-".join(map(str, numbers)),
        prompt_ids=(*prompt_ids, *kept_ids),
        max_tokens=token_budget(config, len(prompt_ids)) - len(kept_ids),
        temperature=config.sampling.temperature,
        seed=derive_seed(config.run.seed, "rollout", *numbers),
        cache_salt=str(active_version),
    )


def evaluation_request(
    config: Config, version: int, prompt_index: int, sample: int, prompt_ids: Sequence[int]
) -> GenerateRequest:
    """The request for one evaluation sample: the same seed at every version, so that versions are comparable."""
    return GenerateRequest(
        request_id=f"evaluation-{version}-{prompt_index}-{sample}",
        prompt_ids=prompt_ids,
        max_tokens=token_budget(config, len(prompt_ids)),
        temperature=config.sampling.temperature,
        seed=derive_seed(config.run.seed, "evaluation", prompt_index, sample),
        cache_salt=str(version),
    )


def token_budget(config: Config, num_prompt_tokens: int) -> int:
    """Completion tokens this prompt may get: `sampling.max_tokens`, less what the context cannot hold."""
    room = config.rollout.max_model_len - num_prompt_tokens
    if room < 1:
        raise ValueError(
            f"a prompt of {num_prompt_tokens} tokens leaves no room in rollout.max_model_len = "
            f"{config.rollout.max_model_len}; raise it or shorten the prompt"
        )
    return min(config.sampling.max_tokens, room)
