"""Weights on their way in: fetched, or plainly lost; verified bytes as files, in the right place, gone afterwards."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.exceptions import OwnerDiedError
from safetensors.numpy import load_file, save

from rollout.receive import MARGIN_BYTES, PREFIX, ROOT_VARIABLE, Staging, clear_abandoned, fetch_buckets, staging_root
from rollout.slots import HostSlot
from shared.errors import ConfigError, WeightsLost, WeightSyncError
from shared.records import Manifest, Publication
from shared.weights import Blob, bucket_entries

BUCKETS = [np.frombuffer(save({f"t{i}": np.full(5, i, dtype=np.float32)}), dtype=np.uint8) for i in range(3)]


def manifest(buckets: list[Blob] = BUCKETS, version: int = 4) -> Manifest:
    return Manifest(version, version, tuple(e for i, b in enumerate(buckets) for e in bucket_entries(b, i)))


def staging(tmp_path: Path, free_bytes: int = 1 << 40) -> Staging:
    for name in ("shm", "run"):
        (tmp_path / name).mkdir(exist_ok=True)
    return Staging("run1-worker0", tmp_path / "run", tmp_path / "shm", lambda path: free_bytes * (path.name == "shm"))


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_buckets_become_files_and_go_away(tmp_path: Path) -> None:
    with staging(tmp_path).stage(manifest(), BUCKETS) as staged:
        assert [str(f.relative_to(tmp_path / "shm")) for f in staged.files] == [
            f"{PREFIX}run1-worker0/v4/bucket-{i}.safetensors" for i in range(3)
        ]
        assert load_file(staged.files[2])["t2"].tolist() == [2.0] * 5
        assert staged.digest_s > 0
        assert staged.stage_s > 0
    assert files_under(tmp_path) == []


def test_files_go_away_after_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="load failed"), staging(tmp_path).stage(manifest(), BUCKETS):
        assert len(files_under(tmp_path)) == 3
        raise RuntimeError("load failed")
    assert files_under(tmp_path) == []


def test_leftovers_of_a_dead_predecessor_are_removed(tmp_path: Path) -> None:
    for root in ("shm", "run"):
        leftover = tmp_path / root / f"{PREFIX}run1-worker0" / "v3" / "bucket-0.safetensors"
        leftover.parent.mkdir(parents=True)
        leftover.write_bytes(b"old")
    other = tmp_path / "shm" / f"{PREFIX}run1-worker1" / "v3"
    other.mkdir(parents=True)
    with staging(tmp_path).stage(manifest(), BUCKETS) as staged:
        assert sorted(files_under(tmp_path)) == sorted(staged.files)
    assert other.is_dir(), "another worker's files are not ours"


def test_without_room_in_shared_memory_the_fallback_is_used(tmp_path: Path) -> None:
    num_bytes = sum(blob.nbytes for blob in BUCKETS)
    room = {"shm": num_bytes + MARGIN_BYTES - 1, "run": num_bytes + MARGIN_BYTES}
    stager = Staging("w", tmp_path / "run", tmp_path / "shm", lambda path: room[path.name])
    for name in room:
        (tmp_path / name).mkdir()
    with stager.stage(manifest(), BUCKETS) as staged:
        assert staged.files[0].is_relative_to(tmp_path / "run")
    room["shm"] += 1
    with stager.stage(manifest(), BUCKETS) as staged:
        assert staged.files[0].is_relative_to(tmp_path / "shm")


def test_no_room_anywhere_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="Free some space"), staging(tmp_path, 100).stage(manifest(), BUCKETS):
        pass
    assert files_under(tmp_path) == []


def test_a_bad_bucket_is_refused_before_the_first_file(tmp_path: Path) -> None:
    bad = BUCKETS[2].copy()
    bad[-1] ^= 1
    with pytest.raises(WeightSyncError, match="'t2'"), staging(tmp_path).stage(manifest(), [*BUCKETS[:2], bad]):
        pass
    assert files_under(tmp_path) == []
    with pytest.raises(WeightSyncError, match="2 buckets"), staging(tmp_path).stage(manifest(), BUCKETS[:2]):
        pass


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A host of its own: temporary files in `tmp`, shared memory in `shm`."""
    for name in ("tmp", "shm"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "shm"))
    yield tmp_path
    monkeypatch.setattr(tempfile, "tempdir", None)


