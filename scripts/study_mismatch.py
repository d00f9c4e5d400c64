"""Engine against learner at equal weights: how far they are apart, and what the clip range makes of it.

python scripts/study_mismatch.py                  # makes what is missing (20 CPU minutes, 4 engine starts), reports
python scripts/study_mismatch.py --report-only    # reads scripts/studies/mismatch, writes docs/study_mismatch.*
python scripts/study_mismatch.py --short          # a few sequences of two models, writes nothing

No weights are ever updated: sequences are sampled by vLLM and scored by the learner under the model's own weights, in
every precision mode. The models come from `make models`.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from study_mismatch_report import report
from study_mismatch_runs import SMOLLM2, TINY_MOE, Samples, Scores, run_all
from study_progress import progress_bars
from study_results import Results
from study_runner import vllm_engine

STUDY, VERSION = "mismatch", 1

# Sampled and scored; bfloat16 samples are scored by a float32 learner too, which tells the engine's part.
TEMPERATURES = (1.0, 0.6)
SAMPLED = (
    (TINY_MOE, "float32", (20, 12)),
    (SMOLLM2, "float32", (20, 12)),
    (SMOLLM2, "bfloat16", (84, 50)),
    (SMOLLM2, "float16", (20, 12)),
)
SCORED_BY = {
    "float32": ("float32",),
    "bfloat16": ("bfloat16", "bfloat16-float32-head", "float32"),
    "float16": ("float16",),
}
NUM_BY_FLOAT32 = 24


def plan(short: bool) -> tuple[list[Samples], list[Scores]]:
    """Every run of the study."""
    kinds = [(TINY_MOE, "float32", (4, 4)), (SMOLLM2, "bfloat16", (6, 6))] if short else SAMPLED
    max_tokens = 48 if short else 512
    all_samples = [
        Samples(model, precision, temperature, num_sequences, max_tokens)
        for model, precision, numbers in kinds
        for temperature, num_sequences in zip(TEMPERATURES, numbers, strict=True)
    ]
    all_scores = []
    for samples in all_samples:
        for precision in SCORED_BY[samples.precision]:
            is_other = samples.precision != "float32" and precision == "float32"
            num_sequences = min(samples.num_sequences, NUM_BY_FLOAT32) if is_other else samples.num_sequences
            all_scores.append(Scores(samples, precision, num_sequences))
    return all_samples, all_scores


def make_runs(all_samples: Sequence[Samples], all_scores: Sequence[Scores], results: Results) -> None:
    """Make what is missing, with a bar for each part."""
    with progress_bars() as progress:
        asyncio.run(run_all(all_samples, all_scores, results, vllm_engine, progress))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="a few sequences; writes nothing")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    all_samples, all_scores = plan(options.short)
    with tempfile.TemporaryDirectory(prefix="seqrelay-study-") as temporary:
        results = Results(STUDY, VERSION, Path(temporary) if options.short else None)
        if not options.report_only:
            make_runs(all_samples, all_scores, results)
        failed = report(all_scores, results, None if options.short else Path("docs"))
        return 0 if options.short else failed  # a few sequences decide nothing


if __name__ == "__main__":
    sys.exit(main())
