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
  get the same prompts and the same random numbers for sampling, so differences seed by seed say more than those of means.
- "Every seed beyond every seed" is the only ranking made here: all seeds of one case lie above (below) all of the other.
  With three seeds each, chance does that once in ten comparisons, for either sign; "overlap" claims nothing.
- Clipped shares are of sequences with A ≠ 0. The first mini-batch of a step shows mismatch and staleness, the later ones
  the step's own updates too.
- The parts of the variance of log s are those of the first mini-batch, against the engine's numbers, also where the
  anchor is recomputed. "rms of log s by mini-batch" is of the ratio that is trained, with the anchor in use.
- Seconds a step are wall time on a machine that did other work at the same moment, up to several times its cores: they
  do not compare cases. Within one run the share of training that recomputing takes can be compared.
  No other figure depends on time."""

LIMITS = """## What they cannot say"""
