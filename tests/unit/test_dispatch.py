import itertools

import pytest

from rollout.dispatch import evaluation_request, rollout_request, token_budget
from shared.config_file import parse_config
from shared.records import GroupId, Ticket
from shared.seeds import derive_seed

CONFIG = parse_config({"model": {"path": "m"}, "sampling": {"max_tokens": 100}, "rollout": {"max_model_len": 128}})


def test_no_two_requests_of_a_run_share_a_seed():
    names = itertools.product(range(20), range(2), range(2), range(8), range(2))
    seeds = [
        rollout_request(CONFIG, Ticket(GroupId(number, replacement), attempt), member, count, [1], 0).seed
        for number, replacement, attempt, member, count in names
    ]
    seeds += [evaluation_request(CONFIG, 0, prompt, sample, [1]).seed for prompt in range(16) for sample in range(4)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_seeds_are_not_run_seed_plus_counter():
    seeds = [derive_seed(0, "rollout", n) for n in range(50)]
    assert not set(seeds) & {seed + 1 for seed in seeds}
    assert derive_seed(0, "rollout", 1) != derive_seed(1, "rollout", 0)
    assert derive_seed(0, "rollout", 1) == derive_seed(0, "rollout", 1)


def test_a_request_carries_what_the_config_says():
    request = rollout_request(CONFIG, Ticket(GroupId(3), 1), 2, 0, [5, 6], active_version=7)
    assert (request.temperature, request.max_tokens, request.cache_salt) == (1.0, 100, "7")
    assert list(request.prompt_ids) == [5, 6]


def test_the_budget_is_what_the_context_leaves():
    assert token_budget(CONFIG, 10) == 100
    assert token_budget(CONFIG, 100) == 28
    with pytest.raises(ValueError, match="prompt of 128 tokens leaves no room"):
        token_budget(CONFIG, 128)


def test_evaluation_draws_the_same_numbers_at_every_version():
    first, last = (evaluation_request(CONFIG, version, 1, 2, [1]) for version in (0, 25))
    assert first.seed == last.seed
    assert first.request_id != last.request_id
    assert first.cache_salt != last.cache_salt
