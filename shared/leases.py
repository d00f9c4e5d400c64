"""Who is there: workers by lease, and the one seat of the learner. Pure: times are passed in (monotonic seconds).

A worker's lease lasts `lease_s` seconds from when it was last heard of; then the worker is lost. The learner's seat is
taken over by another learner only when its holder left, lapsed likewise, or is known to be dead.
"""

from dataclasses import dataclass, field, replace

from shared.errors import SeatTaken


@dataclass(frozen=True)
class Lease:
    """`floor`: the version that this worker must have reached before it gets work."""

    joined_s: float
    seen_s: float
    active_version: int = -1
    floor: int = 0


class Leases:
    """The workers that are there."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._leases: dict[str, Lease] = {}

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    def items(self) -> list[tuple[str, Lease]]:
        return list(self._leases.items())

    def get(self, worker_id: str) -> Lease | None:
        return self._leases.get(worker_id)

    def join(self, worker_id: str, floor: int, now_s: float) -> None:
        self._leases[worker_id] = Lease(now_s, now_s, floor=floor)

    def seen(self, worker_id: str, now_s: float, active_version: int | None = None) -> Lease:
        """Renew. One that is not known, because the hub was restarted or it was silent too long, is let in again."""
        lease = self._leases.get(worker_id) or Lease(now_s, now_s)
        version = lease.active_version if active_version is None else max(active_version, lease.active_version)
        self._leases[worker_id] = replace(lease, seen_s=now_s, active_version=version)
        return self._leases[worker_id]

    def leave(self, worker_id: str) -> None:
        self._leases.pop(worker_id, None)

    def lapsed(self, now_s: float) -> list[str]:
        """Workers whose lease ran out; they are forgotten."""
        lost = [name for name, lease in self._leases.items() if now_s - lease.seen_s > self._lease_s]
        for name in lost:
            del self._leases[name]
        return lost


@dataclass
class LearnerSeat:
    """At most one learner. `learner_id` is its host, a colon, and what is unique on that host."""

    lease_s: float
    holder: str | None = None
    seen_s: float = field(default=0.0, repr=False)
    is_new: bool = field(default=True, repr=False)  # nobody sat here since the hub started

    def is_taken(self, now_s: float) -> bool:
        return self.holder is not None and now_s - self.seen_s <= self.lease_s

    def take(self, learner_id: str, now_s: float) -> None:
        """Sit down. Who comes from the holder's host holds the run directory's lock, so that the holder is dead.

        SeatTaken while a learner of another host holds the seat.
        """
        other_host = self.holder is not None and self.holder.split(":")[0] != learner_id.split(":")[0]
        if other_host and self.is_taken(now_s):
            raise SeatTaken(
                f"this run is being trained by learner {self.holder}, heard of {now_s - self.seen_s:.0f} s ago; a run "
                f"has one learner. Stop that one, or wait {self.lease_s:.0f} s if it is dead."
            )
        self._renew(learner_id, now_s)

    def require(self, learner_id: str, now_s: float) -> None:
        """Renew. SeatTaken unless this learner sits there; a hub that was restarted knows none and takes this one."""
        if self.holder is None and not self.is_new:
            raise SeatTaken(f"learner {learner_id} has left, or was replaced, and may not train this run any more")
        if self.holder not in (None, learner_id):
            raise SeatTaken(f"learner {learner_id} was replaced by {self.holder} and may not train this run any more")
        self._renew(learner_id, now_s)

    def leave(self, learner_id: str) -> None:
        if self.holder == learner_id:
            self.holder = None

    def _renew(self, learner_id: str, now_s: float) -> None:
        self.holder, self.seen_s, self.is_new = learner_id, now_s, False
