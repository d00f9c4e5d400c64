"""What the hub knows besides the ledger and does not store: the current publication, and who evaluates what. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shared.errors import HubError
from shared.records import Publication


@dataclass(frozen=True)
class WorkerStatus:
    """A worker as the hub last saw it, `age_s` seconds ago."""

    active_version: int
    age_s: float


@dataclass(frozen=True)
class HubStatus:
    """The run at one instant; issued = trained + sum(dropped.values()) + pending.

    `version` is the learner's current policy version, `published_version` the newest that workers may activate.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    pending: int
    version: int
    published_version: int
    workers: dict[str, WorkerStatus]
    finished: bool
    failure: str | None


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

    def newer(self, than: int) -> Publication | None:
        current = self._current
        return current if current and current.manifest.version > than else None

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


class Evaluations:
    """Versions that are to be evaluated, each by one worker while that version is active on it."""

    def __init__(self, versions: Iterable[int]) -> None:
        self._holder: dict[int, str | None] = dict.fromkeys(versions)
        self._done: set[int] = set()

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
        """Record the result's arrival; False when there is one already. HubError for a version nobody asked for."""
        if version not in self._holder:
            raise HubError(f"evaluation of version {version}; the hub asked for {sorted(self._holder) or 'none'}")
        first = version not in self._done
        self._done.add(version)
        return first

    def worker_lost(self, worker_id: str) -> None:
        """Its evaluations go to somebody else."""
        for version, holder in self._holder.items():
            if holder == worker_id:
                self._holder[version] = None
