"""The Ray cluster a run lives in: start one or find it, join it, end it. Never touches any other cluster.

A run's own cluster is on this host's loopback and hears only holders of its token. The process at its head holds
`cluster.lock` in the run directory for as long as it lives, so a run has at most one cluster, however many services
start at once; Ray's processes ask the kernel to die with it. Two kinds: private (the head is `seqrelay train` itself)
and detached (the head is `shared.cluster_head`, in a session of its own).

A head is a driver that called `ray.init(address="local")`, not `ray start --head`: Ray then chooses its ports without
a race, starts no client server on a fixed one, and leaves /tmp/ray/ray_current_cluster alone, through which other
programs' plain `ray.init()` would end up in our cluster.

Ray reads its settings when it is imported: call `join` or `private_cluster` before anything imports it.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from shared.cluster_environment import join_environment, object_store_bytes, own_environment
from shared.cluster_processes import end_session
from shared.cluster_record import (
    LOCK,
    ClusterRecord,
    is_dead_of_this_boot,
    process_start,
    read_cluster,
    read_record,
    remove_files,
    write_record,
    write_token,
)
from shared.errors import ClusterError, ConfigError, LockHeld
from shared.locks import FileLock

HEAD_LOCK_HELD = 75  # exit code of a head that came second

_POLL_S = 0.05
_START_TIMEOUT_S = 120.0
_CONNECT_TIMEOUT_S = 5.0
_END_GRACE_S = 5.0

# Heads that this process started and that outlive it; kept because Popen warns when it forgets a running process.
_heads: list[subprocess.Popen[bytes]] = []


def ensure_cluster(run_directory: Path, model_path: Path) -> ClusterRecord:
    """The run's cluster, a detached one started here unless there is one.

    The run directory must exist. Services that ask at the same instant get the same cluster. ConfigError when the
    cluster is on another host; ClusterError when it does not start, with the end of its log.
    """
    head: subprocess.Popen[bytes] | None = None
    lock = FileLock(run_directory / LOCK)
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    try:
        while (record := read_cluster(run_directory)) is None:
            if head is None and lock.holder() is None:
                head = _start_head(run_directory, model_path)
            if head is not None and (code := head.poll()) is not None:
                if code != HEAD_LOCK_HELD:
                    raise ClusterError(
                        f"the run's Ray cluster did not start (code {code}). {_end_of_log(run_directory)}"
                    )
                head = None  # another service's head came first; its record will follow
            if time.monotonic() >= deadline_s:
                raise ClusterError(
                    f"no Ray cluster after {_START_TIMEOUT_S:g} s; {lock.path} is held by {lock.holder() or 'nobody'}. "
                    f"{_end_of_log(run_directory)}"
                )
            time.sleep(_POLL_S)
    except BaseException:
        if head is not None and head.poll() is None:
            end_session(head.pid, _END_GRACE_S)
        raise
    if not record.is_here:
        raise ConfigError(_on_another_host(run_directory, record))
    return record


def join(target: ClusterRecord | str, namespace: str) -> None:
    """`ray.init` of this process on the run's own cluster, or on one that the user names by its address.

    ConfigError, after 25 s at most, when nothing listens there or the token is not the cluster's.
    """
    address = join_environment(target)
    import ray

    _reach(address, ray.util.get_node_ip_address)
    try:
        ray.init(address=address, namespace=namespace, logging_level="warning")
    except (OSError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"Ray cluster {address}: something listens there, but it did not let this process in: {error}\n"
            f"If it is a Ray cluster, its token is not the one in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or "
            f"~/.ray/auth_token (looked up in this order), or its Ray or Python version is another one."
        ) from error


def leave() -> None:
    """Undo `join`."""
    import ray

    ray.shutdown()


@contextmanager
def private_cluster(run_directory: Path, namespace: str, model_path: Path) -> Iterator[ClusterRecord]:
    """A cluster whose head is this process, connected to it; it ends with the block or with the process.

    Replaces the handler of SIGTERM by Ray's own, which aborts and ends nothing: install yours inside the block.
    LockHeld (a ConfigError) when the run has a live cluster already; ClusterError when Ray does not start.
    """
    with head_of_cluster(run_directory, "private", namespace, object_store_bytes(model_path)) as record:
        yield record
    _remove_session(record)  # Ray's logs; a run that failed keeps them


@contextmanager
def head_of_cluster(
    run_directory: Path, kind: Literal["private", "detached"], namespace: str | None, store_bytes: int
) -> Iterator[ClusterRecord]:
    """Make this process the head of the run's cluster, recorded once it is ready. Errors as in `private_cluster`."""
    with _head_lock(run_directory):
        _clear(run_directory)
        token = write_token(run_directory)
        own_environment(token)
        import ray

        try:
            address = ray.init(
                address="local",
                namespace=namespace,
                object_store_memory=store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="warning",
            ).address_info
        except Exception as error:
            remove_files(run_directory)
            raise ClusterError(f"Ray did not start on this host: {error}") from error
        try:
            record = ClusterRecord(
                kind=kind,
                host=socket.gethostname(),
                address=address["gcs_address"],
                pid=os.getpid(),
                process_start=process_start(os.getpid()) or "",
                session_directory=address["session_dir"],
                token_path=str(token),
            )
            write_record(run_directory, record)
            yield record
        finally:
            remove_files(run_directory)
            ray.shutdown()


