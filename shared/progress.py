"""What a person sees while a run goes on: a line a step, read from the files that the hub appends to."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from shared.agreement import refusal, summary
from shared.config import Config
from shared.records import ProbeReport
from shared.run_files import probe_of, sampling_of

_COLUMNS = (
    ("step", 5), ("reward", 7), ("clip +", 7), ("clip -", 7), ("log s", 9), ("spread", 8), ("stale", 6), ("len", 6),
    ("gen tok/s", 10), ("train tok/s", 12), ("wait s", 7), ("step s", 7), ("sync s", 7),
)  # fmt: skip


_OUR_LINE = re.compile(r"\d\d:\d\d:\d\d,\d+ (rollout|shared)\S* (INFO|WARNING|ERROR) .*")


class Progress:
    """Shows new metrics lines on each `update`."""

    def __init__(self, config: Config, run_directory: Path, json_lines: bool) -> None:
        self._config = config
        self._num_steps = config.learner.steps
        self._run_directory = run_directory
        self._json_lines = json_lines
        self._console = Console(highlight=False)
        self._files = {
            kind: _Tail(run_directory / f"{kind}.jsonl")
            for kind in ("checks", "metrics", "syncs", "probes", "evaluations")
        }
        self._sync_s: dict[int, float] = {}
        self._num_verified, self._max_abs = 0, 0.0
        self._step = 0
        self._header_shown = False
        self._started_s = time.monotonic()
        self._status = Status("", console=self._console)
        if json_lines:
            return
        if self._console.is_terminal:
            self._status.start()
        else:
            self._console.print(f"starting engine and learner; logs in {run_directory / 'logs'}", soft_wrap=True)

    def update(self) -> None:
        """Print what was appended since the last call."""
        for kind, tail in self._files.items():
            rows = list(tail.new_rows())
            for row in rows:
                self._show(kind, row)
            if kind == "checks" and rows and not self._json_lines:
                self._console.print(summary([sampling_of(row) for row in rows], self._config), soft_wrap=True)
        elapsed_s = time.monotonic() - self._started_s
        doing = f"step {self._step} of {self._num_steps}" if self._header_shown else "starting engine and learner"
        self._status.update(f"{doing}, {elapsed_s:.0f} s; logs in {self._run_directory / 'logs'}")

    def say(self, line: str) -> None:
        """A line for a person."""
        if not self._json_lines:
            self._console.print(line, soft_wrap=True)

    def verified(self) -> str:
        """How many loads of weights the workers verified so far, and how far engine and learner were apart at most."""
        return (
            f"{self._num_verified} loads of new weights verified, single log-probabilities at most "
            f"{_small(self._max_abs)} nats apart"
        )

    def close(self) -> None:
        """Give the terminal back as it was."""
        self._status.stop()

    def _show(self, kind: str, row: dict[str, Any]) -> None:
        if self._json_lines:
            print(json.dumps({"kind": kind, **row}), flush=True)
        elif kind == "syncs":
            total_s = sum(row[part] for part in ("fetch_s", "digest_s", "stage_s", "pause_s", "load_s", "resume_s"))
            self._sync_s[row["version"]] = total_s
        elif kind == "probes":
            self._count(probe_of(row))
        elif kind == "evaluations":
            scored = row["num_samples"] - row["num_unscored"]
            rate = f"{row['num_passed'] / scored:.2f}" if scored else "-"
            self._console.print(f"held-out pass rate at version {row['version']}: {rate} ({scored} samples)")
        elif kind == "metrics":
            self._show_step(row)

    def _count(self, probe: ProbeReport) -> None:
        if probe.released:
            self._num_verified += 1
            self._max_abs = max(self._max_abs, probe.max_abs)
        else:
            self._console.print(refusal(probe, self._config), soft_wrap=True)

    def _show_step(self, row: dict[str, Any]) -> None:
        if not self._header_shown:
            self._console.print("".join(f"{name:>{width}}" for name, width in _COLUMNS), style="bold", soft_wrap=True)
            self._header_shown = True
        self._step = row["step"] + 1
        cells = (
            str(row["step"]), _number(row["reward_mean"], 3), _number(row["clip_fraction_positive"], 2),
            _number(row["clip_fraction_negative"], 2), _number(row["log_ratio_mean"], 5),
            _small(row["mismatch_spread"]),
            _number(row["staleness_mean"], 2), _number(row["completion_length_mean"], 1),
            _number(row["rollout_tokens_per_s"], 0), _number(row["learner_tokens_per_s"], 0),
            _number(row["wait_s"], 1), _number(row["step_s"], 1), _number(self._sync_s.get(row["step"]), 2),
        )  # fmt: skip
        line = "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
        self._console.print(line, soft_wrap=True)


class LogLines:
    """Shows what a service of ours logs; what vLLM and Ray print stays in the file."""

    def __init__(self, log: Path) -> None:
        self._tail = _Tail(log)
        self._console = Console(highlight=False)
        self.say(f"log: {log}")

    def update(self) -> None:
        for line in self._tail.new_lines():
            if found := _OUR_LINE.search(line):
                self.say(found[0])

    def say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)

    def close(self) -> None:
        pass


class _Tail:
    """The complete lines appended to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_rows(self) -> Iterator[dict[str, Any]]:
        yield from map(json.loads, self.new_lines())

    def new_lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        end = text.rfind(b"\n") + 1
        self._offset += end
        return text[:end].decode("utf-8", errors="replace").splitlines()


def _small(value: float | None) -> str:
    """Two digits of a number that may be anything from 1e-6 to 1."""
    return "-" if value is None else f"{value:.2g}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
