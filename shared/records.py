"""What the two sides say to each other, as typed values. No behaviour, no I/O.

A *group* is the G rollouts of one prompt, identified by its number in issue order plus a replacement count (0 unless
an earlier holder of that number was dropped). Example: with 8 groups a step, group 17 is trained in step 2.

Arrays are one-dimensional NumPy; `T` is the number of completion tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

KvState = Literal["fresh", "kept", "unknown"]
FinishReason = Literal["stop", "length"]

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, order=True)
class GroupId:
    """Identity of a group: `number` counts issued groups from 0; `replacement` counts how often it was replaced."""

    number: int
    replacement: int = 0

    def __str__(self) -> str:
        return f"{self.number}.{self.replacement}"


@dataclass(frozen=True)
class Ticket:
    """Permission to generate one group. `attempt` grows when the same group is issued again to another worker."""

    group: GroupId
    attempt: int = 0


@dataclass(frozen=True)
class Segment:
    """A run of completion tokens [start, end) sampled under one policy version.

    `loglik` (nats) is the float64 sum of the tokens' behaviour log-probabilities. `kv` says whether the attention
    cache behind these tokens was built by the same version ("fresh"), by an older one ("kept"), or is "unknown".
    """

    policy_version: int
    start: int
    end: int
    loglik: float
    kv: KvState = "fresh"

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Rollout:
    """One completion, exactly as sampled.

    `behavior_logprobs` (nats, float32 [T]) are those of the distribution that was sampled, after temperature; None
    when the run sends sequence log-likelihoods only. `reward` is None when the completion could not be scored.
    """

    completion_ids: Int32Array
    behavior_logprobs: Float32Array | None
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    reward: float | None
    reward_parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.completion_ids)

    @property
    def seq_loglik(self) -> float:
        """Sequence log-likelihood under the behaviour policy (nats): the sum over segments."""
        return float(sum(s.loglik for s in self.segments))

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest segment. Raises ValueError on a rollout without tokens."""
        return min(s.policy_version for s in self.segments)


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt, as they travel and as they are stored."""

    group: GroupId
    attempt: int
    worker_id: str
    prompt_id: str
    prompt_ids: Int32Array
    temperature: float
    rollouts: tuple[Rollout, ...]
    num_rejected: int = 0
    started_at_s: float = 0.0
    generate_s: float = 0.0
    reward_s: float = 0.0


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: bytes [start, end) of bucket `bucket`; `digest` is the BLAKE3 hex of those bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    start: int
    end: int
    digest: str


@dataclass(frozen=True)
class ProbeSequence:
    """A recent sequence with the learner's own log-probabilities (nats, temperature 1) under the manifest's weights.

    `logprobs[i]` belongs to `token_ids[first + i]`.
    """

    token_ids: Int32Array
    first: int
    logprobs: Float32Array


@dataclass(frozen=True)
class Manifest:
    """What a policy version consists of.

    `weights_version` is the version at which these weights last changed: a step that made no optimizer update moves
    `version` and leaves `weights_version`, and then no weights travel. `incarnation` counts how often a learner that
    recovered came to other weights for a version that workers may already hold; it never does on one CPU thread.
    """

    version: int
    weights_version: int
    tensors: tuple[TensorEntry, ...]
    probe: tuple[ProbeSequence, ...] = ()
    incarnation: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(t.end - t.start for t in self.tensors)


@dataclass(frozen=True)
class Publication:
    """A manifest and the buckets behind it: Ray object references of uint8 arrays, one per bucket."""

    manifest: Manifest
    buckets: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ClipRange:
    """The clip range of one step (docs/gspo.md).

    A sequence of T tokens may have log s from `log(1 - low) - bias - z spread / sqrt(T)` to
    `log(1 + high) - bias + z spread / sqrt(T)`. With `bias` and `spread` 0 that is the fixed range of the paper.
    """

    low: float
    high: float
    bias: float = 0.0
    spread: float = 0.0
    z: float = 0.0


@dataclass(frozen=True)
class Mismatch:
    """Engine against learner at equal weights (shared.mismatch): of d = log pi_learner - log pi_engine, nats a token.

    `k3`: mean of exp(d) - 1 - d. `num_tokens` is a weight where measurements were pooled.
    """

    num_tokens: float
    mean: float
    variance: float
    k3: float

    @property
    def spread(self) -> float:
        """Standard deviation of d over tokens."""
        return self.variance**0.5

    @property
    def rms(self) -> float:
        return (self.variance + self.mean**2) ** 0.5


@dataclass(frozen=True)
class Calibration:
    """What the clip range of a step follows from, besides the config (learner.calibration).

    `mismatch`: the pooled measurement on sampled tokens, None before there is a trusted one. `probe`: the pooled probes
    up to version `probe_version`; `reference_k3` is their k3 at the time of `mismatch`. `scale` multiplies the
    configured range.
    """

    mismatch: Mismatch | None = None
    probe: Mismatch | None = None
    probe_version: int = 0
    reference_k3: float | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class StepPlan:
    """Durable before the first forward of step `step`, which trains at policy version `step`.

    `clip` follows from `calibration` and the config; it is all that training needs of them.
    """

    step: int
    groups: tuple[GroupId, ...]
    minibatch_seed: int
    clip: ClipRange
    calibration: Calibration = Calibration()


@dataclass(frozen=True)
class Work:
    """The hub's answer to a worker that asks for work.

    `stop`: "drain" means finish what is held, then end; "now" means end at once. `waiting_for` says, for a person, why
    there is nothing to do.
    """

    tickets: tuple[Ticket, ...] = ()
    evaluate_version: int | None = None
    stop: Literal["", "drain", "now"] = ""
    waiting_for: str = ""


@dataclass(frozen=True)
class Identity:
    """What a worker and the learner must have in common, as short digests (shared.identity).

    `settings`: of every option that both sides must share, its dotted name and its value as JSON.
    """

    model: str
    tokenizer: str
    schema: str
    code: str
    settings: Mapping[str, str]


@dataclass(frozen=True)
class ResumePoint:
    """Where a learner goes on: it trains step `version` next.

    `begun`: the plan of that step if it was begun before; the step must be trained by it. `incarnation` as in Manifest.
    """

    version: int
    begun: StepPlan | None = None
    incarnation: int = 0


@dataclass(frozen=True)
class RecordedStep:
    """A committed step as it was trained: its plan, its groups' bytes in order, the digest of the weights after it."""

    plan: StepPlan
    groups: list[bytes]
    weights_digest: str


