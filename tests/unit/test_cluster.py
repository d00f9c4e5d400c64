"""The record, the token, the environment and the ends of a run's cluster, without Ray."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import shared.cluster
from shared.cluster import _reach, _remove_session, ensure_cluster, stop_cluster
from shared.cluster_environment import join_environment, object_store_bytes, own_environment
from shared.cluster_processes import end_session, is_alive
from shared.cluster_record import ClusterRecord, process_start, read_cluster, remove_files, write_record, write_token
from shared.errors import ClusterError, ConfigError
from shared.locks import FileLock

MIB = 1 << 20


def a_record(**values: object) -> ClusterRecord:
    """A detached cluster whose head is this process."""
    pid = os.getpid()
    host = socket.gethostname()
    record = ClusterRecord("detached", host, "127.0.0.1:1", pid, process_start(pid) or "", "/tmp/ray/none", "/a/token")
    return replace(record, **values)  # type: ignore[arg-type]


def test_a_record_is_alive_only_with_the_process_that_wrote_it(tmp_path: Path) -> None:
    assert read_cluster(tmp_path) is None
    write_record(tmp_path, a_record())
    assert read_cluster(tmp_path) == a_record()
    boot, _, ticks = a_record().process_start.partition(":")
    for other in (f"{boot}:{int(ticks) - 1}", f"another-boot:{ticks}"):
        write_record(tmp_path, a_record(process_start=other))  # that process id, used again
        assert read_cluster(tmp_path) is None


def test_a_zombie_at_the_head_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline_s = time.monotonic() + 10
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert process_start(child.pid) is None
    assert not is_alive(psutil.Process(child.pid))
    child.wait()
    assert process_start(child.pid) is None


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    for text in ("{", '{"kind": "detached"}', "[]"):
        (tmp_path / "cluster.json").write_text(text)
        with pytest.raises(ConfigError, match=r"cluster\.json is no record of a cluster"):
            read_cluster(tmp_path)


def test_the_token_is_its_owners_alone_and_new_each_time(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = write_token(tmp_path)
        first = path.read_text()
        path.chmod(0o644)
        assert write_token(tmp_path) == path
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(bytes.fromhex(first)) == 32
    assert path.read_text() != first
    remove_files(tmp_path)
    assert not path.exists()


def test_whoever_joins_the_runs_cluster_uses_its_token_and_no_other() -> None:
    environment = {"RAY_AUTH_TOKEN": "of another cluster", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "3"}
    assert join_environment(a_record(), environment) == "127.0.0.1:1"
    assert environment == {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": "/a/token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "3",
    }


def test_a_cluster_of_the_users_needs_a_token_or_a_word_that_there_is_none(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"--address head:6379: there is no token .* set RAY_AUTH_MODE=disabled"):
        join_environment("head:6379", dict(home))
    for given in ({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "nowhere")}, {"RAY_AUTH_TOKEN": " "}):
        with pytest.raises(ConfigError, match="there is no token"):
            join_environment("head:6379", home | given)
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("abc\n")
    for given in (
        {},
        {"RAY_AUTH_TOKEN": "abc"},
        {"RAY_AUTH_TOKEN_PATH": str(token)},
        {"RAY_ENABLE_K8S_TOKEN_AUTH": "true"},
    ):
        environment = home | given
        assert join_environment("head:6379", environment) == "head:6379"
        assert environment == home | given | {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    open_cluster = {"RAY_AUTH_MODE": "disabled"}
    join_environment("head:6379", open_cluster)
    assert open_cluster["RAY_AUTH_MODE"] == "disabled"


def test_settings_that_ray_would_ignore_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray  # noqa: F401

    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "")
    with pytest.raises(ClusterError, match="Ray was imported before"):
        own_environment(tmp_path / "token")


def test_the_object_store_is_bounded_by_the_weights_and_by_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(30 * MIB)
    usage = namedtuple("usage", "free")
    for free_mib, wanted_mib in ((10_000, 4 * 60 + 256), (1000, 400), (64, 75)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free_mib * MIB: usage(free))
        assert object_store_bytes(tmp_path) == wanted_mib * MIB


def test_a_private_cluster_and_one_of_another_host_are_not_ours_to_end(tmp_path: Path) -> None:
    write_record(tmp_path, a_record(kind="private"))
    with pytest.raises(ConfigError, match=rf"belongs to `seqrelay train` \(process {os.getpid()}\)"):
        stop_cluster(tmp_path, 1.0)
    write_record(tmp_path, a_record(host="elsewhere", pid=1))
    with pytest.raises(ConfigError, match="its Ray cluster is on host elsewhere"):
        stop_cluster(tmp_path, 1.0)
    with pytest.raises(ConfigError, match="its Ray cluster is on host elsewhere"):
        ensure_cluster(tmp_path, tmp_path)


def test_there_is_nothing_to_stop_but_what_a_killed_head_left_behind(tmp_path: Path) -> None:
    assert not stop_cluster(tmp_path, 1.0)
    assert list(tmp_path.iterdir()) == []
    with FileLock(tmp_path / "cluster.lock"):
        pass
    write_token(tmp_path)
    write_record(tmp_path, a_record(process_start="another"))
    assert not stop_cluster(tmp_path, 1.0)
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.lock"]


def test_a_head_that_does_not_start_is_an_error_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho no room for a store\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(ClusterError, match=r"did not start \(code 1\)\.(.|\n)*no room for a store"):
        ensure_cluster(tmp_path, tmp_path)


def test_a_cluster_that_never_comes_is_given_up_and_its_holder_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.cluster, "_START_TIMEOUT_S", 0.2)
    with (
        FileLock(tmp_path / "cluster.lock"),
        pytest.raises(ClusterError, match=f"cluster.lock is held by process {os.getpid()}"),
    ):
        ensure_cluster(tmp_path, tmp_path)


def test_a_head_that_is_still_starting_ends_when_its_starter_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr(shared.cluster, "_START_TIMEOUT_S", 0.5)
    with pytest.raises(ClusterError, match=r"no Ray cluster after 0\.5 s"):
        ensure_cluster(tmp_path, tmp_path)
    assert process_start(int((tmp_path / "pid").read_text())) is None


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    def own_ip() -> str:
        return "127.0.0.1"

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        _reach(f"127.0.0.1:{port}", own_ip)
        with pytest.raises(ConfigError, match=rf"localhost:{port}: nothing answers at 127\.0\.0\.2"):
            _reach(f"localhost:{port}", lambda: "127.0.0.2")  # the address by which Ray knows this host
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: nothing answers"):
        _reach(f"127.0.0.1:{port}", own_ip)
    _reach("auto", own_ip)


def test_a_session_is_ended_with_those_that_will_not_that_come_late_and_that_left_it() -> None:
    stubborn = """
