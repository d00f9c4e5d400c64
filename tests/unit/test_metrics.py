from dataclasses import fields

from tiny_models import plan_for, tiny_group

from learner.objectives import ObjectiveMetrics
from learner.report import step_metrics
from learner.step import MiniBatchResult, StepResult
from shared.metrics import FORMULAS, StepMetrics, mean, ratio
from shared.spans import Timing


def test_every_emitted_key_has_a_formula():
    assert set(FORMULAS) == {f.name for f in fields(StepMetrics)}
    assert all(len(formula) > 5 for formula in FORMULAS.values())


def test_what_does_not_exist_is_none_and_not_zero():
    assert ratio(0, 0) is None
    assert ratio(0, 4) == 0.0
    assert mean([]) is None


def test_counts_are_reduced_before_they_are_divided():
    """3 of 12 and 3 of 4 are 0.375, not 0.5; a mini-batch without such sequences changes nothing."""
    parts = [
        ObjectiveMetrics(num_positive=12, num_clipped_positive=3, num_tokens=50),
        ObjectiveMetrics(num_positive=4, num_clipped_positive=3, num_tokens=20),
        ObjectiveMetrics(num_zero=5, num_tokens=9),
    ]
    minibatches = tuple(MiniBatchResult(part, 0.0, "no_signal") for part in parts)
    result = StepResult(minibatches, (), 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    groups = [tiny_group(0, [1.0, 0.0])]
    timings = dict.fromkeys(("stepped", "waited", "trained", "published"), Timing(0.0, 2.0))
    metrics = step_metrics(plan_for(groups), groups, result, unmet_experts=None, **timings)
    assert metrics.clip_fraction_positive == 0.375
    assert metrics.clip_fraction_negative is None
    assert metrics.clip_fraction_by_minibatch == [0.25, 0.75, None]
    assert metrics.clip_fraction_positive_by_minibatch == [0.25, 0.75, None]
    assert result.drift_clip_fraction == 0.75
    assert metrics.learner_tokens_per_s == 79 / 2
