"""What a weight sync costs, part by part, against a memcpy of the same bytes, and what its probe costs beside a step.

python scripts/bench_sync.py --json                     # scripts/configs/demo.toml, 5 syncs

The real parts in one process, nothing else running: the learner publishes into Ray's object store, the engine's side
fetches, checks digests and stages, the engine pauses, loads and resumes, then the probe is scored for the verdict. All
seconds are medians over the syncs. `probe_share` relates the probe to one step of the same config in the same run:
engine seconds to generating the step's groups, learner seconds to training them.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from shared.cluster import private_cluster
from shared.config_file import load_config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=Path("scripts/configs/demo.toml"))
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args()
    config = load_config(options.config, options.overrides)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(tempfile.mkdtemp(prefix="seqrelay-bench-"))
    try:
        with private_cluster(folder, "bench", folder):
            import sync_parts  # Ray must know the cluster's settings before it is imported

            report = asyncio.run(sync_parts.measure(config, options.syncs, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report, indent=None if options.json else 2))
    print(f"probe: {report['probe_share']['engine']:.1%} of generating a step, "
          f"{report['probe_share']['learner']:.1%} of training it", file=sys.stderr)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
