"""The weights of one engine: follows the learner's versions, and serves none that are not the learner's.

Owns the engine's loads. Order: fetch, check and stage (the transport check), load in the engine's pause, resume, score
the manifest's probe (the load check), release. Gate: after a refusal the current weights are fetched and loaded again,
which ends the requests that run if the engine holds wrong weights; a second refusal in a row ends the worker with
`WeightsRefused`. A swap and a use of `steady` weights exclude each other.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from rollout.receive import Staged, Staging, fetch_buckets
from rollout.verify import Load, Verdicts, check_load
from shared.config import Config
from shared.errors import WeightsLost, WeightsRefused, WeightSyncError
from shared.protocols import Engine, VersionFeed
from shared.records import Manifest, ProbeReport, Publication, Report, SyncReport
from shared.spans import Recorder, Timing

_LOG = logging.getLogger(__name__)
_LOOK_AGAIN_S = 1.0
_MAX_REFUSALS = 2


class Hub(VersionFeed, Protocol):
    """What this needs of the hub."""

    async def report(self, reports: Sequence[Report]) -> None: ...


class WeightFollower:
    """Keeps one engine at the learner's version and decides the verdicts on its loads."""

    def __init__(
        self, config: Config, hub: Hub, engine: Engine, staging: Staging, recorder: Recorder, verdicts: Verdicts
    ) -> None:
        self._hub, self._engine, self._staging, self._recorder = hub, engine, staging, recorder
        self._verdicts, self._max_mismatch = verdicts, config.max_mismatch
        self._changing = asyncio.Condition()  # held while the engine's weights may be others than the released ones
        self._released = (0, 0)  # version, incarnation
        self._held: tuple[int, int] | None = (0, 0)  # version of the last change, incarnation; None: wrong weights
        self._refusals: list[str] = []

    @property
    def active_version(self) -> int:
        """What the engine samples under, released or not yet."""
        return self._verdicts.current.version

    @contextlib.asynccontextmanager
    async def steady(self) -> AsyncIterator[int]:
        """Released weights that stay for the block, and their version; waits for them."""
        async with self._changing:
            await self._changing.wait_for(lambda: self._held is not None)
            yield self.active_version

    async def run(self) -> None:
        """Until it is canceled. WeightsRefused after two refusals in a row."""
        while True:
            publication = await self._hub.newer_version(*self._released)
            if publication is None:
                continue
            version = publication.manifest.version
            try:
                fault = await self._activate(publication)
            except WeightsLost as error:
                _LOG.warning("version %d cannot be fetched: %s", version, error)
                await asyncio.sleep(_LOOK_AGAIN_S)
                continue
            except WeightSyncError as error:
                fault = f"by the transport check: {error}"
            self._count(version, fault)

    def _count(self, version: int, fault: str) -> None:
        if not fault:
            self._refusals.clear()
            return
        self._refusals.append(f"version {version} was refused {fault}")
        _LOG.warning("%s: %s", self._recorder.lane, self._refusals[-1])
        if len(self._refusals) >= _MAX_REFUSALS:
            raise WeightsRefused(
                f"worker {self._recorder.lane}: {self._refusals[-1]}. Before that, {self._refusals[-2]}. "
                f"Nothing sampled under these weights was handed in. If one worker says so, look for a fault of its "
                f"host; if all do, engine and learner differ: see model.precision and sync.max_mismatch."
            )

    async def _activate(self, publication: Publication) -> str:
        """Load and verify: why the load check refuses the weights, "" if it does not. WeightSyncError before that."""
        manifest = publication.manifest
        changed = (manifest.weights_version, manifest.incarnation) != self._held
        with contextlib.ExitStack() as until_loaded:
            fetched, staged = (
                await self._receive(publication, until_loaded) if changed else (Timing(), Staged((), 0, 0))
            )
            del publication  # lets the object store release the version
            async with self._changing:
                load, parts = await self._load(manifest, staged)
                until_loaded.close()
                await self._hub.report([self._sync_report(manifest, changed, fetched, staged, parts)])
                return await self._verify(load, manifest, changed)

    async def _receive(self, publication: Publication, until_loaded: contextlib.ExitStack) -> tuple[Timing, Staged]:
        """Fetch the buckets from the object store, check them and stage them as files until the load is done."""
        version = publication.manifest.version
        with self._recorder.span("fetch", version) as fetched:
            buckets = await fetch_buckets(publication)
        with self._recorder.span("stage", version):
            staging = self._staging.stage(publication.manifest, buckets)
            staged = await asyncio.to_thread(until_loaded.enter_context, staging)
        return fetched, staged

    async def _load(self, manifest: Manifest, staged: Staged) -> tuple[Load, dict[str, float]]:
        holds_wrong = self._held is None
        if holds_wrong and not staged.files:
            raise WeightSyncError(f"version {manifest.version} brings no weights to replace the refused ones with.")
        with self._recorder.span("load", manifest.version), self._verdicts.loading(manifest.version) as load:
            parts = await self._engine.load(manifest, staged.files, "abort" if holds_wrong else "recompute")
        return load, parts

    def _sync_report(
        self, manifest: Manifest, changed: bool, fetched: Timing, staged: Staged, parts: Mapping[str, float]
    ) -> SyncReport:
        return SyncReport(
            worker_id=self._recorder.lane,
            version=manifest.version,
            num_bytes=manifest.num_bytes if changed else 0,
            fetch_s=fetched.duration_s,
            digest_s=staged.digest_s,
            stage_s=staged.stage_s,
            pause_s=parts["pause_s"],
            load_s=parts["load_s"],
            resume_s=parts["resume_s"],
            incarnation=manifest.incarnation,
        )

    async def _verify(self, load: Load, manifest: Manifest, changed: bool) -> str:
        """The load check, and its verdict. Weights that were released before, or come without a probe, pass."""
        if not changed or not manifest.probe:
            self._release(load, manifest)
            return ""
        with self._recorder.span("probe", manifest.version) as probed:
            check = await check_load(self._engine, manifest.probe, self._max_mismatch)
        if check.fault:
            self._held = None
            load.decide(False)
        else:
            self._release(load, manifest)
        worker_id, is_released = self._recorder.lane, not check.fault
        report = ProbeReport(worker_id, manifest.version, check.mismatch, check.max_abs, probed.duration_s, is_released)
        await self._hub.report([report])
        return f"by the load check: {check.fault}" if check.fault else ""

    def _release(self, load: Load, manifest: Manifest) -> None:
        self._released = (manifest.version, manifest.incarnation)
        self._held = (manifest.weights_version, manifest.incarnation)
        load.decide(True)
        self._changing.notify_all()
