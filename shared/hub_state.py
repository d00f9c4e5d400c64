"""What the hub knows besides the ledger and does not store: the current publication, the newest verdicts on weights,
who evaluates what, how fast the run goes. Pure.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shared.errors import HubError
from shared.ledger import Ledger
from shared.records import ProbeReport, Publication

RATE_WINDOW_S = 60.0
NUM_PROBED_VERSIONS = 32


@dataclass(frozen=True)
class WorkerStatus:
    """A worker as the hub last saw it, `age_s` seconds ago; it joined `joined_s` seconds ago."""

    active_version: int
    age_s: float
    joined_s: float = 0.0
    num_groups: int = 0


@dataclass(frozen=True)
class HubStatus:
    """The run at one instant; issued = trained + sum(dropped.values()) + pending.

    `version` is the learner's current policy version, `published_version` the newest that workers may activate.
    `staleness`: trained groups by the staleness of their oldest token, in versions. `learner_age_s`: seconds since the
    learner was heard of, None without one. Rates count the last minute. `waiting_for`: what keeps the next step from
    starting.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    pending: int
    version: int
    published_version: int
    incarnation: int
    steps: int
    staleness: dict[int, int]
    finished: bool
    workers: dict[str, WorkerStatus] = field(default_factory=dict)
    failure: str | None = None
    stopping: bool = False
    learner: str | None = None
    learner_age_s: float | None = None
    groups_per_min: float = 0.0
    steps_per_min: float = 0.0
    waiting_for: str = ""


def ledger_status(ledger: Ledger, finished: bool) -> HubStatus:
    """What the ledger alone says: nobody is there, nothing moves."""
    balance = ledger.balance()
    return HubStatus(
        issued=balance.issued,
        trained=balance.trained,
        dropped=dict(balance.dropped),
        pending=balance.pending,
        version=ledger.version,
        published_version=ledger.published_version,
        incarnation=ledger.incarnation,
        steps=ledger.rules.steps,
        staleness=ledger.staleness(),
        finished=finished,
    )


@dataclass(frozen=True)
class LearnerOrders:
    """The hub's answer to a learner's sign of life.

    `stop`: finish the step, write a checkpoint, end. `republish`: the hub lost the current publication; send it again.
    """

    stop: bool = False
    failure: str | None = None
    republish: bool = False


class Rate:
    """Events in the last minute (or since the start, if that is less), per minute. Times are monotonic seconds."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._times_s: deque[float] = deque()

    def count(self, now_s: float) -> None:
        self._times_s.append(now_s)
        self._forget(now_s)

    def per_min(self, now_s: float) -> float:
        self._forget(now_s)
        window_s = min(RATE_WINDOW_S, now_s - self._start_s)
        return len(self._times_s) * 60.0 / window_s if window_s > 0 else 0.0

    def _forget(self, now_s: float) -> None:
        while self._times_s and now_s - self._times_s[0] > RATE_WINDOW_S:
            self._times_s.popleft()


@dataclass(frozen=True)
class Taken:
    """Answer to one long poll for a step's groups: their bytes in order, or None and what is still missing."""

    groups: list[bytes] | None
    waiting_for: str = ""


class CurrentPublication:
    """The newest publication with the buckets of its weights, also when it moved the version only.

    A worker that joins late needs buckets that the others hold already. Object references of older weights are let go.
    """

    def __init__(self) -> None:
        self._current: Publication | None = None

    @property
    def is_lost(self) -> bool:
        return self._current is None

    def newer(self, than: int, incarnation: int) -> Publication | None:
        current = self._current
        if current is None:
            return None
        manifest = current.manifest
        return current if (manifest.version, manifest.incarnation) > (than, incarnation) else None

    def forget(self) -> None:
        """Its buckets are gone, together with the learner that held them."""
        self._current = None

    def complete(self, publication: Publication) -> Publication:
        """The publication with tensors and buckets filled in from the current one if it moves the version only.

        HubError when it brings no buckets for new weights, or another number of buckets than its manifest names.
        """
        manifest, current = publication.manifest, self._current
        if publication.buckets:
            named = {tensor.bucket for tensor in manifest.tensors}
            if named != set(range(len(publication.buckets))):
                raise HubError(
                    f"publication of version {manifest.version} has {len(publication.buckets)} buckets, "
                    f"its manifest names {sorted(named)}"
                )
            return publication
        held = current.manifest.weights_version if current else 0  # every worker starts from version 0's files
        if manifest.weights_version != held:
            raise HubError(
                f"publication of version {manifest.version} has no buckets, but its weights_version is "
                f"{manifest.weights_version} and the hub holds {held}; publish the buckets of changed weights"
            )
        if current is None or not current.buckets:
            return publication
        return Publication(replace(manifest, tensors=current.manifest.tensors), current.buckets)

    def set(self, publication: Publication) -> None:
        self._current = publication


class RecentProbes:
    """The verdicts of all workers on the newest `NUM_PROBED_VERSIONS` versions that were probed."""

    def __init__(self) -> None:
        self._reports: dict[int, list[ProbeReport]] = {}

    def add(self, report: ProbeReport) -> None:
        self._reports.setdefault(report.version, []).append(report)
        for version in sorted(self._reports)[:-NUM_PROBED_VERSIONS]:
            del self._reports[version]

    def since(self, version: int) -> list[ProbeReport]:
        """Those of `version` and later ones, by version, then as they arrived."""
        return [report for v in sorted(self._reports) if v >= version for report in self._reports[v]]


class Evaluations:
    """Versions that are to be evaluated, each by one worker while that version is active on it; `done` ones were."""

    def __init__(self, versions: Iterable[int], done: Iterable[int] = ()) -> None:
        self._holder: dict[int, str | None] = dict.fromkeys(versions)
        self._done: set[int] = set(done)

    def hand_out(self, worker_id: str, active_version: int) -> int | None:
        """The worker's active version if that is to be evaluated and nobody does it; then this worker does."""
        if active_version not in self._holder or self.is_done(active_version):
            return None
        if self._holder[active_version] is not None:
            return None
        self._holder[active_version] = worker_id
        return active_version

    def is_done(self, version: int) -> bool:
        """True also for a version that needs no evaluation."""
        return version in self._done or version not in self._holder

    def finish(self, version: int) -> bool:
        """Record the result's arrival; False when there is one already. One that was asked for before counts too."""
        first = version not in self._done
        self._done.add(version)
        return first

    def worker_lost(self, worker_id: str) -> None:
        """Its evaluations go to somebody else."""
        for version, holder in self._holder.items():
            if holder == worker_id:
                self._holder[version] = None
