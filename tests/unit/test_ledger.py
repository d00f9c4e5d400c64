"""The ledger's rules one by one; test_ledger_properties.py drives them at random."""

import re

import pytest

from shared.errors import HubError, RunFailed
from shared.ledger import MAX_REPLACEMENTS, Ledger
from shared.ledger_rows import GroupRow, GroupState, LedgerRules, StepRow
from shared.records import ClipRange, GroupId, StepPlan, Ticket

WORKER = "worker-0"


def make_ledger(prompts_per_step: int = 2, max_staleness: int = 1, steps: int = 4, max_attempts: int = 3) -> Ledger:
    return Ledger(LedgerRules(prompts_per_step, max_staleness, steps, max_attempts))


def issue(ledger: Ledger, active_version: int = 0, max_groups: int = 100, worker: str = WORKER) -> list[Ticket]:
    return list(ledger.issue(worker, active_version, max_groups, now_s=0.0))


def numbers(tickets: list[Ticket]) -> list[int]:
    return [ticket.group.number for ticket in tickets]


def plan_of(step: int, groups: list[GroupId] | None) -> StepPlan:
    return StepPlan(step, tuple(groups or ()), minibatch_seed=0, clip=ClipRange(3e-4, 4e-4))


def train(ledger: Ledger, step: int, publish: bool = True) -> None:
    ledger.begin_step(plan_of(step, ledger.take(step)))
    ledger.commit_step(step, "digest")
    if publish:
        ledger.publish(step + 1)


def submit_all(ledger: Ledger, tickets: list[Ticket], worker: str = WORKER) -> None:
    for ticket in tickets:
        assert ledger.submit(worker, ticket) == "accepted"


def trained_rows(rules: LedgerRules, steps: int) -> tuple[list[GroupRow], list[StepRow]]:
    per_step = rules.prompts_per_step
    groups = [GroupRow(GroupId(n), GroupState.TRAINED, 0, WORKER, 0.0) for n in range(steps * per_step)]
    plans = [plan_of(k, [GroupId(n) for n in range(k * per_step, (k + 1) * per_step)]) for k in range(steps)]
    return groups, [StepRow(plan, "digest", published=True) for plan in plans]


def test_capacity_after_a_resume_counts_open_groups_only() -> None:
    rules = LedgerRules(prompts_per_step=64, max_staleness=2, steps=1000)
    ledger = Ledger.from_rows(rules, *trained_rows(rules, 100))
    assert (ledger.version, ledger.published_version, ledger.capacity) == (100, 100, 192)
    assert numbers(issue(ledger, active_version=100, max_groups=10**6)) == list(range(6400, 6592))
    assert issue(ledger, active_version=100) == []
    assert ledger.balance().unsettled == 192


def test_two_prompts_with_the_same_text_are_two_groups() -> None:
    """The ledger knows numbers, not texts: whatever the prompts are, each ticket is its own group."""
    ledger = make_ledger()
    first, second = issue(ledger, max_groups=2)
    assert first.group != second.group
    submit_all(ledger, [first, second])
    assert ledger.take(0) == [first.group, second.group]


@pytest.mark.parametrize(
    ("max_staleness", "active_version", "published", "expected"),
    [
        (0, 0, 0, [0, 1]),
        (1, 0, 0, [0, 1, 2, 3]),
        (0, 0, 1, []),  # numbers 2 and 3 are trained at version 1: a worker at version 0 is too old
        (0, 1, 1, [2, 3]),
        (1, 0, 1, [2, 3]),
        (1, 1, 1, [2, 3, 4, 5]),
        (1, -1, 0, []),  # a worker without verified weights
    ],
)
def test_a_group_starts_only_where_it_cannot_become_too_old(
    max_staleness: int, active_version: int, published: int, expected: list[int]
) -> None:
    ledger = make_ledger(max_staleness=max_staleness)
    for step in range(published):
        submit_all(ledger, issue(ledger, active_version=step, max_groups=2))
        train(ledger, step)
    assert numbers(issue(ledger, active_version)) == expected


def test_a_committed_step_frees_no_room_before_it_is_published() -> None:
    ledger = make_ledger(max_staleness=0)
    submit_all(ledger, issue(ledger))
    train(ledger, 0, publish=False)
    assert issue(ledger) == []
    with pytest.raises(HubError, match="active_version = 1, but the newest published version is 0"):
        issue(ledger, active_version=1)
    ledger.publish(1)
    assert numbers(issue(ledger, active_version=1)) == [2, 3]


