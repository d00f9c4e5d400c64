"""Staging: verified bytes as files, in the right place, gone afterwards."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from rollout.receive import MARGIN_BYTES, Staging
from shared.errors import WeightSyncError
from shared.records import Manifest
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
            f"seqrelay-run1-worker0/v4/bucket-{i}.safetensors" for i in range(3)
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
        leftover = tmp_path / root / "seqrelay-run1-worker0" / "v3" / "bucket-0.safetensors"
        leftover.parent.mkdir(parents=True)
        leftover.write_bytes(b"old")
    other = tmp_path / "shm" / "seqrelay-run1-worker1" / "v3"
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
