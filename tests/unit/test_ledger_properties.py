"""The ledger under random workers, delays, drops, losses, lost answers, repeated calls and restarts.

Its invariants hold after every event.
"""

from collections.abc import Callable
from random import Random
from typing import TypeVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.ledger import Ledger
from shared.ledger_rows import LedgerRules
from shared.records import ClipRange, GroupId, StepPlan, Ticket

RULES = LedgerRules(prompts_per_step=3, max_staleness=1, steps=4, max_attempts=2)
WORKERS = st.sampled_from(["w0", "w1", "w2"])
T = TypeVar("T")


class Simulation:
    """A ledger with workers and a learner around it, and an independent record of what was trained at what age."""

    def __init__(self, rules: LedgerRules) -> None:
        self.rules = rules
        self.ledger = Ledger(rules)
        self.active: dict[str, int] = {}
        self.held: dict[tuple[str, Ticket], int] = {}  # the worker's version when it started
        self.started_at: dict[GroupId, int] = {}  # of the accepted attempt
        self.trained: list[int] = []
        self.begun: StepPlan | None = None
        self.tickets: set[Ticket] = set()

    def ask(self, worker: str, max_groups: int, arrives: bool = True) -> None:
        """As the hub does it: what the worker does not hold is taken back. An answer that is lost is never held."""
        active, holds = self.active.get(worker, 0), self.holds(worker)
        self.ledger.worker_lost(worker, holds)
        assert self.ledger.num_held().get(worker, 0) <= len(holds)
        for ticket in self.ledger.issue(worker, active, max_groups, now_s=0.0):
            assert ticket not in self.tickets, "a ticket is issued once"
            self.tickets.add(ticket)
            if arrives:
                self.held[worker, ticket] = active

    def holds(self, worker: str) -> list[Ticket]:
        return [ticket for name, ticket in self.held if name == worker]

    def submit(self, worker: str, ticket: Ticket) -> None:
        version = self.held.pop((worker, ticket))
        verdict = self.ledger.submit(worker, ticket)
        if verdict == "accepted":
            self.started_at[ticket.group] = version
        again = self.unchanged_by(lambda: self.ledger.submit(worker, ticket))
        assert again == ("repeated" if verdict == "accepted" else verdict)

    def give_up(self, worker: str, ticket: Ticket) -> None:
        self.held.pop((worker, ticket))
        self.ledger.give_up(worker, ticket, "test")
        assert self.unchanged_by(lambda: self.ledger.give_up(worker, ticket, "test")) is False

    def begin(self) -> bool:
        step = self.ledger.version
        groups = self.ledger.take(step) if step < self.rules.steps else None
        if groups is None:
            return False
        plan = StepPlan(step, tuple(groups), 0, ClipRange(3e-4, 4e-4))
        self.ledger.begin_step(plan)
        self.unchanged_by(lambda: self.ledger.begin_step(plan))
        self.begun = plan
        return True

    def commit(self) -> None:
        plan, self.begun = self.ledger.begun_plan(), None
        assert plan is not None
        self.ledger.commit_step(plan.step, "digest")
        self.unchanged_by(lambda: self.ledger.commit_step(plan.step, "digest"))
        for group in plan.groups:
            assert plan.step - self.started_at[group] <= self.rules.max_staleness, "the staleness bound"
        self.trained += [group.number for group in plan.groups]

    def publish(self) -> None:
        self.ledger.publish(self.ledger.version)
        assert self.unchanged_by(lambda: self.ledger.publish(self.ledger.version)) == []

    def replace_weights(self, digest: str) -> None:
        before = self.ledger.incarnation
        changed = self.ledger.step_row(self.ledger.version - 1).weights_digest != digest
        self.ledger.replace_weights(digest)
        self.unchanged_by(lambda: self.ledger.replace_weights(digest))
        assert self.ledger.incarnation == before + changed

    def unchanged_by(self, call: Callable[[], T]) -> T:
        """The answer of a call that is made again."""
        before = (dict(self.ledger._rows), dict(self.ledger._steps), sorted(self.ledger._open))
        answer = call()
        assert before == (self.ledger._rows, self.ledger._steps, sorted(self.ledger._open))
        return answer

    def restart(self) -> None:
        """The hub dies and comes back from its rows."""
        ledger = self.ledger
        groups = [ledger.row(group) for group in {ticket.group for ticket in self.tickets}]
        begun = range(ledger.version + (self.begun is not None))
        self.ledger = Ledger.from_rows(self.rules, groups, [ledger.step_row(step) for step in begun])
        assert self.ledger.balance() == ledger.balance()
        assert (self.ledger.version, self.ledger.published_version) == (ledger.version, ledger.published_version)
        assert (self.ledger.begun_plan(), self.ledger.incarnation) == (self.begun, ledger.incarnation)
        assert self.ledger.num_held() == ledger.num_held()

    def check(self) -> None:
        self.ledger.check()
        balance = self.ledger.balance()
        assert balance.issued == balance.trained + sum(balance.dropped.values()) + balance.pending
        assert balance.issued == len({ticket.group for ticket in self.tickets})
        assert balance.unsettled <= (self.rules.max_staleness + 1) * self.rules.prompts_per_step
        assert self.trained == list(range(len(self.trained))), "in order, each number once"


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation(RULES)

    @rule(worker=WORKERS, max_groups=st.integers(1, 4), arrives=st.booleans())
    def ask(self, worker: str, max_groups: int, arrives: bool) -> None:
        self.simulation.ask(worker, max_groups, arrives)

    @precondition(lambda self: self.simulation.held)
    @rule(data=st.data(), keep=st.integers(0, 4))
    def finish(self, data: st.DataObject, keep: int) -> None:
        worker, ticket = data.draw(st.sampled_from(sorted(self.simulation.held, key=str)))
        if keep:
            self.simulation.submit(worker, ticket)
        else:
            self.simulation.give_up(worker, ticket)

    @rule(worker=WORKERS)
    def lose(self, worker: str) -> None:
        """The hub believes the worker is lost; it may still send results of what it held."""
        self.simulation.ledger.worker_lost(worker)

    @rule(worker=WORKERS)
    def follow(self, worker: str) -> None:
        self.simulation.active[worker] = self.simulation.ledger.published_version

    @precondition(lambda self: self.simulation.begun is None)
    @rule()
    def begin(self) -> None:
        assume(self.simulation.begin())

    @precondition(lambda self: self.simulation.begun is not None)
    @rule()
    def commit(self) -> None:
        self.simulation.commit()

    @precondition(lambda self: self.simulation.ledger.version > 0)
    @rule(digest=st.sampled_from(["digest", "other"]))
    def replace_weights(self, digest: str) -> None:
        self.simulation.replace_weights(digest)

    @precondition(lambda self: self.simulation.ledger.published_version < self.simulation.ledger.version)
    @rule()
    def publish(self) -> None:
        self.simulation.publish()

    @rule()
    def restart(self) -> None:
        self.simulation.restart()

    @invariant()
    def invariants_hold(self) -> None:
        self.simulation.check()


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestLedgerMachine = pytest.mark.timeout(120)(LedgerMachine.TestCase)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    prompts_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    num_workers=st.integers(1, 4),
)
def test_every_run_ends_with_every_number_trained_once(
    seed: int, prompts_per_step: int, max_staleness: int, num_workers: int
) -> None:
    random = Random(seed)
    rules = LedgerRules(prompts_per_step, max_staleness, steps=5)
    simulation = Simulation(rules)
    for _ in range(5000):
        if simulation.ledger.finished:
            break
        worker = f"w{random.randrange(num_workers)}"
        mine = [key for key in simulation.held if key[0] == worker]
        event = random.random()
        if event < 0.02:
            simulation.restart()
        elif event < 0.04:
            simulation.ledger.worker_lost(worker)
        elif event < 0.06:
            simulation.ask(worker, random.randint(1, 5), arrives=False)
        elif event < 0.1 and mine:
            simulation.give_up(*random.choice(mine))
        elif event < 0.5 and mine:
            simulation.submit(*random.choice(mine))
        elif event < 0.7:
            simulation.ask(worker, random.randint(1, 5))
        elif event < 0.9:
            simulation.active[worker] = simulation.ledger.published_version
        else:
            if simulation.begin():
                simulation.restart()
                simulation.commit()
            simulation.publish()
        simulation.check()
    assert simulation.ledger.finished
    assert simulation.trained == list(range(5 * prompts_per_step))
    assert simulation.ledger.balance().pending == 0
