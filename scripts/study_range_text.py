"""The words of docs/study_range.md; its tables are made by study_range_report."""

HEAD = """# What fills the clip range, and which range learns

`python scripts/study_range.py` makes this page: {settings}. The objective, the calibrated range and the sized range are
in [gspo.md](gspo.md). Ranges: *paper* 3e-4/4e-4, *middle* 3e-3/4e-3, *wide* 3e-2/4e-2, *sized* = paper's with
`clip.sizing = "drift"`; *fixed* is `clip.calibration = "none"`, *calibrated* is `"measured"`, *recomputed anchor* is
`learner.anchor = "recompute"`.

![rewards and clipped shares](study_range.png)"""

READING = """## What the data say

To be written."""

TABLES = """## How to read the tables

- A figure is the mean over seeds of a mean over steps; ± is the standard deviation between seeds. All cases of one seed
  get the same prompts and the same random numbers for sampling: differences by seed say more than those of means.
- "Every seed beyond every seed" is the only ranking made here: all seeds of one case lie above (below) all of the
  other. With three seeds each, chance does that once in ten comparisons, with two once in three. "overlap" claims
  nothing.
- Clipped shares are of sequences with A ≠ 0. The first mini-batch of a step shows mismatch and staleness, the later
  ones the step's own updates too.
- "added for noise" is z spread / sqrt(T), what calibration adds on either side; "scale at the end" is the factor on the
  configured range.
- The parts of the variance of log s are those of the first mini-batch, against the engine's numbers, also where the
  anchor is recomputed. "rms of log s by mini-batch" is of the ratio that is trained, with the anchor in use.
- Seconds a step are wall time on a machine that did other work at the same moment, up to several times its cores: they
  do not compare cases. The share of training that recomputing takes is within a run. Nothing else depends on time."""

LIMITS = """## What they cannot say

- Three seeds and 40 steps of one tiny model on one task, and fewer of SmolLM2. A held-out pass rate is of 500 samples:
  its standard error is 0.02, as large as all differences between cases.
- The noise of the tiny model is put on, with the size and the shape measured on SmolLM2 in bfloat16
  ([study_mismatch.md](study_mismatch.md)), each token independently. A real bfloat16 Mixture of Experts may route
  tokens differently on either side, which is no such noise.
- Answers are short: 3 tokens (tiny MoE) and 10 (SmolLM2). At 500 tokens noise of the same size per token is a tenth,
  the bias is not smaller, and drift may be.
- Which range is best for the final model is not asked: no run is long enough to get unstable."""
