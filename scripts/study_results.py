"""What the studies ran, one small Parquet file a run: found again by what decided it, so that a study resumes.

A run is decided by its study, the study's version (raised when results would change), its arm and its settings. Their
digest is in the file's name and all four are in its metadata; the two must agree. A file appears only when complete.

Example: arm "bfloat16" of study "mismatch" is `<folder>/bfloat16-3fd09c2b1a77.parquet`.
"""

import datetime
import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

STUDIES = Path("scripts/studies")
_DECIDED_BY, _MADE = b"study.decided_by", b"study.made"
_DIGEST_CHARACTERS = 12
_ARM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class Run:
    """A finished run: its rows, when (`on`), on what (`machine`) and at which cost it was made, and the file."""

    arm: str
    table: pa.Table
    made: Mapping[str, Any]
    path: Path


class Results:
    """The runs of one version of one study, in one folder."""

    def __init__(self, study: str, version: int, folder: Path | None = None) -> None:
        self._study, self._version = study, version
        self.folder = folder or STUDIES / study

    def path(self, arm: str, settings: Mapping[str, Any]) -> Path:
        """Where that run is, or will be. ValueError when the arm's name does not suit a file."""
        if not _ARM.fullmatch(arm):
            raise ValueError(f"arm {arm!r}: use letters, digits and . _ + - only, for it names a file")
        digest = hashlib.sha256(self._decided_by(arm, settings).encode()).hexdigest()[:_DIGEST_CHARACTERS]
        return self.folder / f"{arm}-{digest}.parquet"

    def find(self, arm: str, settings: Mapping[str, Any]) -> Run | None:
        """The finished run of exactly this arm and these settings; None if it is still to be made.

        ValueError when the file holds another run than its name says.
        """
        path = self.path(arm, settings)
        if not path.is_file():
            return None
        table = pq.read_table(path)
        metadata = table.schema.metadata or {}
        if metadata.get(_DECIDED_BY, b"").decode() != self._decided_by(arm, settings):
            raise ValueError(f"{path}: its metadata is of another run than its name says; remove it")
        return Run(arm, table, json.loads(metadata[_MADE]), path)

    def write(
        self, arm: str, settings: Mapping[str, Any], table: pa.Table, cost: Mapping[str, float] | None = None
    ) -> Run:
        """Keep a finished run, in one piece or not at all; `cost` joins what is noted of its making."""
        path = self.path(arm, settings)
        made = {"on": datetime.date.today().isoformat(), "machine": machine(), **(cost or {})}
        metadata = {_DECIDED_BY: self._decided_by(arm, settings).encode(), _MADE: json.dumps(made).encode()}
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=".new", dir=self.folder)
        os.close(handle)
        try:
            pq.write_table(table.replace_schema_metadata(metadata), temporary, compression="zstd", compression_level=9)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return Run(arm, table, made, path)

    def _decided_by(self, arm: str, settings: Mapping[str, Any]) -> str:
        whole = {"study": self._study, "version": self._version, "arm": arm, "settings": dict(settings)}
        return json.dumps(whole, sort_keys=True)


def machine() -> str:
    """This host in words, such as "2 cores of AMD EPYC with avx512_bf16"."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{os.cpu_count()} cores of {platform.machine()}"
    name = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    flags = [flag for flag in ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16") if f" {flag} " in text]
    model = name[1].strip() if name else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores of {model} with {', '.join(flags) or 'no 16-bit arithmetic'}"
