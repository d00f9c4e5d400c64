"""The rows of the ledger, as it works on them and as they are stored. No behavior."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shared.records import GroupId, StepPlan


class GroupState(StrEnum):
    """Life of one group: generating (or waiting for another worker) > ready > taken > trained; or dropped."""

    GENERATING = "generating"
    WAITING = "waiting"  # its worker was lost: the next attempt goes to whoever asks
    READY = "ready"
    TAKEN = "taken"
    TRAINED = "trained"
    DROPPED = "dropped"


PENDING = (GroupState.GENERATING, GroupState.WAITING, GroupState.READY, GroupState.TAKEN)


@dataclass(frozen=True)
class LedgerRules:
    """Numbers of the run that the invariants are made of. `max_attempts`: issues of one group before it is dropped."""

    prompts_per_step: int
    max_staleness: int
    steps: int
    max_attempts: int = 3


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One issued group. `worker_id` had it last; `issued_at_s` is when (Unix seconds); `reason` if dropped.

    `oldest_version`: policy version of the group's oldest token, once it was handed in; None without any token.
    """

    group: GroupId
    state: GroupState
    attempt: int
    worker_id: str
    issued_at_s: float
    reason: str = ""
    detail: str = ""
    oldest_version: int | None = None


@dataclass(frozen=True, slots=True)
class StepRow:
    """One begun step; committed once it has a weights digest. `incarnation` of the weights after it: as in Manifest."""

    plan: StepPlan
    weights_digest: str | None = None
    published: bool = False
    incarnation: int = 0


@dataclass(frozen=True)
class Balance:
    """issued = trained + sum(dropped.values()) + pending. `unsettled`: pending, or trained and not yet published."""

    issued: int
    trained: int
    dropped: Mapping[str, int]
    pending: int
    unsettled: int
