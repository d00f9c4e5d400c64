import numpy as np
import pytest

from rollout.rewards import Sample, exact_match, last_number, load_reward, score
from shared.errors import ConfigError, RewardError


def returning(values):
    def custom(samples, answer):
        return values

    return custom


FOUR = [Sample("12", True)] * 4


@pytest.mark.parametrize(
    ("text", "finished", "reward"),
    [
        ("12", True, 1.0), ("7 + 5 = 12", True, 1.0), ("12.", True, 1.0), ("12", False, 0.0), ("12 or 13", True, 0.0),
        ("112", True, 0.0), ("-12", True, 0.0), ("", True, 0.0), ("twelve", True, 0.0), ("012", True, 0.0),
    ],
)  # fmt: skip
def test_last_number_wants_the_end_and_the_number(text, finished, reward):
    assert last_number([Sample(text, finished)], "12") == [reward]


def test_exact_match():
    samples = [Sample(" 12 ", True), Sample("12", False), Sample("= 12", True)]
    assert exact_match(samples, "12") == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (0.5, "returned 0.5 for 4 samples"),
        ([1.0], "returned 1 values for 4 samples"),
        ([1.0] * 5, "returned 5 values for 4 samples"),
        ("1111", "for 4 samples"),
        ([1.0, "1", 0.0, 0.0], "returned '1'"),
        ([1.0, float("nan"), 0.0, 0.0], "returned nan"),
        ([1.0, float("inf"), 0.0, 0.0], "returned inf"),
        (None, "returned None for 4 samples"),
    ],
)
def test_a_wrong_answer_of_a_reward_function_is_an_error_that_names_it(values, message):
    with pytest.raises(RewardError, match="custom") as error:
        score(returning(values), FOUR, "12")
    assert message in str(error.value)


def test_an_exception_of_a_reward_function_is_an_error_that_names_it():
    def custom(samples, answer):
        raise KeyError("column")

    with pytest.raises(RewardError, match="custom raised KeyError: 'column'"):
        score(custom, FOUR, "12")


def test_unscored_stays_unscored_and_numbers_of_any_kind_become_floats():
    values = score(returning([1, None, np.float32(0.5), True]), FOUR, "12")
    assert values == [1.0, None, 0.5, 1.0]
    assert all(v is None or type(v) is float for v in values)


def test_dotted_paths():
    assert load_reward("rollout.rewards:last_number") is last_number
    with pytest.raises(ConfigError, match="module 'no_such_module' cannot be imported"):
        load_reward("no_such_module:f")
    with pytest.raises(ConfigError, match=r"module '\.relative' cannot be imported"):
        load_reward(".relative:f")
    with pytest.raises(ConfigError, match="has no function 'no_such_function'"):
        load_reward("rollout.rewards:no_such_function")


def test_a_module_that_fails_while_it_is_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "failing_rewards.py").write_text("limit = undefined_name")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="module 'failing_rewards' cannot be imported: NameError: .*undefined_name"):
        load_reward("failing_rewards:f")