def test_a_step_waits_for_all_its_groups_and_takes_them_in_order() -> None:
    ledger = make_ledger()
    tickets = issue(ledger)
    submit_all(ledger, [tickets[3], tickets[2], tickets[1]])
    assert ledger.take(0) is None
    assert [row and row.state for row in ledger.step_groups(0).values()] == ["generating", "ready"]
    submit_all(ledger, [tickets[0]])
    assert ledger.take(0) == [GroupId(0), GroupId(1)]
    assert ledger.take(0) == [GroupId(0), GroupId(1)]  # the learner may ask again after a restart


def test_a_dropped_number_is_replaced_before_new_ones_are_issued() -> None:
    ledger = make_ledger()
    zero, one = issue(ledger, max_groups=2)
    assert ledger.give_up(WORKER, one, "reward_error", "scores: 3 for 4")
    assert ledger.give_up(WORKER, zero, "reward_error", "scores: 3 for 4")
    assert issue(ledger, max_groups=3) == [Ticket(GroupId(0, 1)), Ticket(GroupId(1, 1)), Ticket(GroupId(2))]
    assert ledger.submit(WORKER, zero) == "late"
    assert not ledger.give_up(WORKER, zero, "reward_error")
    balance = ledger.balance()
    assert (balance.issued, balance.pending, balance.dropped) == (5, 3, {"reward_error": 2})


def test_a_number_that_fails_every_time_ends_the_run() -> None:
    ledger = make_ledger()
    for _ in range(MAX_REPLACEMENTS):
        (ticket,) = issue(ledger, max_groups=1)
        ledger.give_up(WORKER, ticket, "untrusted_logprobs")
    (ticket,) = issue(ledger, max_groups=1)
    with pytest.raises(RunFailed, match="group number 0 was replaced 100 times, last dropped for 'untrusted_logprobs'"):
        ledger.give_up(WORKER, ticket, "untrusted_logprobs")
    ledger.check()


def test_a_lost_workers_groups_go_to_the_next_one_and_its_late_results_are_refused() -> None:
    ledger = make_ledger()
    old = issue(ledger, max_groups=2, worker="lost")
    other = issue(ledger, max_groups=1, worker="other")
    assert [row.state for row in ledger.worker_lost("lost")] == ["waiting", "waiting"]
    assert ledger.submit("lost", old[0]) == "late"
    new = issue(ledger, max_groups=2, worker="other")
    assert new == [Ticket(GroupId(0), 1), Ticket(GroupId(1), 1)]
    assert ledger.submit("lost", old[0]) == "late"
    assert not ledger.give_up("lost", old[1], "timeout")
    submit_all(ledger, [*new, *other], worker="other")
    assert ledger.worker_lost("other") == []  # what is ready is safe


def test_a_group_that_loses_every_worker_is_dropped() -> None:
    ledger = make_ledger(max_attempts=2)
    for attempt in range(2):
        assert issue(ledger, max_groups=1, worker=f"w{attempt}") == [Ticket(GroupId(0), attempt)]
        (row,) = ledger.worker_lost(f"w{attempt}")
    assert (row.state, row.reason) == ("dropped", "worker_lost")
    assert issue(ledger, max_groups=1) == [Ticket(GroupId(0, 1))]


def test_the_same_result_twice_is_acknowledged_and_counted_once() -> None:
    ledger = make_ledger()
    tickets = issue(ledger)
    submit_all(ledger, tickets)
    assert ledger.submit(WORKER, tickets[0]) == "repeated"
    train(ledger, 0)
    assert ledger.submit(WORKER, tickets[0]) == "repeated"
    assert ledger.balance().trained == 2


def test_calls_that_break_the_protocol_are_named() -> None:
    ledger = make_ledger()
    (ticket,) = issue(ledger, max_groups=1)
    with pytest.raises(HubError, match=r"group 9\.0 was never issued"):
        ledger.submit(WORKER, Ticket(GroupId(9)))
    with pytest.raises(HubError, match=r"attempt 1 of group 0\.0 was never issued"):
        ledger.submit(WORKER, Ticket(GroupId(0), 1))
    with pytest.raises(HubError, match="worker 'thief' does not hold attempt 0.*issued to 'worker-0'"):
        ledger.submit("thief", ticket)
    with pytest.raises(HubError, match="worker 'thief' does not hold"):
        ledger.give_up("thief", ticket, "spite")
    with pytest.raises(HubError, match="without a reason"):
        ledger.give_up(WORKER, ticket, "")
    with pytest.raises(HubError, match="take of step 1, but the next step is 0 of 4"):
        ledger.take(1)
    with pytest.raises(HubError, match="step 0 was not begun"):
        ledger.commit_step(0, "digest")
    with pytest.raises(HubError, match="publish of version 1, but the learner's current version is 0"):
        ledger.publish(1)


