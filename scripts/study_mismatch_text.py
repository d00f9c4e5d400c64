"""The words of docs/study_mismatch.md around its tables. `{name}` is a table or a figure of the report."""

TEXT = """\
# Engine against learner at equal weights

vLLM samples the completions, and the learner trains on the log-probabilities that vLLM reported. Both hold the same
weights and compute them differently. This study updates nothing: it asks how far the two are apart before any training,
what a clip range makes of that, and whether the calibrated range of [gspo.md](gspo.md) does what it is for.

For a token that the engine drew, d = log pi_learner - log pi_engine, in nats. For a completion of T tokens, log s of
GSPO (arXiv 2507.18071, eq. 7) is the mean of its d. With equal weights every log s should be 0. A sample with A > 0
loses its gradient when log s is above the range, one with A < 0 when it is below.

Everything here was made on {machine}, {date}, by

```bash
make models
.venv/bin/python scripts/study_mismatch.py                  # samples, scores, and what follows
.venv/bin/python scripts/study_mismatch.py --report-only    # the tables alone, from scripts/studies/mismatch
```

and each table below by the second command. The first took {engine_min} CPU minutes of the engine and
{learner_min} of the learner, side by side.

![Noise before any update, what is clipped, and where the noise comes from](study_mismatch.png)

## What it says

- **float32: no mismatch to speak of.** {f32_abs} nats a token on SmolLM2, {moe_abs} on a Mixture-of-Experts model. The
  paper's range of 3e-4/4e-4 clips nothing.
- **bfloat16: the paper's range clips noise.** Tokens are {bf16_abs} nats apart in the mean. Before any update,
  3e-4/4e-4 cuts {fixed_good_16} of the good and {fixed_bad_16} of the bad samples of 16 tokens. Longer samples do not
  cure it: at 512 tokens it is {fixed_good_512} of the good and {fixed_bad_512} of the bad ones. The noise of log s
  shrinks with sqrt(T), its bias, minus the KL of the two, does not; so bad samples lose their gradient more and more
  often than good ones.
- **The calibrated range does what it is for.** {num_passed} of {num_lines} lines of the acceptance pass, {num_failed}
  fail, {num_open} are open because too few windows of that length tell. At unchanged weights it clips
  {calibrated_range} of either sign (bfloat16, 16 to 64 tokens, both temperatures; 2.5 % is meant), and of samples whose
  policy really moved by three half-widths of the range it clips at least {least_shifted}.
- **What it cannot do:** see a move smaller than the noise. The half-width is {width_16} a token at 16 tokens and
  {width_512} at 512, whatever the configured range.
- **Errors of tokens are nearly independent**, so dividing by sqrt(T) is right: the deviation of log s over windows,
  times sqrt(T), is {independence} of the spread of tokens (bfloat16, temperature 1, 9 to 512 tokens).
- **They are not equally large.** A token of probability over 0.99 has a hundredth of the spread of an improbable one:
  noise in the logits moves a sure token only by the probability that is left. So the range, right on average, is too
  wide for completions of sure tokens and too narrow for the others. At temperature 1 that hardly shows. At 0.6, where
  half of all tokens are sure, it clips (either sign, 16 tokens; 5 % is meant) {surest_uniform} of the surest third of
  windows and {least_sure_uniform} of the least sure one. A range that takes the spread of each token as
  c min(1, 1.4 (1 - p)) would clip {surest_by_token} and {least_sure_by_token}; the learner does not do that yet.
- **Logits in float32 help a little** (`bfloat16-float32-head`): spread {head_spread} instead of {bf16_spread}, close
  to the {other_spread} of a learner wholly in float32. What is left is the engine's own rounding. The cost is
  {head_cost} of the learner's scoring speed.
- **float16 is {f16_factor} times closer than bfloat16** (its mantissa has three more bits), but this CPU emulates it.
  It is for hardware that has it.

## Tokens

`spread` and `k3` (mean of exp(d) - 1 - d) are what calibrates, the largest 2 of 1,000 differences cut to the next one's
size. The mean of d is -k3 if engine and learner are right; its error is over sequences, which are independent.
Temperature 1 and 0.6, `mode` is `model.precision` unless it names engine and learner apart.

{tokens}

By probability with which the engine drew the token:

{probability}

## Sequences

A window of T consecutive tokens is a sample of T tokens: E[exp(sum of d)] = 1 holds after any prefix. Windows do not
overlap. |log s|, nats a token:

{log_s}

Standard deviation of log s over windows, times sqrt(T), over the spread of tokens; 1 if the errors of tokens are
independent:

{independence_table}

## What a clip range makes of it

Percent of windows that would be clipped if their A were positive, and if it were negative, with 95 % intervals: a
bootstrap that draws whole sequences, because windows of one sequence depend on each other. Where nothing is clipped,
the upper end is that of so many independent sequences. In float32 neither range clips anything: the largest |log s| of
any window is {largest_exact}. First the paper's range, 3e-4/4e-4:

{fixed}

The same range, calibrated with z = 1.96 on one random half of the sequences and applied to the other, both ways (also
within each draw of the bootstrap):

{calibrated}

Half-width that calibration adds, z spread / sqrt(T), nats a token:

{half_width}

Share clipped after a planted shift of the policy by three half-widths, of the sign that it hurts:

{shifted}

By how sure the tokens of a window are: percent clipped on either side, 5 being meant, by the calibrated range and by
one that takes the spread of a token of probability p as c min(1, 1.4 (1 - p)), with c from the same measurement:

{sureness}

## Acceptance

Set before the study was run, for bfloat16 from 16 tokens on, for each sign: the interval of the clipped share meets 1
to 5 %, neither sign is clipped more than 2.5 times as often as the other, and the planted shift is clipped in 95 % of
windows. "open": the counts are uneven, but the interval of their ratio holds ratios below 2.5.

{acceptance}

## Cost

Tokens a second while both sides and others used this machine, and tokens a CPU second, which does not count the others
(the engine's are those of all its processes; some of them only wait, busily). The learner's are of scoring alone,
without a backward pass.

{cost}

## How

- SmolLM2-135M-Instruct, eight prompts (four questions through its chat template, four openings continued as they are),
  completions of up to 512 tokens; those that the model ended earlier are kept ({num_long} of {num_bf16} bfloat16
  completions reached 512). vLLM 0.32 samples up to 84 at once, one thread; the learner is `learner.policy` with
  `learner.packing`, one thread.
- The tiny MoE answers sums in four tokens. So that it runs on, it is served with another end token, one it never
  samples; the weights are the same. Its context holds 512 tokens, prompt included, so there is no window of 512. In
  bfloat16 its engine sometimes crashes on a CPU: not run.
- `scripts/studies/mismatch` holds every sample with both sides' log-probabilities, a Parquet file a run.
"""