import signal, subprocess, sys, time
def spawn(number, frame):
    print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid, flush=True)
signal.signal(signal.SIGTERM, spawn)
print("up", flush=True)
time.sleep(60)
"""
    head = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert head.stdout is not None
    head.stdout.readline()
    end_session(head.pid, 0.5)
    assert process_start(int(head.stdout.readline())) is None
    assert head.wait() == -9


def test_what_a_killed_head_left_behind_is_ended_and_nobody_else(tmp_path: Path) -> None:
    spawn = "import subprocess; print(subprocess.Popen(['sleep', '60'], process_group=0).pid, flush=True)"
    head = subprocess.Popen([sys.executable, "-c", spawn], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert head.stdout is not None
    orphan = int(head.stdout.readline())
    head.wait()
    with FileLock(tmp_path / "cluster.lock"):
        pass
    boot = a_record().process_start.partition(":")[0]
    for pid, start in ((head.pid, "earlier-boot:7"), (os.getpid(), f"{boot}:7")):
        write_record(tmp_path, a_record(pid=pid, process_start=start))
        assert not stop_cluster(tmp_path, 1.0)  # that number means another process now
        assert process_start(orphan) is not None
    write_record(tmp_path, a_record(pid=head.pid, process_start=f"{boot}:7"))
    assert not stop_cluster(tmp_path, 1.0)
    assert process_start(orphan) is None


def test_only_the_clusters_own_session_folder_is_removed(tmp_path: Path) -> None:
    ours, foreign = tmp_path / "session_now_42", tmp_path / "session_now_43"
    for folder in (ours, foreign):
        folder.mkdir()
    (tmp_path / "session_latest").symlink_to(ours)
    _remove_session(a_record(pid=42, session_directory=str(foreign)))
    assert foreign.exists() and ours.exists()
    _remove_session(a_record(pid=42, session_directory=str(ours)))
    assert sorted(file.name for file in tmp_path.iterdir()) == [foreign.name]
