"""Where the time of the loop goes: each side generating, training, syncing and idle, at staleness 0 and 1.

python scripts/bench_loop.py --json                     # scripts/configs/demo.toml, 6 steps

Each arm is one real run of the same work: same prompts, seeds and number of steps. Times run from the first request to
the last publish, so that starting the engine does not count. The figure to look at is `wall_over_busiest`: wall time
over max(generate, train); 1.0 is a loop that hides the cheaper side completely, and the synchronous loop is near 2.0
when both cost the same.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.records import Span
from shared.run_files import read_metrics, read_probes, read_spans, read_syncs
from shared.spans import covered_s, overlap_s, union

_SYNC_SPANS = ("fetch", "stage", "load", "probe")
_SYNC_PARTS = ("fetch_s", "digest_s", "stage_s", "pause_s", "load_s", "resume_s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=Path("scripts/configs/demo.toml"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args()
    arms = {}
    with tempfile.TemporaryDirectory(prefix="seqrelay-bench-") as folder:
        for staleness in options.staleness:
            name = f"staleness-{staleness}"
            overrides = [
                *options.overrides, f"run.directory={folder}", f"run.name={name}", f"learner.steps={options.steps}",
                f"sync.max_staleness={staleness}", "evaluation.samples=0",
            ]  # fmt: skip
            command = [sys.executable, "-m", "shared.cli", "train", str(options.config), *overrides]
            subprocess.run(command, check=True, stdout=sys.stderr)
            arms[name] = measure(Path(folder) / name)
    report: dict[str, Any] = {"config": str(options.config), "steps": options.steps, "arms": arms}
    if len(arms) == 2:
        first, second = arms.values()
        report["wall_ratio"] = first["wall_s"] / second["wall_s"]
    print(json.dumps(report, indent=None if options.json else 2))
    return 0


def measure(run_directory: Path) -> dict[str, Any]:
    """Seconds by side and by cause of one finished run."""
    spans = read_spans(run_directory)
    start_s = min(s.start_s for s in spans if s.name == "generate")
    end_s = max(s.end_s for s in spans if s.name == "publish")
    spans = [
        replace(s, start_s=max(s.start_s, start_s), end_s=min(s.end_s, end_s))
        for s in spans
        if s.end_s > start_s and s.start_s < end_s
    ]
    generate = union(s for s in spans if s.name == "generate")
    train = union(s for s in spans if s.name == "train")
    wall_s, generate_s, train_s = end_s - start_s, covered_s(generate), covered_s(train)
    syncs = [s for s in read_syncs(run_directory) if s.num_bytes]
    return {
        "wall_s": wall_s,
        "wall_over_busiest": wall_s / max(generate_s, train_s),
        "both_busy_s": overlap_s(generate, train),
        "rollout": {
            "generate_s": generate_s,
            "sync_s": _seconds(spans, _SYNC_SPANS),
            "idle_s": wall_s - covered_s(union(s for s in spans if s.name in ("generate", "reward", *_SYNC_SPANS))),
        },
        "learner": {
            "train_s": train_s,
            "publish_s": _seconds(spans, ["publish"]),
            "idle_s": _seconds(spans, ["wait"]),
        },
        "sync": {
            "count": len(syncs),
            "bytes_each": syncs[0].num_bytes if syncs else 0,
            **{part: sum(getattr(s, part) for s in syncs) for part in _SYNC_PARTS},
            "probe_s": sum(p.probe_s for p in read_probes(run_directory)),
        },
        "completion_tokens": sum(row["completion_tokens"] for row in read_metrics(run_directory)),
    }


def _seconds(spans: Sequence[Span], names: Sequence[str]) -> float:
    return covered_s(union(s for s in spans if s.name in names))


if __name__ == "__main__":
    sys.exit(main())