def leave(staging: Staging) -> list[Path]:
    """Files in every place that a worker which was killed in the middle of a load may have left them."""
    files = [folder / "v3" / "bucket-0.safetensors" for folder in staging._folders]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"old")
    return files


def test_the_root_is_chosen_by_the_environment(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Staging.of(host / "run", HostSlot(0)).stage(manifest(), BUCKETS) as staged:
        assert staged.files[0].is_relative_to(host / "shm")
        assert staged.files[0].parents[1].stat().st_mode & 0o777 == 0o700
    for wrong in (host / "missing", host / "file"):
        (host / "file").write_text("")
        monkeypatch.setenv(ROOT_VARIABLE, str(wrong))
        with pytest.raises(ConfigError, match=f"SEQRELAY_STAGING = {wrong} is no folder"):
            Staging.of(host / "run", HostSlot(0))
    monkeypatch.delenv(ROOT_VARIABLE)
    assert staging_root() == Path("/dev/shm")


def test_without_room_the_users_own_folder_is_used(host: Path) -> None:
    staging = Staging("w", free_bytes=lambda path: (path.name != "shm") << 40)
    with staging.stage(manifest(), BUCKETS) as staged:
        assert staged.files[0].is_relative_to(host / "tmp" / f"seqrelay-{os.getuid()}")


def test_a_folder_that_somebody_else_made_is_not_used(host: Path) -> None:
    (host / "elsewhere").mkdir()
    (host / "shm" / f"{PREFIX}w").symlink_to(host / "elsewhere")
    with pytest.raises(WeightSyncError, match="cannot be staged"), Staging("w").stage(manifest(), BUCKETS):
        pass
    assert list((host / "elsewhere").iterdir()) == []


def test_the_next_worker_in_a_slot_clears_what_a_killed_one_left(host: Path) -> None:
    left = leave(Staging.of(host / "run", HostSlot(0)))
    others = leave(Staging.of(host / "run", HostSlot(1))) + leave(Staging.of(host / "other" / "run", HostSlot(0)))
    with Staging.of(host / "run", HostSlot(0)).stage(manifest(), BUCKETS):
        assert not any(file.exists() for file in left)
        assert all(file.exists() for file in others)


def test_folders_of_slots_that_nobody_holds_are_cleared_whatever_their_run(host: Path) -> None:
    held = HostSlot.claim()
    assert held.index == 0
    live = leave(Staging.of(host / "run", held))
    abandoned = leave(Staging.of(host / "run", HostSlot(1))) + leave(Staging.of(host / "other", HostSlot(12)))
    unrelated = leave(Staging("run-slot1-copy"))
    clear_abandoned()
    assert all(file.exists() for file in live + unrelated)
    assert not any(file.exists() for file in abandoned)
    assert sorted(path.name for path in (host / "shm").iterdir()) == sorted(
        file.parents[1].name for file in (live[0], unrelated[0])
    )


def test_buckets_come_in_order_from_references_or_arrays() -> None:
    async def story() -> list[Blob]:
        async def later(bucket: Blob, delay_s: float) -> Blob:
            await asyncio.sleep(delay_s)
            return bucket

        buckets: tuple[Any, ...] = (later(BUCKETS[0], 0.05), BUCKETS[1], later(BUCKETS[2], 0.0))
        return await fetch_buckets(Publication(manifest(), buckets))

    assert [blob is bucket for blob, bucket in zip(asyncio.run(story()), BUCKETS, strict=True)] == [True] * 3


def test_a_lost_bucket_is_told_in_plain_words_and_other_errors_are_not() -> None:
    async def fetch(error: Exception) -> None:
        async def fails() -> None:
            raise error

        await fetch_buckets(Publication(manifest(), (BUCKETS[0], fails())))

    with pytest.raises(WeightsLost, match=r"version 4 .* learner that published them is gone \(OwnerDiedError\)"):
        asyncio.run(fetch(OwnerDiedError("00ff", None, "")))
    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(fetch(RuntimeError("a bug")))
