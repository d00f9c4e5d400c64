"""A run's durable account: looked at all the time while the run is disturbed, compared with another's at its end."""

import hashlib
import json
import threading
from dataclasses import asdict, dataclass
from typing import Any

import pandas
from services import POLL_S, Run

from learner.replay import main as replay_main
from shared.errors import SchemaError, SeqrelayError
from shared.ledger import Ledger
from shared.ledger_rows import GroupRow, GroupState, StepRow
from shared.run_files import read_ledger, read_metrics


class Watcher(threading.Thread):
    """Looks at the run's durable account all the time; `faults` are the moments at which it was wrong."""

    def __init__(self, run: Run) -> None:
        super().__init__(daemon=True)
        self._run, self._done = run, threading.Event()
        self.faults: list[str] = []
        self.num_looks = 0
        self._groups: dict[Any, GroupRow] = {}
        self._steps: dict[int, StepRow] = {}
        self._before = (0, 0, 0, 0, 0)

    def run(self) -> None:
        while not self._done.wait(POLL_S):
            try:
                groups, steps = read_ledger(self._run.directory)
            except SchemaError:
                continue
            try:
                self._look(groups, steps)
            except SeqrelayError as error:
                self.faults.append(str(error))

    def finish(self) -> None:
        """Fails the test if anything was wrong at any moment."""
        self._done.set()
        self.join(10)
        assert not self.faults, "\n".join([*self.faults[:5], self._run.story()])
        assert self.num_looks > 10

    def _look(self, groups: list[GroupRow], steps: list[StepRow]) -> None:
        ledger = Ledger.from_rows(self._run.rules, groups, steps)  # checks its invariants
        balance = ledger.balance()
        num_dropped = sum(balance.dropped.values())
        if balance.issued != balance.trained + num_dropped + balance.pending:
            self.faults.append(f"does not balance: {balance}")
        now = (ledger.version, ledger.published_version, balance.trained, num_dropped, balance.issued)
        if any(new < old for new, old in zip(now, self._before, strict=True)):
            self.faults.append(f"(version, published, trained, dropped, issued) went back: {self._before} to {now}")
        for row in groups:
            old = self._groups.get(row.group)
            if old and (old.attempt > row.attempt or (old.state is GroupState.TRAINED and old != row)):
                self.faults.append(f"{old} became {row}")
        for step in steps:
            old_step = self._steps.get(step.plan.step)
            if old_step and (old_step.plan != step.plan or (old_step.weights_digest and not _same(old_step, step))):
                self.faults.append(f"{old_step} became {step}")
        self._groups, self._steps = {r.group: r for r in groups}, {s.plan.step: s for s in steps}
        self._before = now
        self.num_looks += 1


def _same(before: StepRow, after: StepRow) -> bool:
    """Published may come later; other weights for a version never, in float32 on one thread."""
    return before.weights_digest == after.weights_digest and before.published <= after.published


@dataclass(frozen=True)
class Outcome:
    """All that a run computed: what was trained when on which tokens, and the weights it ended with."""

    plans: list[str]
    tokens: dict[tuple[int, int], list[tuple[int, ...]]]
    digests: list[str | None]
    weights: str

    def difference(self, other: "Outcome") -> str:
        """What is the first to differ, in the order of the cause; "" if nothing does."""
        if self.tokens != other.tokens:
            return f"tokens of (step, group) {sorted(k for k in other.tokens if self.tokens.get(k) != other.tokens[k])}"
        for what, mine, its in (("plan", self.plans, other.plans), ("digest", self.digests, other.digests)):
            for step, (one, another) in enumerate(zip(mine, its, strict=True)):
                if one != another:
                    return f"{what} of step {step}: {one}, expected {another}"
        return "" if self.weights == other.weights else "the final weights"


def check_finished(run: Run) -> Outcome:
    """Every group number was trained once, in order, and is in the files once; every step is in the metrics once."""
    ledger, learner = run.ledger(), run.config.learner
    ledger.check()
    balance = ledger.balance()
    numbers = range(learner.steps * learner.prompts_per_step)
    assert (ledger.finished, balance.pending, balance.trained) == (True, 0, len(numbers)), run.story()
    rows = read_trajectories(run)
    assert sorted(rows.groupby("group_number").size().items()) == [
        (number, run.config.sampling.group_size) for number in numbers
    ], run.story()
    assert (rows.step == rows.group_number // learner.prompts_per_step).all()
    assert [row["step"] for row in read_metrics(run.directory)] == list(range(learner.steps)), run.story()
    steps = run.rows()[1]
    final = run.directory / "checkpoints" / "final" / "model.safetensors"
    return Outcome(
        plans=[json.dumps(asdict(step.plan)) for step in steps],
        tokens={
            (row.step, row.group_number): [tuple(ids) for ids in same.completion_ids]
            for (_, same) in rows.groupby("group_number", sort=True)
            for row in [same.iloc[0]]
        },
        digests=[step.weights_digest for step in steps],
        weights=hashlib.sha256(final.read_bytes()).hexdigest(),
    )


def read_trajectories(run: Run) -> pandas.DataFrame:
    files = sorted((run.directory / "trajectories").glob("step-*.parquet"))
    return pandas.concat([pandas.read_parquet(file) for file in files], ignore_index=True)


def replay(run: Run) -> None:
    """`learner.replay` of the run; the test fails unless every digest is equal."""
    assert replay_main(["--run", str(run.directory)]) == 0, run.story()
