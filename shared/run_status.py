"""`seqrelay status` and `seqrelay stop`: what a run is doing, and how it is asked to end.

A live run is asked through its hub; one that nobody serves is read from its ledger.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from shared.cluster import join, read_cluster, stop_cluster
from shared.config import Config
from shared.config_file import load_resolved
from shared.errors import ConfigError, RunFailed
from shared.hub_state import HubStatus, ledger_status
from shared.ledger import Ledger
from shared.ledger_rows import LedgerRules
from shared.run_directory import CONFIG_FILE
from shared.run_files import read_evaluations, read_ledger

_POLL_S = 1.0
_LOOK_AGAIN_S = 0.2
_SERVICE_GRACE_S = 20.0
_HUB_BACK_S = 8.0  # a killed hub is back in 2 to 5 s
_SILENT_S = 15.0  # a learner gives a sign of life every second
_HUB_ANSWERS_S = 10.0
_CLUSTER_GRACE_S = 10.0


def status(run_directory: Path, address: str | None) -> tuple[HubStatus, bool]:
    """The run at this instant, and whether a hub serves it. ConfigError when its cluster does not let us in."""
    config = load_resolved(run_directory / CONFIG_FILE)
    hub = _find_hub(config, run_directory, address)
    if hub is None:
        return recorded_status(config, run_directory), False
    import ray

    return ray.get(hub.status.remote(), timeout=_HUB_ANSWERS_S), True


def recorded_status(config: Config, run_directory: Path) -> HubStatus:
    """The same from the ledger alone: no workers, no learner, no rates."""
    learner = config.learner
    rules = LedgerRules(learner.prompts_per_step, config.sync.max_staleness, learner.steps, config.rollout.max_attempts)
    ledger = Ledger.from_rows(rules, *read_ledger(run_directory))
    evaluated = {report.version for report in read_evaluations(run_directory)}
    return ledger_status(ledger, ledger.finished and (not config.evaluation.samples or learner.steps in evaluated))


def as_json(status: HubStatus, served: bool) -> str:
    return json.dumps({"served": served, **asdict(status)})


def as_text(status: HubStatus, served: bool) -> str:
    """For a person; the first line is the account, which always balances."""
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(status.dropped.items()))
    lines = [
        f"groups    {status.issued} issued = {status.trained} trained + {sum(status.dropped.values())} dropped"
        f"{f' ({dropped})' if dropped else ''} + {status.pending} pending",
        f"version   {status.version} of {status.steps}, published {status.published_version}"
        + (f", incarnation {status.incarnation}" if status.incarnation else ""),
        f"staleness {_histogram(status.staleness)}",
    ]
    if not served:
        return "\n".join([*lines, f"nobody serves this run; it is {'finished' if status.finished else 'not finished'}"])
    learner = "none" if status.learner is None else f"{status.learner}, heard of {status.learner_age_s:.1f} s ago"
    lines += [
        f"rates     {status.groups_per_min:.1f} groups and {status.steps_per_min:.1f} steps in the last minute",
        f"learner   {learner}",
        f"workers   {len(status.workers)}",
    ]
    for name, worker in sorted(status.workers.items()):
        lines.append(
            f"  {name}: version {worker.active_version}, {worker.num_groups} groups, joined {worker.joined_s:.0f} s "
            f"ago, heard of {worker.age_s:.1f} s ago"
        )
    state = "finished" if status.finished else "stopping" if status.stopping else status.waiting_for
    lines.append(f"state     {state}")
    if status.failure:
        lines.append(f"failure   {status.failure}")
    return "\n".join(lines)


def stop(run_directory: Path, address: str | None, timeout_s: float, say: Callable[[str], None]) -> None:
    """Let both services finish what they hold and end, then end the run's own cluster, or its hub on the user's.

    RunFailed when they have not ended after `timeout_s` seconds; nothing is ended by force then. 0: do not ask, end.
    ConfigError for a cluster that is not to be ended from here.
    """
    config = load_resolved(run_directory / CONFIG_FILE)
    record = read_cluster(run_directory)
    if address is None and record is None:
        stop_cluster(run_directory, _CLUSTER_GRACE_S)  # removes what a killed one left
        say("no cluster of this run is up")
        return
    hub = _find_hub(config, run_directory, address) if timeout_s > 0 or address else None
    if hub is not None and timeout_s > 0:
        _drain(hub, timeout_s, say)
    if address is not None:
        _end_hub(hub)
    elif record is not None and (record.kind == "detached" or timeout_s == 0):
        deadline_s = time.monotonic() + _SERVICE_GRACE_S
        while timeout_s > 0 and _services_here(run_directory) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_AGAIN_S)
        stop_cluster(run_directory, _CLUSTER_GRACE_S)
        say("the run's cluster has ended")


def _end_hub(hub: Any | None) -> None:
    import ray

    if hub is not None:
        ray.kill(hub, no_restart=True)


def _histogram(staleness: dict[int, int]) -> str:
    total = sum(staleness.values())
    parts = (f"{age}: {count} ({count / total:.0%})" for age, count in staleness.items())
    return ", ".join(parts) or "no group is trained yet"


def _drain(hub: Any, timeout_s: float, say: Callable[[str], None]) -> None:
    """Returns once neither learner nor workers are there, or the hub is gone for good."""
    import ray

    deadline_s, answered_s, told = time.monotonic() + timeout_s, time.monotonic(), ""
    while time.monotonic() < answered_s + _HUB_BACK_S:  # else the cluster of `seqrelay train` has ended with it
        try:
            now: HubStatus = ray.get(hub.status.remote(), timeout=_HUB_ANSWERS_S)
            if not now.stopping:  # at first, and when a hub that was killed came back without it
                ray.get(hub.request_stop.remote(), timeout=_HUB_ANSWERS_S)
        except ray.exceptions.RayError:
            time.sleep(_LOOK_AGAIN_S)
            continue
        answered_s = time.monotonic()
        learner_lives = now.learner_age_s is not None and now.learner_age_s < _SILENT_S
        present = [*(["learner"] if learner_lives else []), *sorted(now.workers)]
        if not present and now.stopping:
            return
        line = f"waiting for {', '.join(present) or 'the services'}"
        if line != told:
            say(line)
            told = line
        if time.monotonic() > deadline_s:
            raise RunFailed(f"after {timeout_s:g} s: still {line}. Wait longer (--timeout), or --now ends them.")
        time.sleep(_POLL_S)


def _services_here(run_directory: Path) -> list[int]:
    """Process ids of this run's services on this host. They have left the hub already, and are about to end."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(run_directory) in words and {"learner.main", "rollout.main"}.intersection(words):
            found.append(process.pid)
    return found


def _find_hub(config: Config, run_directory: Path, address: str | None) -> Any | None:
    target = address or read_cluster(run_directory)
    if target is None:
        return None
    if not isinstance(target, str) and not target.is_here:
        raise ConfigError(f"{run_directory}: its cluster is on host {target.host}; run this command there.")
    join(target, config.run.name)
    from shared.hub_start import find_hub

    return find_hub(config.run.name)
