"""A run's own Ray cluster, with real Ray: who shares it, who outlives whom, who is let in, and what is left of it.

Everything that imports Ray runs in a process of its own, as a service does.
"""

import ipaddress
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

import shared.cluster
from shared.cluster import ensure_cluster, stop_cluster
from shared.cluster_processes import is_alive
from shared.cluster_record import ClusterRecord, read_cluster
from shared.errors import ConfigError

WAIT_S = 20.0

SERVICE = """
import sys, time
from pathlib import Path
from shared.cluster import ensure_cluster
while time.time() < float(sys.argv[2]):
    pass
print(ensure_cluster(Path(sys.argv[1]), Path(sys.argv[1])).pid, flush=True)
time.sleep(60)
"""

JOIN = """
import json, os, sys
from pathlib import Path
from shared.cluster import join
from shared.cluster_record import read_cluster
join(read_cluster(Path(sys.argv[1])), "a-run")
import psutil, ray
"""

CREATE = (
    JOIN
    + """
class Counter:
    def __init__(self):
        self.count = 0
    def add(self):
        self.count += 1
        return self.count, os.getpid(), "RAY_AUTH_TOKEN" in os.environ
actor = ray.remote(Counter).options(name="counter", lifetime="detached", num_cpus=0).remote()
print(json.dumps(ray.get(actor.add.remote())))
"""
)

USE = (
    JOIN
    + """
count = ray.get(ray.get_actor("counter").add.remote())
listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"]
print(json.dumps([count, listening]))
"""
)

STRANGER = """
import sys, time
from shared.cluster import join
from shared.errors import ConfigError
start_s = time.monotonic()
try:
    join(sys.argv[1], "a-run")
except ConfigError as error:
    print(f"{time.monotonic() - start_s:.1f} {error}")
"""

PRIVATE = """
import sys
from pathlib import Path
from shared.cluster import private_cluster
with private_cluster(Path(sys.argv[1]), "a-run", Path(sys.argv[1])) as record:
    print(record.pid, flush=True)
    sys.stdin.readline()
"""


def start(script: str, *arguments: object, **environment: str) -> "subprocess.Popen[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean | environment,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    """What it printed; its errors when it failed."""
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


def tree(record: ClusterRecord) -> list[psutil.Process]:
    head = psutil.Process(record.pid)
    return [head, *head.children(recursive=True)]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while (alive := [p for p in processes if is_alive(p)]) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not alive


def named(processes: list[psutil.Process], name: str) -> psutil.Process:
    return next(process for process in processes if process.name() == name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a run with a detached cluster, in which an actor was made by a process that has ended."""
    directory = tmp_path_factory.mktemp("run")
    ensure_cluster(directory, directory)
    count, pid, has_token_variable = json.loads(finish(start(CREATE, directory, RAY_AUTH_TOKEN="of another cluster")))
    assert count == 1 and psutil.pid_exists(pid) and not has_token_variable
    yield directory
    stop_cluster(directory, WAIT_S)


@pytest.fixture
def own_run(tmp_path: Path) -> Iterator[Path]:
    """The directory of a run without a cluster yet."""
    yield tmp_path
    stop_cluster(tmp_path, WAIT_S)


def record_of(run: Path) -> ClusterRecord:
    record = read_cluster(run)
    assert record is not None
    return record