@dataclass(frozen=True)
class SyncReport:
    """`version` is active on this worker: what its sync cost, in seconds by part. No bytes: the weights stand."""

    worker_id: str
    version: int
    num_bytes: int
    fetch_s: float
    digest_s: float
    stage_s: float
    pause_s: float
    load_s: float
    resume_s: float
    incarnation: int = 0


@dataclass(frozen=True)
class ProbeReport:
    """The verdict on the weights that a worker loaded as `version`: engine against learner on the manifest's probe.

    `max_abs`: the largest |difference| of a log-probability (nats). `released` False: refused, nothing sampled under
    them leaves the worker.
    """

    worker_id: str
    version: int
    mismatch: Mismatch
    max_abs: float
    probe_s: float
    released: bool


@dataclass(frozen=True)
class MismatchReport:
    """Engine against learner on rollouts of `worker_id` that the step of `version` trained on: both at that version."""

    worker_id: str
    version: int
    mismatch: Mismatch


@dataclass(frozen=True)
class SamplingReport:
    """Engine against learner on what `worker_id` really sampled at `version`, at the run's temperature.

    `smallest_shift`: the smallest constant error of a log-probability that this many tokens show at 3 standard errors
    (nats). The clip fractions are those that the fixed and the calibrated range would give before any update, for
    sequences with A > 0 and with A < 0. `fault`: why the numbers cannot be trusted, "" if they can.
    """

    worker_id: str
    version: int
    num_sequences: int
    mismatch: Mismatch
    max_abs: float
    smallest_shift: float
    fixed_clip: tuple[float, float]
    calibrated_clip: tuple[float, float]
    fault: str


@dataclass(frozen=True)
class EvalReport:
    """Held-out prompts sampled at one policy version: `num_passed` of `num_samples` with reward 1 or more."""

    version: int
    num_samples: int
    num_passed: int
    num_unscored: int

    @property
    def pass_rate(self) -> float | None:
        scored = self.num_samples - self.num_unscored
        return self.num_passed / scored if scored else None


@dataclass(frozen=True)
class Span:
    """An interval in which `lane` ("learner" or a worker id) did `name`. Unix seconds, monotonic within a process."""

    lane: str
    name: str
    start_s: float
    end_s: float
    version: int
    detail: str = ""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


EventName = Literal[
    "hub_started", "joined", "left", "lost", "refused", "learner_came", "learner_left", "new_incarnation",
    "stop_requested", "failed", "weights_refused",
]  # fmt: skip


@dataclass(frozen=True)
class Event:
    """Something that happened to the run once, for events.jsonl. Unix seconds."""

    at_s: float
    name: EventName
    who: str
    detail: str = ""


Report = SyncReport | ProbeReport | SamplingReport | MismatchReport | EvalReport | Span
