import pytest

from shared.records import Span
from shared.spans import Recorder, covered_s, overlap_s, union


def span(start_s, end_s):
    return Span("lane", "name", start_s, end_s, 0)


def test_union_merges_what_touches():
    assert union([span(5, 6), span(0, 2), span(1, 3), span(3, 4)]) == [(0, 4), (5, 6)]
    assert covered_s(union([span(0, 2), span(1, 3)])) == 3
    assert union([]) == []


def test_overlap_counts_time_in_both():
    a, b = union([span(0, 4), span(6, 8)]), union([span(3, 7)])
    assert overlap_s(a, b) == overlap_s(b, a) == 2
    assert overlap_s(a, []) == 0


def test_a_span_is_recorded_also_when_its_body_raises():
    ticks = iter([1.0, 3.0])
    recorder = Recorder("learner", clock=lambda: next(ticks))
    with pytest.raises(RuntimeError), recorder.span("train", 4):
        raise RuntimeError
    assert recorder.take() == [Span("learner", "train", 1.0, 3.0, 4)]
    assert recorder.take() == []
