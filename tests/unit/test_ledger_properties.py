"""The ledger under random workers, delays, drops, losses and restarts: its invariants hold after every event."""

from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.ledger import Ledger
from shared.ledger_rows import LedgerRules
from shared.records import GroupId, StepPlan, Ticket

RULES = LedgerRules(prompts_per_step=3, max_staleness=1, steps=4, max_attempts=2)
WORKERS = st.sampled_from(["w0", "w1", "w2"])


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

    def ask(self, worker: str, max_groups: int) -> None:
        active = self.active.get(worker, 0)
        for ticket in self.ledger.issue(worker, active, max_groups, now_s=0.0):
            assert ticket not in self.tickets, "a ticket is issued once"
            self.tickets.add(ticket)
            self.held[worker, ticket] = active

    def submit(self, worker: str, ticket: Ticket) -> None:
        version = self.held.pop((worker, ticket))
        if self.ledger.submit(worker, ticket) == "accepted":
            self.started_at[ticket.group] = version

    def give_up(self, worker: str, ticket: Ticket) -> None:
        self.held.pop((worker, ticket))
        self.ledger.give_up(worker, ticket, "test")

    def train(self) -> bool:
        step = self.ledger.version
        groups = self.ledger.take(step) if step < self.rules.steps else None
        if groups is None:
            return False
        plan = StepPlan(step, tuple(groups), 0, 3e-4, 4e-4)
        self.ledger.begin_step(plan)
        self.begun = plan
        self.restart()
        self.ledger.commit_step(step, "digest")
        self.begun = None
        for group in groups:
            assert step - self.started_at[group] <= self.rules.max_staleness, "the staleness bound"
        self.trained += [group.number for group in groups]
        return True

    def restart(self) -> None:
        """The hub dies and comes back from its rows."""
        ledger = self.ledger
        groups = [ledger.row(group) for group in {ticket.group for ticket in self.tickets}]
        begun = range(ledger.version + (self.begun is not None))
        self.ledger = Ledger.from_rows(self.rules, groups, [ledger.step_row(step) for step in begun])
        assert self.ledger.balance() == ledger.balance()
        assert (self.ledger.version, self.ledger.published_version) == (ledger.version, ledger.published_version)

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

    @rule(worker=WORKERS, max_groups=st.integers(1, 4))
    def ask(self, worker: str, max_groups: int) -> None:
        self.simulation.ask(worker, max_groups)

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

    @rule()
    def train(self) -> None:
        assume(self.simulation.train())

    @precondition(lambda self: self.simulation.ledger.published_version < self.simulation.ledger.version)
    @rule()
    def publish(self) -> None:
        self.simulation.ledger.publish(self.simulation.ledger.version)

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
        elif event < 0.05:
            simulation.ledger.worker_lost(worker)
        elif event < 0.1 and mine:
            simulation.give_up(*random.choice(mine))
        elif event < 0.5 and mine:
            simulation.submit(*random.choice(mine))
        elif event < 0.7:
            simulation.ask(worker, random.randint(1, 5))
        elif event < 0.9:
            simulation.active[worker] = simulation.ledger.published_version
        else:
            simulation.train()
            simulation.ledger.publish(simulation.ledger.version)
        simulation.check()
    assert simulation.ledger.finished
    assert simulation.trained == list(range(5 * prompts_per_step))
    assert simulation.ledger.balance().pending == 0
