"""Node-local staging: verified buckets become files that the engine's processes can map.

The engine's workers are its own child processes and see no Ray objects, so the bytes pass through a folder in shared
memory: `<root>/<run>-<worker>/v<version>/bucket-<i>.safetensors`. /dev/shm is used while it has room for all bytes
plus a margin (a container has 64 MB by default), else the fallback folder. Everything is verified before the first
file is written; files live from `stage` to the end of the `with` block, and leftovers of earlier versions or of a
dead predecessor of the same name are removed first. No Ray here: buckets arrive as uint8 arrays.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import WeightSyncError
from shared.records import Manifest
from shared.weights import Blob, check_manifest, verify_bucket

SHARED_MEMORY = Path("/dev/shm")
MARGIN_BYTES = 64 << 20  # left free for other users of the folder, torch's own shared memory among them


@dataclass(frozen=True)
class Staged:
    """The files of one version, one per bucket, and the seconds it took to check and to write them."""

    files: tuple[Path, ...]
    digest_s: float
    stage_s: float


class Staging:
    """The staging folder of one worker. `name` is unique among live workers of the node, e.g. "run1-worker0"."""

    def __init__(
        self,
        name: str,
        fallback: Path,
        shared_memory: Path = SHARED_MEMORY,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self._folders = (shared_memory / f"seqrelay-{name}", fallback / f"seqrelay-{name}")
        self._free_bytes = free_bytes

    @contextlib.contextmanager
    def stage(self, manifest: Manifest, buckets: Sequence[Blob]) -> Iterator[Staged]:
        """Verify the buckets, write them as files, remove the files on exit. WeightSyncError on a mismatch or no room.

        `buckets[i]` is bucket i of the manifest, uint8, read-only views included.
        """
        start_s = time.monotonic()
        self._verify(manifest, buckets)
        digest_s = time.monotonic() - start_s
        self.clear()
        try:
            files = self._write(manifest.version, buckets)
            yield Staged(files, digest_s, time.monotonic() - start_s - digest_s)
        finally:
            self.clear()

    def clear(self) -> None:
        """Remove every file staged under this name, whoever left it."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _verify(self, manifest: Manifest, buckets: Sequence[Blob]) -> None:
        check_manifest(manifest)
        num_buckets = len({entry.bucket for entry in manifest.tensors})
        if len(buckets) != num_buckets:
            raise WeightSyncError(
                f"version {manifest.version}: {len(buckets)} buckets arrived, the manifest has {num_buckets}."
            )
        for number, blob in enumerate(buckets):
            verify_bucket(blob, [entry for entry in manifest.tensors if entry.bucket == number])

    def _write(self, version: int, buckets: Sequence[Blob]) -> tuple[Path, ...]:
        folder = self._choose(sum(blob.nbytes for blob in buckets)) / f"v{version}"
        try:
            folder.mkdir(parents=True)
            files = []
            for number, blob in enumerate(buckets):
                file = folder / f"bucket-{number}.safetensors"
                file.write_bytes(blob.data)
                files.append(file)
        except OSError as error:
            raise WeightSyncError(
                f"version {version} cannot be staged in {folder}: {error}. Free some space."
            ) from error
        return tuple(files)

    def _choose(self, num_bytes: int) -> Path:
        for folder in self._folders:
            root = folder.parent
            if root.is_dir() and self._free_bytes(root) >= num_bytes + MARGIN_BYTES:
                return folder
        roots = " and ".join(str(folder.parent) for folder in self._folders)
        raise WeightSyncError(
            f"{num_bytes + MARGIN_BYTES} bytes are needed to stage the weights; {roots} have less. Free some space."
        )