def test_an_actor_outlives_its_maker_and_nothing_listens_beyond_this_host(run: Path) -> None:
    (count, actor_pid, _), client = json.loads(finish(start(USE, run)))
    assert count >= 2
    processes = tree(record_of(run))
    assert actor_pid in [process.pid for process in processes]
    cluster = [c.laddr.ip for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert len(cluster) >= 6 and client  # gcs, raylet twice, agent, head, actor; monitor if its port was free
    for address in cluster + client:
        ip = ipaddress.ip_address(address)
        assert (getattr(ip, "ipv4_mapped", None) or ip).is_loopback, address


def test_the_token_is_a_secret_of_the_owner(run: Path) -> None:
    record = record_of(run)
    assert Path(record.token_path).stat().st_mode & 0o077 == 0
    token = Path(record.token_path).read_text()
    for process in tree(record):
        assert token not in " ".join(process.cmdline())
        assert token not in process.environ().values()


def test_a_stranger_is_not_let_in_and_told_why_in_bounded_time(run: Path) -> None:
    address = record_of(run).address
    # The first keeps Ray from taking this host's other address instead, the second is how many seconds it tries for.
    quick = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_NUM_REDIS_GET_RETRIES": "2"}
    elsewhere = start(STRANGER, address, RAY_AUTH_MODE="disabled")
    strangers = [
        start(STRANGER, address, RAY_AUTH_MODE="disabled", **quick),
        start(STRANGER, address, RAY_AUTH_TOKEN="f" * 64, **quick),
    ]
    for stranger in strangers:
        seconds, _, message = finish(stranger).partition(" ")
        assert float(seconds) < WAIT_S
        assert f"Ray cluster {address}: something listens there, but it did not let this process in" in message
        assert "its token is not the one" in message
    assert f"Ray cluster {address}: nothing answers at " in finish(elsewhere)


def test_a_bare_call_without_the_token_is_refused_by_every_kind_of_server(run: Path) -> None:
    record = record_of(run)
    token = Path(record.token_path).read_text()
    calls = {
        "gcs_server": ("NodeInfoGcsService/GetAllNodeInfo",),
        "raylet": ("NodeManagerService/GetNodeStats", "ObjectManagerService/Pull"),
        "ray::Counter": ("CoreWorkerService/GetCoreWorkerStats",),
        psutil.Process(record.pid).name(): ("CoreWorkerService/GetCoreWorkerStats",),
    }
    answered = set()
    for process in tree(record):
        ports = [c.laddr.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
        for method in next((methods for name, methods in calls.items() if process.name().startswith(name)), ()):
            for port in ports:
                assert call(port, method, None) != "OK"
                assert call(port, method, "f" * 64) != "OK"
                if call(port, method, token) == "OK":  # the right port, and nothing wrong with the call
                    answered.add(method)
                    assert call(port, method, None) == "UNAUTHENTICATED"
                    assert call(port, method, "f" * 64) == "UNAUTHENTICATED"
    assert answered == {method for methods in calls.values() for method in methods}


def call(port: int, method: str, token: str | None) -> str:
    """Name of the status with which a gRPC server answers an empty request."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{method}", bytes, bytes)(b"", timeout=2, metadata=metadata)
            return "OK"
        except grpc.RpcError as error:
            return str(error.code().name)  # type: ignore[attr-defined]


def test_services_that_start_at_once_share_a_cluster_that_outlives_them_until_it_is_stopped(
    run: Path, own_run: Path
) -> None:
    shared_memory = set(Path("/dev/shm").iterdir())
    begin_s = time.time() + 1.5
    services = [start(SERVICE, own_run, begin_s) for _ in range(2)]
    heads = {int(service.stdout.readline()) for service in services if service.stdout}
    for service in services:
        service.kill()
        service.wait()
    record = record_of(own_run)
    assert heads == {record.pid}
    assert finish(start(CREATE, own_run))
    processes = tree(record)
    assert stop_cluster(own_run, WAIT_S)
    assert not [process for process in processes if is_alive(process)]
    assert not stop_cluster(own_run, WAIT_S)
    assert sorted(file.name for file in own_run.iterdir()) == ["cluster.lock", "logs"]
    assert not Path(record.session_directory).exists()
    assert set(Path("/dev/shm").iterdir()) <= shared_memory
    assert finish(start(USE, run))  # the other cluster of this host goes on


def test_a_cluster_that_lost_its_head_or_its_center_ends_and_is_replaced(
    own_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.cluster, "_END_GRACE_S", 0.5)  # Ray's agents do not end when asked, then
    first = ensure_cluster(own_run, own_run)
    processes = tree(first)
    psutil.Process(first.pid).kill()
    wait_until_gone(processes[:1])
    assert read_cluster(own_run) is None
    second = ensure_cluster(own_run, own_run)
    assert second.pid != first.pid
    assert not [process for process in processes if is_alive(process)]
    processes = tree(second)
    named(processes, "gcs_server").kill()
    wait_until_gone(processes[:1])
    assert read_cluster(own_run) is None
    assert not stop_cluster(own_run, WAIT_S)
    assert not [process for process in processes if is_alive(process)]
    assert not (own_run / "cluster.token").exists()


def test_a_private_cluster_can_be_joined_but_not_stopped_and_ends_with_its_process(tmp_path: Path) -> None:
    owner = start(PRIVATE, tmp_path, RAY_AUTH_TOKEN="of another cluster")
    assert owner.stdout is not None and owner.stdout.readline() == f"{owner.pid}\n"
    record = record_of(tmp_path)
    assert record.kind == "private"
    assert finish(start(CREATE, tmp_path))
    with pytest.raises(ConfigError, match=f"process {owner.pid}"):
        stop_cluster(tmp_path, WAIT_S)
    assert ensure_cluster(tmp_path, tmp_path) == record
    processes = tree(record)
    owner.communicate("end\n", timeout=30)
    wait_until_gone(processes)
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.lock"]
