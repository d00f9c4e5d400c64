"""One learner step: groups in, optimizer updates on the policy, a typed account out. Knows nothing of Ray or files.

    groups -> advantages -> mini-batches of whole groups -> micro-batches -> forward/backward -> one update each

Every mini-batch has its own denominator, counted before it is split. Sequences with A = 0 are in it and in the
metrics; they have no gradient, so they only go forward. Each trained token goes through the model once a step
(activation checkpointing off), twice with `learner.anchor = "recompute"`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from learner.advantages import group_advantages
from learner.attribution import ScoredRollout, measured_mismatch
from learner.calibration import after_step
from learner.objectives import ObjectiveMetrics, gspo
from learner.optim import Optimizer
from learner.packing import MicroBatch, pack, split_minibatches
from learner.policy import Policy
from shared.config import Config, LearnerConfig
from shared.errors import HubError
from shared.records import Calibration, Float32Array, Group, Int32Array, Rollout, StepPlan

Outcome = Literal["updated", "no_signal", "non_finite"]
Objective = Callable[..., tuple[Tensor, ObjectiveMetrics]]

OBJECTIVES: dict[str, Objective] = {"gspo": gspo}


@dataclass(frozen=True)
class MiniBatchResult:
    """One mini-batch. `outcome`: "updated"; "no_signal" (no sequence with A != 0, so no update); or "non_finite" (the
    gradient was not finite and was thrown away). `grad_norm` and `lr` are None with "no_signal".
    """

    metrics: ObjectiveMetrics
    loss: float
    outcome: Outcome
    grad_norm: float | None = None
    lr: float | None = None


@dataclass(frozen=True)
class StepResult:
    """What a step did. `minibatches` in the order they were trained; the first one saw the step's starting weights.

    `first` are the first mini-batch's rollouts with the log-probabilities that its forward pass gave them: what engine,
    staleness and nothing else moved. `num_unscored` and `num_empty` rollouts were excluded. Seconds by part sum to
    nearly all of the step; `anchor_s` is the second forward pass of "recompute".
    """

    minibatches: tuple[MiniBatchResult, ...]
    first: tuple[ScoredRollout, ...]
    num_unscored: int
    num_empty: int
    pack_s: float
    anchor_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def num_updates(self) -> int:
        """Optimizer updates applied. 0: the weights are those from before the step."""
        return sum(m.outcome == "updated" for m in self.minibatches)

    @property
    def num_non_finite(self) -> int:
        return sum(m.outcome == "non_finite" for m in self.minibatches)

    @property
    def metrics(self) -> ObjectiveMetrics:
        """Sums over the whole step."""
        return sum((m.metrics for m in self.minibatches), ObjectiveMetrics())

    @property
    def drift_clip_fraction(self) -> float | None:
        """Clipped share of the sequences with A != 0 behind the first mini-batch; None without any."""
        return sum((m.metrics for m in self.minibatches[1:]), ObjectiveMetrics()).clip_fraction

    @property
    def num_zero_advantage(self) -> int:
        return self.metrics.num_zero

    @property
    def num_tokens(self) -> int:
        """Completion tokens that went through the objective."""
        return self.metrics.num_tokens


@dataclass(frozen=True)
class _Sample:
    worker_id: str
    prompt_ids: Int32Array
    rollout: Rollout
    advantage: float
    anchor_T: Float32Array | None = None  # log-probabilities under the step's first weights, where those are the anchor


@dataclass
class _Clock:
    """Wall seconds by part. Waits for the GPU at each boundary, where kernels would still be running."""

    device: torch.device
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("pack", "anchor", "forward", "backward", "optim"), 0.0)
    )

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[part] += time.perf_counter() - start


def train_step(
    policy: Policy, optimizer: Optimizer, groups: Sequence[Group], plan: StepPlan, config: Config
) -> StepResult:
    """Train `policy` in place on `groups`, which are `plan.groups` in the same order.

    Raises:
        HubError: the groups are not those of the plan.
        ValueError: they were sampled at different temperatures, or do not split into mini-batches.
    """
    if tuple(g.group for g in groups) != plan.groups:
        raise HubError(
            f"step {plan.step}: groups {[str(g.group) for g in groups]} are not the plan's; take them again."
        )
    temperatures = {g.temperature for g in groups}
    if len(temperatures) > 1:
        raise ValueError(f"step {plan.step}: groups sampled at temperatures {sorted(temperatures)}; a run has one.")
    samples_by_group, num_unscored, num_empty = _usable_samples(groups)
    trainer = _Trainer(policy, optimizer, plan, config.learner, temperatures.pop(), _Clock(policy.device))
    optimizer.clear_gradients()
    if config.learner.anchor == "recompute":
        anchored = iter(trainer.anchored([sample for samples in samples_by_group for sample in samples]))
        samples_by_group = [list(islice(anchored, len(samples))) for samples in samples_by_group]
    results = [
        trainer.train_minibatch([s for i in indices for s in samples_by_group[i]])
        for indices in split_minibatches(range(len(groups)), config.learner.minibatches, plan.minibatch_seed)
    ]
    seconds = trainer.clock.seconds
    return StepResult(
        minibatches=tuple(result for result, _ in results),
        first=tuple(results[0][1]),
        num_unscored=num_unscored,
        num_empty=num_empty,
        pack_s=seconds["pack"],
        anchor_s=seconds["anchor"],
        forward_s=seconds["forward"],
        backward_s=seconds["backward"],
        optimizer_s=seconds["optim"],
    )


def calibration_after(plan: StepPlan, result: StepResult, config: Config) -> Calibration:
    """What the step leaves for the next one's clip range. Step 0's rollouts were measured by the sampling check."""
    measured = measured_mismatch(result.first, plan.step) if plan.step else None
    return after_step(plan, config.clip, measured, result.drift_clip_fraction, config.sampling.temperature)


def _usable_samples(groups: Sequence[Group]) -> tuple[list[list[_Sample]], int, int]:
    """Per group the samples to train on, and how many rollouts are out as unscored and (scored but) empty.

    An empty completion still counts in its group's mean and deviation: it was sampled and scored.
    """
    samples_by_group: list[list[_Sample]] = []
    num_unscored = num_empty = 0
    for group in groups:
        advantages_G, scored_G = group_advantages([r.reward for r in group.rollouts])
        members = zip(group.rollouts, advantages_G.tolist(), scored_G, strict=True)
        samples = [
            _Sample(group.worker_id, group.prompt_ids, r, a) for r, a, scored in members if scored and r.num_tokens
        ]
        samples_by_group.append(samples)
        num_unscored += int((~scored_G).sum())
        num_empty += int(scored_G.sum()) - len(samples)
    return samples_by_group, num_unscored, num_empty


@dataclass(frozen=True)
class _Trainer:
    """What stays the same over a step's mini-batches."""

    policy: Policy
    optimizer: Optimizer
    plan: StepPlan
    config: LearnerConfig
    temperature: float
    clock: _Clock

    def anchored(self, samples: Sequence[_Sample]) -> list[_Sample]:
        """The samples with the log-probabilities of the weights as they are now."""
        anchors: dict[int, Float32Array] = {}
        for batch in self._pack(samples):
            with self.clock.time("anchor"), torch.no_grad():
                logprobs_T = self._logprobs(batch)
            anchors |= dict(zip(batch.indices_S.tolist(), _split(batch, logprobs_T), strict=True))
        return [replace(sample, anchor_T=anchors[i]) for i, sample in enumerate(samples)]

    def train_minibatch(self, samples: Sequence[_Sample]) -> tuple[MiniBatchResult, list[ScoredRollout]]:
        """Accumulate the gradient of all micro-batches, then update once if any sequence has A != 0.

        Also the rollouts with the log-probabilities from before the update.
        """
        with_gradient = [s for s in samples if s.advantage != 0.0]
        without = [s for s in samples if s.advantage == 0.0]
        metrics, loss = ObjectiveMetrics(), 0.0
        scored: list[ScoredRollout] = []
        for part, needs_gradient in ((with_gradient, True), (without, False)):
            for batch in self._pack(part):
                share, counted, logprobs_T = self._forward(batch, part, len(samples), needs_gradient)
                if needs_gradient:
                    with self.clock.time("backward"):
                        (share * self.optimizer.loss_scale).backward()
                metrics, loss = metrics + counted, loss + float(share.detach())
                members = zip(batch.indices_S, _split(batch, logprobs_T), strict=True)
                scored += [
                    ScoredRollout(part[i].worker_id, part[i].rollout, part[i].advantage, values)
                    for i, values in members
                ]
        if not with_gradient:
            return MiniBatchResult(metrics, loss, "no_signal"), scored
        with self.clock.time("optim"):
            update = self.optimizer.update()
        outcome: Outcome = "updated" if update.applied else "non_finite"
        return MiniBatchResult(metrics, loss, outcome, update.grad_norm, update.lr), scored

    def _pack(self, samples: Sequence[_Sample]) -> list[MicroBatch]:
        sequences = [(s.prompt_ids, s.rollout.completion_ids) for s in samples]
        with self.clock.time("pack"):
            return pack(sequences, self.config.micro_batch_tokens, share_prompts=self.policy.shares_prompts)

    def _forward(
        self, batch: MicroBatch, samples: Sequence[_Sample], num_sequences: int, needs_gradient: bool
    ) -> tuple[Tensor, ObjectiveMetrics, Tensor]:
        """The objective's share of the loss, its metrics, and the log-probabilities [T] it was given."""
        device = self.policy.device
        members = [samples[i] for i in batch.indices_S]
        with self.clock.time("forward"), torch.set_grad_enabled(needs_gradient):
            logprobs_T = self._logprobs(batch)
            share, metrics = OBJECTIVES[self.config.objective](
                logprobs_T,
                _behavior_logprobs(members, device),
                torch.tensor([_behavior_loglik(s) for s in members], dtype=torch.float64, device=device),
                torch.from_numpy(batch.lengths_S).to(device),
                torch.tensor([s.advantage for s in members], dtype=torch.float64, device=device),
                clip=self.plan.clip,
                num_sequences=num_sequences,
            )
        return share, metrics, logprobs_T.detach()

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        return self.policy.completion_logprobs(batch, self.temperature, self.config.logprob_chunk_tokens)


def _split(batch: MicroBatch, logprobs_T: Tensor) -> list[Float32Array]:
    """By completion, in the batch's order."""
    return [part.numpy() for part in logprobs_T.cpu().split(batch.lengths_S.tolist())]


def _behavior_loglik(sample: _Sample) -> float:
    return sample.rollout.seq_loglik if sample.anchor_T is None else float(sample.anchor_T.sum(dtype=np.float64))


def _behavior_logprobs(members: Sequence[_Sample], device: torch.device) -> Tensor | None:
    """[T], or None when the run sends sequence log-likelihoods only."""
    parts = [s.rollout.behavior_logprobs if s.anchor_T is None else s.anchor_T for s in members]
    known = [part for part in parts if part is not None]
    if len(known) < len(members):
        return None
    return torch.from_numpy(np.concatenate(known)).to(device)
