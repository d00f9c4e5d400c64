"""Which group is where: a pure state machine without clock, files or Ray. Times are passed in.

Groups are numbered in issue order and step k trains exactly the groups [kP, (k+1)P), P = prompts_per_step, at policy
version k. Invariants, all checked by `check`:

- issued = trained + dropped(reason) + pending, and nothing is trained twice;
- group n starts only on a worker whose active version is at least n // P - max_staleness, so no trained token is older
  than max_staleness versions;
- issued and not settled (dropped, or trained in a published step) never exceeds (max_staleness + 1) * P.
  Example: P = 64, max_staleness = 2, version 100 published: numbers 6400 to 6591 may be open, 192 of them;
- a dropped group's number goes to a replacement before any new number is issued, so every step fills up;
- numbers end at steps * P: a finished run has nothing pending.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Literal, Self

from shared.errors import HubError, RunFailed
from shared.ledger_rows import PENDING, Balance, GroupRow, GroupState, LedgerRules, StepRow
from shared.records import GroupId, StepPlan, Ticket

MAX_REPLACEMENTS = 100


Verdict = Literal["accepted", "repeated", "late"]


class Ledger:
    """Every change is a method call; `row` and `step_row` give what to store after it."""

    def __init__(self, rules: LedgerRules) -> None:
        self.rules = rules
        self.version = 0  # the learner's current one: committed steps
        self.published_version = 0
        self._rows: dict[GroupId, GroupRow] = {}
        self._last_replacement: dict[int, int] = {}  # of every issued number
        self._open: list[GroupId] = []  # heap of groups to issue before any new number
        self._counts: Counter[GroupState] = Counter()
        self._generating: set[GroupId] = set()  # never more than the capacity, however long the run
        self._steps: dict[int, StepRow] = {}

    # ---- what may be asked

    @property
    def capacity(self) -> int:
        """Most groups that may be issued and not settled."""
        return (self.rules.max_staleness + 1) * self.rules.prompts_per_step

    @property
    def finished(self) -> bool:
        """Every step is trained and published."""
        return self.published_version == self.rules.steps

    def row(self, group: GroupId) -> GroupRow:
        """HubError when the group was never issued."""
        if group not in self._rows:
            raise HubError(f"group {group} was never issued; use the tickets that next_work returns")
        return self._rows[group]

    def step_row(self, step: int) -> StepRow:
        """HubError when the step was never begun."""
        if step not in self._steps:
            raise HubError(f"step {step} was not begun; call begin_step first")
        return self._steps[step]

    def step_groups(self, step: int) -> dict[int, GroupRow | None]:
        """The current holder of each of the step's numbers; None: not issued yet, or dropped and not yet replaced."""
        first = step * self.rules.prompts_per_step
        return {number: self._holder(number) for number in range(first, first + self.rules.prompts_per_step)}

    @property
    def incarnation(self) -> int:
        """That of the current version's weights."""
        return max((row.incarnation for row in self._steps.values()), default=0)

    def begun_plan(self) -> StepPlan | None:
        """The plan of the next step, if it was begun and not committed."""
        row = self._steps.get(self.version)
        return row.plan if row else None

    def staleness(self) -> dict[int, int]:
        """Trained groups by the staleness of their oldest token, in versions."""
        trained = (row for row in self._rows.values() if row.state is GroupState.TRAINED)
        ages = (
            row.group.number // self.rules.prompts_per_step - row.oldest_version
            for row in trained
            if row.oldest_version is not None
        )
        return dict(sorted(Counter(ages).items()))

    def num_held(self) -> dict[str, int]:
        """Groups being generated, by worker."""
        return dict(Counter(self._rows[group].worker_id for group in self._generating))

    def num_startable(self, active_version: int) -> int:
        """Groups that may start now on workers with this active version."""
        per_step = self.rules.prompts_per_step
        end = min(self.rules.steps, active_version + self.rules.max_staleness + 1) * per_step
        new = min(end - len(self._last_replacement), self.capacity - self._num_unsettled())
        return max(0, new) + sum(group.number < end for group in self._open)

    def oldest_version_allowed(self, group: GroupId) -> int:
        """Oldest policy version a token of this group may have, so that the bound holds when the group is trained."""
        return max(0, group.number // self.rules.prompts_per_step - self.rules.max_staleness)

    def balance(self) -> Balance:
        """Where all issued groups are, counted from the rows."""
        rows = self._rows.values()
        dropped = Counter(row.reason for row in rows if row.state is GroupState.DROPPED)
        trained = sum(row.state is GroupState.TRAINED for row in rows)
        pending = sum(row.state in PENDING for row in rows)
        return Balance(len(self._rows), trained, dict(dropped), pending, self._num_unsettled())

    # ---- workers

    def issue(self, worker_id: str, active_version: int, max_groups: int, now_s: float) -> tuple[Ticket, ...]:
        """Up to `max_groups` groups that may start on a worker with this active version, lowest number first.

        HubError when the worker claims a version that was never published.
        """
        if active_version > self.published_version:
            raise HubError(
                f"worker {worker_id!r} says active_version = {active_version}, but the newest published version is "
                f"{self.published_version}; workers activate published versions only"
            )
        tickets: list[Ticket] = []
        while len(tickets) < max_groups and (group := self._next_group(active_version)) is not None:
            earlier = self._rows.get(group)
            attempt = earlier.attempt + 1 if earlier else 0
            self._leave_queue(group)
            self._set(GroupRow(group, GroupState.GENERATING, attempt, worker_id, now_s))
            tickets.append(Ticket(group, attempt))
        return tuple(tickets)

    def submit(self, worker_id: str, ticket: Ticket, oldest_version: int | None = None) -> Verdict:
        """A finished group: "accepted", "repeated" (this very attempt was accepted before) or "late" (refused).

        HubError when the ticket was never issued, or to another worker.
        """
        row = self._checked(worker_id, ticket)
        if row.attempt != ticket.attempt or row.state in (GroupState.WAITING, GroupState.DROPPED):
            return "late"
        if row.state is not GroupState.GENERATING:
            return "repeated"
        self._set(replace(row, state=GroupState.READY, oldest_version=oldest_version))
        return "accepted"

    def give_up(self, worker_id: str, ticket: Ticket, reason: str, detail: str = "") -> bool:
        """Drop the group; its number goes to a replacement. False when this attempt no longer holds the group.

        HubError as in `submit` or without a reason; RunFailed when the number was replaced `MAX_REPLACEMENTS` times.
        """
        row = self._checked(worker_id, ticket)
        if row.attempt != ticket.attempt or row.state is not GroupState.GENERATING:
            return False
        self._drop(row, reason, detail)
        return True

    def worker_lost(self, worker_id: str, holds: Collection[Ticket] = ()) -> list[GroupRow]:
        """What this worker was generating, save what it `holds`, is to be issued again; returns the rows it changed.

        After `max_attempts` a group is dropped. With `holds`: an answer that never reached a living worker, because the
        hub or the connection was lost with it, is taken back. RunFailed as in `give_up`.
        """
        rows = (self._rows[group] for group in sorted(self._generating))
        held = [r for r in rows if r.worker_id == worker_id and Ticket(r.group, r.attempt) not in holds]
        for row in held:
            if row.attempt + 1 >= self.rules.max_attempts:
                self._drop(row, "worker_lost", f"{row.attempt + 1} workers were lost with it")
            else:
                self._set(replace(row, state=GroupState.WAITING))
                heapq.heappush(self._open, row.group)
        return [self._rows[row.group] for row in held]

    # ---- the learner

    def take(self, step: int) -> list[GroupId] | None:
        """The step's groups in order once all are ready, else None. May be repeated until the step is committed."""
        self._require_current("take", step)
        rows = list(self.step_groups(step).values())
        taken = [row for row in rows if row and row.state in (GroupState.READY, GroupState.TAKEN)]
        if len(taken) < len(rows):
            return None
        for row in taken:
            self._set(replace(row, state=GroupState.TAKEN))
        return [row.group for row in taken]

    def begin_step(self, plan: StepPlan) -> None:
        """The step's taken groups will be trained by this plan. HubError for other groups, order or a second plan."""
        self._require_current("begin_step", plan.step)
        begun = self._steps.get(plan.step)
        if begun and begun.plan != plan:
            raise HubError(f"step {plan.step} was begun as {begun.plan}; it cannot be begun again as {plan}")
        rows = self.step_groups(plan.step).values()
        expected = tuple(row.group for row in rows if row and row.state in (GroupState.READY, GroupState.TAKEN))
        if plan.groups != expected or len(expected) != self.rules.prompts_per_step:
            raise HubError(
                f"step {plan.step} must train the groups that were taken for it, in order: "
                f"{_names(expected)}; the plan has {_names(plan.groups)}"
            )
        for group in expected:  # ready, not taken, when the hub was restarted in between: taking is not stored
            self._set(replace(self.row(group), state=GroupState.TAKEN))
        self._steps[plan.step] = StepRow(plan)

    def commit_step(self, step: int, weights_digest: str) -> None:
        """The step's groups are trained and the version moves to step + 1. The same commit again changes nothing.

        HubError unless the step was begun.
        """
        if step == self.version - 1 and self.step_row(step).weights_digest == weights_digest:
            return
        self._require_current("commit_step", step)
        row = self.step_row(step)
        for group in row.plan.groups:
            self._set(replace(self.row(group), state=GroupState.TRAINED))
        self._steps[step] = replace(row, weights_digest=weights_digest, incarnation=self.incarnation)
        self.version = step + 1

    def replace_weights(self, weights_digest: str) -> StepRow:
        """A learner that recovered holds other weights for the current version: a new incarnation begins.

        The same weights again change nothing. HubError before the first step: everybody starts from the same files.
        """
        row = self.step_row(self.version - 1)
        if row.weights_digest == weights_digest:
            return row
        self._steps[self.version - 1] = replace(row, weights_digest=weights_digest, incarnation=self.incarnation + 1)
        return self._steps[self.version - 1]

    def publish(self, version: int) -> list[StepRow]:
        """Workers may now activate `version`; groups of earlier steps are settled. Returns the steps this settled.

        HubError unless `version` is the learner's current one.
        """
        if version != self.version:
            raise HubError(f"publish of version {version}, but the learner's current version is {self.version}")
        settled = range(self.published_version, version)
        for step in settled:
            self._steps[step] = replace(self._steps[step], published=True)
        self.published_version = version
        return [self._steps[step] for step in settled]

    # ---- recovery and proof

    @classmethod
    def from_rows(cls, rules: LedgerRules, groups: Iterable[GroupRow], steps: Iterable[StepRow]) -> Self:
        """The ledger these rows were stored from. HubError when they break an invariant or the rules.

        A group that was taken for a step that had not begun is ready again.
        """
        ledger = cls(rules)
        ledger._steps = {row.plan.step: row for row in sorted(steps, key=lambda row: row.plan.step)}
        ledger.version = sum(row.weights_digest is not None for row in ledger._steps.values())
        ledger.published_version = sum(row.published for row in ledger._steps.values())
        begun = {group for row in ledger._steps.values() for group in row.plan.groups}
        for row in sorted(groups, key=lambda row: row.group):
            lapsed = row.state is GroupState.TAKEN and row.group not in begun
            ledger._set(replace(row, state=GroupState.READY) if lapsed else row)
        for number, replacement in ledger._last_replacement.items():
            last = ledger._rows[GroupId(number, replacement)]
            if last.state is GroupState.WAITING:
                heapq.heappush(ledger._open, last.group)
            elif last.state is GroupState.DROPPED:
                heapq.heappush(ledger._open, GroupId(number, replacement + 1))
        ledger.check()
        return ledger

    def check(self) -> None:
        """HubError naming the invariants that do not hold. Linear in the groups of the run."""
        per_step, balance = self.rules.prompts_per_step, self.balance()
        states = Counter(row.state for row in self._rows.values())
        alive = Counter(group.number for group, row in self._rows.items() if row.state is not GroupState.DROPPED)
        trained = sorted(group.number for group, row in self._rows.items() if row.state is GroupState.TRAINED)
        plans = [row.plan for row in self._steps.values()]
        in_order = [[group.number for group in plan.groups] for plan in plans]
        facts = {
            "issued = trained + dropped + pending": balance.issued
            == balance.trained + sum(balance.dropped.values()) + balance.pending,
            "counts follow the rows": states == +self._counts,
            "unsettled <= (max_staleness + 1) * prompts_per_step": balance.unsettled <= self.capacity,
            "one holder per number": max(alive.values(), default=1) == 1,
            "replacements are issued one after the other": len(self._rows)
            == sum(last + 1 for last in self._last_replacement.values()),
            "numbers are issued in order": set(self._last_replacement) == set(range(len(self._last_replacement))),
            "numbers end at steps * prompts_per_step": len(self._last_replacement) <= self.rules.steps * per_step,
            "committed steps trained their groups, once": trained == list(range(self.version * per_step)),
            "steps are begun in order": [plan.step for plan in plans] == list(range(len(plans))),
            "step k trains the numbers from k * prompts_per_step": in_order
            == [list(range(plan.step * per_step, (plan.step + 1) * per_step)) for plan in plans],
            "at most one step is begun and not committed": len(plans) in (self.version, self.version + 1),
            "published <= committed": self.published_version <= self.version,
        }
        broken = [name for name, holds in facts.items() if not holds]
        if broken:
            raise HubError(f"the ledger breaks {broken}: {balance}, version {self.version}, {self.rules}")

    # ---- inside

    def _next_group(self, active_version: int) -> GroupId | None:
        """The lowest group to issue, if it may start at this version."""
        group = self._open[0] if self._open else GroupId(len(self._last_replacement))
        exists = group.number < self.rules.steps * self.rules.prompts_per_step
        fresh_enough = 0 <= self.oldest_version_allowed(group) <= active_version
        has_room = group in self._rows or self._num_unsettled() < self.capacity
        return group if exists and fresh_enough and has_room else None

    def _leave_queue(self, group: GroupId) -> None:
        if self._open and self._open[0] == group:
            heapq.heappop(self._open)

    def _num_unsettled(self) -> int:
        pending = sum(self._counts[state] for state in PENDING)
        return pending + self._counts[GroupState.TRAINED] - self.published_version * self.rules.prompts_per_step

    def _holder(self, number: int) -> GroupRow | None:
        if number not in self._last_replacement:
            return None
        row = self._rows[GroupId(number, self._last_replacement[number])]
        return None if row.state is GroupState.DROPPED else row

    def _checked(self, worker_id: str, ticket: Ticket) -> GroupRow:
        row = self.row(ticket.group)
        if ticket.attempt > row.attempt:
            raise HubError(
                f"attempt {ticket.attempt} of group {ticket.group} was never issued; the last is {row.attempt}"
            )
        if ticket.attempt == row.attempt and worker_id != row.worker_id:
            raise HubError(
                f"worker {worker_id!r} does not hold attempt {ticket.attempt} of group {ticket.group}: "
                f"it was issued to {row.worker_id!r}"
            )
        return row

    def _drop(self, row: GroupRow, reason: str, detail: str) -> None:
        if not reason:
            raise HubError(f"group {row.group} cannot be dropped without a reason")
        if row.group.replacement >= MAX_REPLACEMENTS:
            raise RunFailed(
                f"group number {row.group.number} was replaced {MAX_REPLACEMENTS} times, last dropped for {reason!r} "
                f"({detail}); something is wrong with every prompt or with the engine"
            )
        self._set(replace(row, state=GroupState.DROPPED, reason=reason, detail=detail))
        heapq.heappush(self._open, GroupId(row.group.number, row.group.replacement + 1))

    def _require_current(self, call: str, step: int) -> None:
        if step != self.version or step >= self.rules.steps:
            raise HubError(
                f"{call} of step {step}, but the next step is {self.version} of {self.rules.steps}; "
                f"steps are taken, begun and committed one after the other"
            )

    def _set(self, row: GroupRow) -> None:
        earlier = self._rows.get(row.group)
        if earlier:
            self._counts[earlier.state] -= 1
        self._counts[row.state] += 1
        (self._generating.add if row.state is GroupState.GENERATING else self._generating.discard)(row.group)
        self._rows[row.group] = row
        self._last_replacement[row.group.number] = max(
            row.group.replacement, self._last_replacement.get(row.group.number, 0)
        )


def _names(groups: Iterable[GroupId]) -> str:
    return ", ".join(map(str, groups)) or "none"
