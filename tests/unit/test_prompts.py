import pytest

from rollout.prompts import PromptSource, split_sums
from shared.config_file import parse_config
from shared.errors import ConfigError
from shared.records import GroupId


class CharacterTokenizer:
    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(c) for c in text]

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        return f"<user>{conversation[0]['content']}<assistant>"


def config(**sections):
    return parse_config({"model": {"path": "m"}, **sections})


PLAIN = {"prompts": {"style": "plain", "digits": 2, "num_held_out": 100}}


def test_held_out_sums_are_never_trained_on_in_any_epoch_or_replacement():
    source = PromptSource(config(), CharacterTokenizer("yes"))
    held_out = {p.problem.prompt_id for p in source.held_out}
    trained = {
        source.training_prompt(GroupId(n, replacement)).problem.prompt_id
        for n in range(200)
        for replacement in range(3)
    }
    assert len(held_out) == 16
    assert len(trained) == 81 - 16
    assert not held_out & trained


def test_each_epoch_is_another_permutation_of_all_training_problems():
    source = PromptSource(config(), CharacterTokenizer("yes"))
    epochs = [[source.training_prompt(GroupId(65 * e + i)).problem.prompt_id for i in range(65)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) == 65
    assert epochs[0] != epochs[1]


def test_order_follows_the_seed_and_the_split_does_not():
    sources = [PromptSource(config(run={"seed": seed}), CharacterTokenizer("yes")) for seed in (0, 0, 1)]
    orders = [[s.training_prompt(GroupId(n)).problem.prompt_id for n in range(20)] for s in sources]
    assert orders[0] == orders[1] != orders[2]
    assert sources[0].held_out == sources[2].held_out


def test_a_replacement_is_another_problem():
    source = PromptSource(config(), CharacterTokenizer("yes"))
    assert source.training_prompt(GroupId(3, 1)) != source.training_prompt(GroupId(3, 0))


def test_styles_and_answers():
    chat = PromptSource(config(), CharacterTokenizer("yes")).held_out[0]
    assert "".join(map(chr, chat.token_ids)) == f"<user>{chat.problem.question}<assistant>"
    training, held_out = split_sums(config(**PLAIN).prompts)
    assert len(training) == 9900 and len(held_out) == 100
    problem = next(p for p in training if p.prompt_id == "7+5")
    assert (problem.question, problem.answer) == ("07+05=", "12")


def test_chat_style_without_a_template_and_prompts_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"prompts.style = 'chat' .* Set prompts.style = 'plain'"):
        PromptSource(config(), CharacterTokenizer())
    tight = config(rollout={"max_model_len": 80}, sampling={"max_tokens": 64})
    with pytest.raises(ConfigError, match=r"has \d+ tokens; rollout.max_model_len = 80 .* leaves 16"):
        PromptSource(tight, CharacterTokenizer("yes"))


def test_two_groups_may_have_the_same_text_and_stay_two_groups():
    source = PromptSource(config(), CharacterTokenizer("yes"))
    first = source.training_prompt(GroupId(0))
    again = next(GroupId(n) for n in range(65, 130) if source.training_prompt(GroupId(n)) == first)
    assert again != GroupId(0)
