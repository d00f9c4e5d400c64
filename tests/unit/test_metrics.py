from dataclasses import fields

from shared.metrics import FORMULAS, StepMetrics, mean, ratio


def test_every_emitted_key_has_a_formula():
    assert set(FORMULAS) == {f.name for f in fields(StepMetrics)}
    assert all(len(formula) > 5 for formula in FORMULAS.values())


def test_what_does_not_exist_is_none_and_not_zero():
    assert ratio(0, 0) is None
    assert ratio(0, 4) == 0.0
    assert mean([]) is None


def test_counts_are_reduced_before_they_are_divided():
    clipped, signed = [3, 3, 0], [12, 4, 0]  # 3 of 12 and 3 of 4, and an empty micro-batch
    assert ratio(sum(clipped), sum(signed)) == 0.375
