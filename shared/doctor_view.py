"""What a person, or a machine, sees of `seqrelay doctor`: what it is doing, and the report."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from shared.config import Config
from shared.doctor import UNEXPLAINED, Finding, conclusion, worst
from shared.examination import EXAMINATION_FILE, Examination, SampleText
from shared.run_files import read_rows

_STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}
_SHOWN_CHARACTERS = 100
_FILE_CHARACTERS = 200  # the width of a table that goes to no terminal


class Stages:
    """A `launch.View` that says what the examination is doing, from the files that appear in its run directory."""

    def __init__(self, run_directory: Path, quiet: bool) -> None:
        self._run_directory, self._quiet = run_directory, quiet
        self._console = Console(highlight=False)
        self._status = Status("", console=self._console)
        self._started_s, self._shown = time.monotonic(), ""
        if not quiet and self._console.is_terminal:
            self._status.start()
        self.update()

    def update(self) -> None:
        doing = stage(self._run_directory)
        elapsed_s = time.monotonic() - self._started_s
        if self._console.is_terminal:
            self._status.update(f"{doing}, {elapsed_s:.0f} s")
        elif doing != self._shown:
            self.say(f"{elapsed_s:4.0f} s  {doing}")
        self._shown = doing

    def say(self, line: str) -> None:
        if not self._quiet:
            self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        self._status.stop()


def stage(run_directory: Path) -> str:
    """What the examination in this run directory is doing now."""
    events = {row["name"] for row in read_rows(run_directory / "events.jsonl")}
    if "learner_left" in events:
        return "ending the engine"
    if read_rows(run_directory / "syncs.jsonl"):
        return "sampling under the weights that were loaded"
    if (run_directory / EXAMINATION_FILE).exists():
        return "sending the weights to the engine"
    return "sampling, and scoring the samples" if "joined" in events else "starting engine and learner"


def show(findings: Sequence[Finding], found: Examination | None, config: Config, failure: str) -> None:
    """The report for a person: findings, samples, the failure that no finding explains, a last sentence."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_CHARACTERS)
    console.print(_table(findings))
    for sample in found.rewards.samples if found and found.rewards else ():
        console.print(Text(_line(sample)), soft_wrap=True)
    if any(finding.name == UNEXPLAINED for finding in findings):
        console.print(Text(failure), soft_wrap=True)
    console.print(Text(conclusion(findings, config, found)), soft_wrap=True)


def _table(findings: Sequence[Finding]) -> Table:
    """A line a finding; its remedy on a line of its own, so that neither is squeezed."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        style = _STYLES[finding.verdict]
        table.add_row(Text(finding.verdict, style=style), finding.name, Text(finding.value))
        if finding.remedy:
            table.add_row("", "", Text(finding.remedy, style=style))
    return table


def as_json(findings: Sequence[Finding], found: Examination | None, config: Config, failure: str) -> str:
    """One JSON object: verdict, findings, everything that was measured (shared.examination), and its limit."""
    return json.dumps({
        "verdict": worst(findings),
        "conclusion": conclusion(findings, config, found),
        "findings": [asdict(finding) for finding in findings],
        "measured": asdict(found) if found else None,
        "max_mismatch": config.max_mismatch,
        "failure": failure,
    })  # fmt: skip


def _line(sample: SampleText) -> str:
    reward = "unscored" if sample.reward is None else f"{sample.reward:g}"
    prompt, completion = sample.prompt, sample.completion
    if len(prompt) > _SHOWN_CHARACTERS:
        prompt = "..." + prompt[-_SHOWN_CHARACTERS:]
    if len(completion) > _SHOWN_CHARACTERS:
        completion = completion[:_SHOWN_CHARACTERS] + "..."
    return f"reward {reward}: " + " -> ".join(json.dumps(text, ensure_ascii=False) for text in (prompt, completion))
