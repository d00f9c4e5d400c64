"""The words of docs/study_range.md; its tables are made by study_range_report."""

HEAD = """# What fills the clip range, and which range learns

`python scripts/study_range.py` makes this page: {settings}.
The objective, the calibrated range and the sized range are in [gspo.md](gspo.md). Ranges: *paper* 3e-4/4e-4, *middle*
3e-3/4e-3, *wide* 3e-2/4e-2, *sized* is the paper's with `clip.sizing = "drift"`. *fixed* is
`clip.calibration = "none"`, *calibrated* is `"measured"`, *recomputed anchor* is `learner.anchor = "recompute"`.

![rewards and clipped shares](study_range.png)"""

READING = """## What the data say

- **The paper's range is filled by whatever there is.** Without any mismatch nothing of a step's first mini-batch is
  clipped and half of each later one (50, 51, 55 %): one update moves log s by 2e-2, fifty times the range. With noise
  as of bfloat16 the first mini-batch loses as much (46 % of the good, 50 % of the bad samples), before any update; 95 %
  of the variance of its log s is mismatch.
- **Calibration gives the first mini-batch back.** With the paper's range and noise it clips 3 % there instead of 49 %
  (1.1 % of the good and 4.7 % of the bad samples; 2.5 % is meant: good samples are surer and have less noise, and one
  spread is used for all). Without mismatch it changes no figure at all.
- **On the tiny model that hardly shows in the reward.** Paper's range with noise: +0.035, +0.027, +0.005 by seed, but
  the seeds overlap. Losing a random half of the samples costs signal, not direction.
- **On SmolLM2 in bfloat16 it shows where the range is narrow** (one seed, last 5 of 15 steps). *middle*: 0.17 fixed,
  0.45 calibrated, 0.39 with a recomputed anchor; chance is 0.03. The fixed range clips 60 % of the first mini-batch,
  the calibrated one 14 %, with a step of staleness in it. *wide* (two seeds): 0.49 and 0.64 fixed, 0.53 and 0.73
  calibrated, 0.56 and 0.75 with a recomputed anchor. In both seeds calibrated lies above fixed and recomputed above
  calibrated, but a seed moves all three by 0.2, so no case is wholly beyond another. Clipped are 22 % of the first
  mini-batch when fixed and 7 % when calibrated.
- **Calibration does not mend a range that is wide already on the tiny model.** *wide* is as wide as the noise there:
  calibrated against fixed -0.022, -0.017, +0.005 by seed. It clips little of anything.
- **The sized range finds the hand-picked one.** It starts from the paper's and ends 95 times as wide, 2.9e-2/3.9e-2,
  where *wide* is 3e-2/4e-2. Without mismatch all its seeds are above all those of the paper's range (+0.02). With noise
  and no calibration it grows to 114; with calibration it stays near 1, since what is added for noise is room enough.
- **The recomputed anchor buys little over calibration, for a second forward pass.** On the tiny model it is the
  engine's anchor to three digits without noise; with noise it removes the mismatch, as it should, and the reward is
  that of the fixed and of the calibrated range within the seeds. On SmolLM2 it is far better than the fixed *middle*
  range, 0.07 below the calibrated one there, and 0.03 and 0.02 above it on *wide*. It takes 24 % of the training time
  (*wide*, all groups packed together), 43 % when each group was packed by itself (*middle*, and the tiny model: 53 %).
- **In float32, one step behind, the widest range learns best on SmolLM2** (one seed): 0.88 against 0.63 with *middle*,
  far beyond chance (0.03). With *middle* two thirds of the first mini-batch are clipped by staleness alone. So *wide*
  is the smallest of these ranges that learns as well as the widest, and the demo's.
- **Precision mattered as much as the range.** The same case in float32 and in bfloat16, seed 0: 0.63 and 0.17
  (*middle*, fixed), 0.88 and 0.49 (*wide*, fixed; 0.53 calibrated). Calibration makes bfloat16 learn with a narrow
  range; it does not make it float32."""

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

- Three seeds and 40 steps of one tiny model on one task. A held-out pass rate is of 500 samples a seed: its standard
  error is 0.02, as large as the differences between cases.
- The noise of the tiny model is put on, with the size and the shape measured on SmolLM2 in bfloat16
  ([study_mismatch.md](study_mismatch.md)), each token independently. A real bfloat16 Mixture of Experts may route
  tokens differently on either side, which is no such noise.
- SmolLM2 was run with one seed a case, with two for *wide* in bfloat16, where a second seed changed every case by 0.15
  to 0.2; chance, in the tables, is that of sampling alone. The paper's range was not run on it in float32: *middle*,
  ten times wider, is too narrow already.
- Answers are short: 3.5 tokens (tiny MoE) and 10 (SmolLM2). At 500 tokens the noise is a seventh of that at 10, the
  bias as large, and drift may be anything.
- Which range is best for the final model is not asked: no run is long enough to get unstable."""