def test_a_step_trains_exactly_what_was_taken_for_it() -> None:
    ledger = make_ledger()
    submit_all(ledger, [*issue(ledger, max_groups=1)])
    with pytest.raises(HubError, match="must train the groups that were taken for it, in order: 0.0; the plan has"):
        ledger.begin_step(plan_of(0, [GroupId(0)]))  # 1.0 is missing
    submit_all(ledger, issue(ledger))
    taken = ledger.take(0)
    assert taken is not None
    for wrong in ([GroupId(1), GroupId(0)], [GroupId(0)], [GroupId(0), GroupId(2)], [GroupId(0), GroupId(0)]):
        with pytest.raises(HubError, match="must train the groups that were taken"):
            ledger.begin_step(plan_of(0, wrong))
    plan = plan_of(0, taken)
    ledger.begin_step(plan)
    ledger.begin_step(plan)  # after a restart of the learner: the same plan again
    with pytest.raises(HubError, match="cannot be begun again"):
        ledger.begin_step(StepPlan(0, plan.groups, minibatch_seed=1, clip=ClipRange(3e-4, 4e-4)))
    ledger.commit_step(0, "digest")
    ledger.commit_step(0, "digest")  # its acknowledgment was lost
    with pytest.raises(HubError, match="commit_step of step 0, but the next step is 1"):
        ledger.commit_step(0, "another digest")
    assert (ledger.version, ledger.published_version) == (1, 0)


def test_numbers_end_with_the_last_step() -> None:
    ledger = make_ledger(steps=2, max_staleness=5)
    submit_all(ledger, tickets := issue(ledger))
    assert numbers(tickets) == [0, 1, 2, 3]
    train(ledger, 0)
    assert not ledger.finished
    train(ledger, 1)
    assert ledger.finished
    assert ledger.balance().pending == 0
    with pytest.raises(HubError, match="next step is 2 of 2"):
        ledger.take(2)


def test_a_restart_keeps_what_is_lost_dropped_or_taken() -> None:
    ledger = make_ledger(max_staleness=2)
    submit_all(ledger, first := issue(ledger, max_groups=2))
    assert ledger.take(0) is not None
    dropped, *_ = issue(ledger, max_groups=1)
    ledger.give_up(WORKER, dropped, "reward_error")
    issue(ledger, max_groups=1)
    lost = issue(ledger, max_groups=1, worker="lost")
    ledger.worker_lost("lost")
    rows = [ledger.row(ticket.group) for ticket in (*first, dropped, *lost)]
    rows.append(ledger.row(GroupId(2, 1)))

    back = Ledger.from_rows(ledger.rules, rows, [])
    assert back.balance() == ledger.balance()
    assert [row and row.state for row in back.step_groups(0).values()] == ["ready", "ready"]
    back.worker_lost(WORKER)
    assert issue(back) == [Ticket(GroupId(2, 1), 1), Ticket(GroupId(3), 1), Ticket(GroupId(4)), Ticket(GroupId(5))]
    train(back, 0)


def corrupt_rows() -> dict[str, tuple[list[GroupRow], list[StepRow]]]:
    rules = LedgerRules(2, 1, 4)
    groups, steps = trained_rows(rules, 1)
    ready = GroupRow(GroupId(2), GroupState.READY, 0, WORKER, 0.0)
    return {
        "committed steps trained": (groups[:1], steps),
        "numbers are issued in order": ([*groups, GroupRow(GroupId(5), GroupState.READY, 0, WORKER, 0.0)], steps),
        "replacements are issued": ([*groups, GroupRow(GroupId(2, 3), GroupState.READY, 0, WORKER, 0.0)], steps),
        "one holder per number": ([*groups, ready, GroupRow(GroupId(2, 1), GroupState.READY, 0, WORKER, 0.0)], steps),
        "steps are begun in order": (groups, [StepRow(plan_of(1, [GroupId(2), GroupId(3)]))]),
        "step k trains": (groups, [StepRow(plan_of(0, [GroupId(0), GroupId(7)]), "digest", published=True)]),
        "unsettled": ([GroupRow(GroupId(n), GroupState.READY, 0, WORKER, 0.0) for n in range(5)], []),
        "numbers end": ([GroupRow(GroupId(n), GroupState.DROPPED, 0, WORKER, 0.0, "x") for n in range(9)], []),
        "published <= committed": ([ready], [StepRow(plan_of(0, [GroupId(0), GroupId(1)]), None, published=True)]),
    }


@pytest.mark.parametrize("broken", corrupt_rows())
def test_rows_that_break_an_invariant_are_refused(broken: str) -> None:
    groups, steps = corrupt_rows()[broken]
    with pytest.raises(HubError, match=rf"the ledger breaks.*{re.escape(broken)}"):
        Ledger.from_rows(LedgerRules(2, 1, 4), groups, steps)