def stop_cluster(run_directory: Path, grace_s: float) -> bool:
    """End the run's detached cluster and every process it started; False when there is none.

    They get `grace_s` seconds to end in order, then SIGKILL. Ray's logs of this cluster go too. ConfigError for a
    private cluster and for one on another host.
    """
    record = read_cluster(run_directory)
    deadline_s = time.monotonic() + grace_s
    while record is None and FileLock(run_directory / LOCK).holder() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)  # it is just starting
        record = read_cluster(run_directory)
    if record is None:
        _forget_dead(run_directory)
        return False
    if not record.is_here:
        raise ConfigError(_on_another_host(run_directory, record))
    if record.kind == "private":
        raise ConfigError(
            f"{run_directory}: its cluster belongs to `seqrelay train` (process {record.pid}) and ends with it. "
            f"Stop that command instead (Ctrl-C)."
        )
    end_session(record.pid, grace_s)
    _forget_dead(run_directory)
    _remove_session(record)
    return True


@contextmanager
def _head_lock(run_directory: Path) -> Iterator[None]:
    lock = FileLock(run_directory / LOCK)
    try:
        lock.acquire()
    except LockHeld as error:
        raise LockHeld(
            f"{run_directory} has a Ray cluster already; `seqrelay stop` ends a detached one. {error}"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _start_head(run_directory: Path, model_path: Path) -> subprocess.Popen[bytes]:
    log = run_directory / "logs" / "ray.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "shared.cluster_head", str(run_directory.resolve())]
    command += ["--object-store-bytes", str(object_store_bytes(model_path))]
    with log.open("ab") as output:
        head = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
    _heads.append(head)
    return head


def _reach(address: str, own_ip: Callable[[], str]) -> None:
    """ConfigError when no process accepts connections there: Ray itself would retry for a minute and not say so."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like: Ray's to resolve
    if host in ("localhost", "127.0.0.1", "[::1]"):
        host = own_ip()  # as Ray does
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"Ray cluster {address}: nothing answers at {host}, port {port} ({error}). Is it running, and is this the "
            f"address of its GCS (port 6379 by default)?"
        ) from error


def _forget_dead(run_directory: Path) -> None:
    """Clear up behind a head that has ended, unless a new one has begun."""
    if (run_directory / LOCK).exists():
        with suppress(LockHeld), FileLock(run_directory / LOCK):
            _clear(run_directory)


def _clear(run_directory: Path) -> None:
    """Remove what a head that was killed left behind. Only for the holder of `cluster.lock`."""
    record = read_record(run_directory)
    if record is not None and record.kind == "detached" and is_dead_of_this_boot(record):
        end_session(record.pid, _END_GRACE_S)
    remove_files(run_directory)


def _remove_session(record: ClusterRecord) -> None:
    """Delete Ray's folder of this cluster, and the link to it, which Ray would not replace if it led nowhere."""
    session = Path(record.session_directory)
    if not (session.name.startswith("session_") and session.name.endswith(f"_{record.pid}")):
        return
    latest = session.with_name("session_latest")
    if latest.is_symlink() and latest.readlink().name == session.name:
        latest.unlink(missing_ok=True)
    shutil.rmtree(session, ignore_errors=True)


def _on_another_host(run_directory: Path, record: ClusterRecord) -> str:
    return (
        f"{run_directory}: its Ray cluster is on host {record.host} (process {record.pid}), on that host's loopback. "
        f"Run this command there, or start all services with --address of a Ray cluster that spans the hosts. "
        f"If that cluster is gone, remove {run_directory / 'cluster.json'}."
    )


def _end_of_log(run_directory: Path, num_lines: int = 20) -> str:
    log = run_directory / "logs" / "ray.log"
    if not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]
    return "\n".join([f"{log}:", *lines])
