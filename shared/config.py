"""The run configuration: one frozen model per section, checked here and nowhere else.

Owns names, defaults, ranges and cross-field rules. Reads no model, imports nothing heavy: a bad file is refused in
well under a second. Loading (TOML, overrides, error messages) is in `shared.config_file`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
DTypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class PrecisionMode:
    """What both sides compute in.

    `engine`: weights and activations of the engine, and the type in which weights are published. `autocast`: type of
    the learner's matrix products, whose master weights are float32; None for float32 throughout. `float32_head`: the
    learner computes logits in float32. `max_mismatch`: root mean square of log pi_learner - log pi_engine (nats a
    token) at equal weights above which one of the two must be wrong; some four times what is measured (docs/gspo.md).
    """

    engine: DTypeName
    autocast: DTypeName | None
    float32_head: bool
    max_mismatch: float


PRECISIONS = {
    "float32": PrecisionMode("float32", None, False, max_mismatch=1e-4),
    "float16": PrecisionMode("float16", "float16", False, max_mismatch=0.05),
    "bfloat16": PrecisionMode("bfloat16", "bfloat16", False, max_mismatch=0.25),
    "bfloat16-float32-head": PrecisionMode("bfloat16", "bfloat16", True, max_mismatch=0.25),
}


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunConfig(Section):
    """Identity of the run. Everything random derives from `seed`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    directory: str = "runs"
    seed: NonNegative = 0


class ModelConfig(Section):
    """`path`: a local folder with config.json, safetensors and tokenizer, as `save_pretrained` writes it.

    `precision`: what engine and learner compute in; the learner's master weights are float32 in every mode.
    """

    path: str
    precision: Literal["float32", "float16", "bfloat16", "bfloat16-float32-head"] = "bfloat16"

    @property
    def mode(self) -> PrecisionMode:
        return PRECISIONS[self.precision]


class PromptsConfig(Section):
    """Built-in sums a+b. `chat`: one-digit terms 1..9 asked through the model's chat template; `plain`: "12+34="."""

    source: Literal["sums"] = "sums"
    style: Literal["chat", "plain"] = "chat"
    digits: Annotated[int, Field(ge=1, le=2)] = 1
    num_held_out: Positive = 16


class RewardConfig(Section):
    """`function`: dotted path "package.module:function" of `(completions, answer) -> list[float | None]`."""

    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] = "rollout.rewards:last_number"


class SamplingConfig(Section):
    """How completions are drawn. Log-probabilities are of exactly this distribution.

    A filter (`top_p`, `top_k`, `min_p`) renormalises over the tokens it keeps while the learner scores the full
    vocabulary, so every ratio would carry the kept mass: only the neutral values are accepted.
    """

    group_size: Positive = 8
    temperature: Annotated[float, Field(ge=0.05, le=2.0)] = 1.0  # vLLM accepts no more than 2
    max_tokens: Positive = 64
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @model_validator(mode="after")
    def _has_advantages(self) -> Self:
        if self.group_size == 1:
            raise ValueError(
                "sampling.group_size = 1: an advantage is a reward compared with those of the same group, and a group "
                "of one has none. Set sampling.group_size to 2 or more."
            )
        return self

    @model_validator(mode="after")
    def _no_filters(self) -> Self:
        for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"sampling.{name} = {getattr(self, name)} would filter the sampled distribution while the learner "
                    f"scores the full vocabulary; every importance ratio would be off by the kept mass. "
                    f"Set sampling.{name} = {neutral}."
                )
        return self


class RolloutConfig(Section):
    """The inference side. `payload`: send a log-probability per token, or only one log-likelihood per segment.

    `memory_share`: of the GPU's memory, or of the RAM, for the engine's weights and KV cache. None: on GPU vLLM's own
    default; on CPU a KV cache for `max_num_seqs` sequences of `max_model_len` tokens, at most half of the free RAM.

    A worker that is not heard of for `lease_s` seconds is lost, and its groups go to others. A group that takes longer
    than `group_timeout_s` is dropped.
    """

    workers: Positive = 1
    max_model_len: Positive = 512
    max_num_seqs: Positive = 64
    memory_share: Share | None = None
    payload: Literal["token", "sequence"] = "token"
    max_attempts: Positive = 3
    threads: Positive = 1
    lease_s: Annotated[float, Field(ge=1.0)] = 30.0
    group_timeout_s: Annotated[float, Field(gt=0.0)] = 600.0


class LearnerConfig(Section):
    """The training side. A step takes `prompts_per_step` groups and makes `minibatches` optimizer updates.

    `anchor`: the denominator of the ratio. "engine": the likelihood that the engine returned; "recompute": another
    forward pass under the weights that the step starts from, for comparison.

    A checkpoint is written every `checkpoint_steps` steps, when the learner is stopped, and at the end; the newest
    `keep_checkpoints` are kept.
    """

    steps: Positive = 25
    prompts_per_step: Positive = 8
    minibatches: Positive = 2
    micro_batch_tokens: Positive = 2048
    objective: Literal["gspo"] = "gspo"
    anchor: Literal["engine", "recompute"] = "engine"
    lr: Annotated[float, Field(gt=0.0)] = 1e-6
    warmup_updates: NonNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    activation_checkpointing: bool = False
    logprob_chunk_tokens: Positive = 256
    threads: Positive = 1
    checkpoint_steps: Positive = 10
    keep_checkpoints: Positive = 2

    @model_validator(mode="after")
    def _minibatches_divide(self) -> Self:
        if self.prompts_per_step % self.minibatches:
            fits = [n for n in range(1, self.prompts_per_step + 1) if self.prompts_per_step % n == 0]
            raise ValueError(
                f"learner.minibatches = {self.minibatches} does not divide learner.prompts_per_step = "
                f"{self.prompts_per_step}. Values of learner.minibatches that would: {fits}."
            )
        return self

    @model_validator(mode="after")
    def _ratio_can_move(self) -> Self:
        if self.anchor == "recompute" and self.minibatches == 1:
            raise ValueError(
                "learner.anchor = recompute with learner.minibatches = 1 makes every ratio 1: nothing is ever clipped "
                "and what the engine did differently goes unseen. Set learner.minibatches to 2 or more, or "
                "learner.anchor = engine."
            )
        return self


class ClipConfig(Section):
    """The clip range of the ratio, [1 - low, 1 + high], and what is added to it.

    `calibration` "measured" widens the range of a sequence of T tokens by what engine and learner differ at equal
    weights: the bias, and `z` standard errors of a mean of T tokens (docs/gspo.md). "none" takes the range as it is.
    `sizing` "drift" multiplies the configured range by a factor of up to `max_scale`, and at least its inverse, so that
    the share of clipped sequences after a step's first mini-batch approaches `target`; "off" leaves it.
    """

    low: Annotated[float, Field(gt=0.0, lt=1.0)] = 3e-4
    high: Annotated[float, Field(gt=0.0)] = 4e-4
    calibration: Literal["measured", "none"] = "measured"
    z: Annotated[float, Field(gt=0.0, le=6.0)] = 1.96
    sizing: Literal["off", "drift"] = "off"
    target: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    max_scale: Annotated[float, Field(ge=1.0)] = 1000.0


class SyncConfig(Section):
    """Weights on their way back. `max_staleness` = 0 is the synchronous loop.

    A version is served only if engine and learner agree on a probe of `probe_sequences` sequences: `max_mismatch` is
    the largest root mean square of the difference in nats a token; None takes that of `model.precision`, and more than
    1 says that the two need not agree.
    """

    max_staleness: NonNegative = 1
    bucket_mib: Positive = 64
    probe_sequences: NonNegative = 4
    max_mismatch: Annotated[float, Field(gt=0.0)] | None = None


class EvaluationConfig(Section):
    """Held-out prompts before the first and after the last step; `samples` completions each."""

    samples: NonNegative = 4


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    prompts: PromptsConfig = PromptsConfig()
    reward: RewardConfig = RewardConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()
    clip: ClipConfig = ClipConfig()
    sync: SyncConfig = SyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def max_mismatch(self) -> float:
        """Root mean square of engine against learner at equal weights above which it is refused; nats a token."""
        return self.sync.max_mismatch or self.model.mode.max_mismatch

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.sampling.max_tokens >= self.rollout.max_model_len:
            raise ValueError(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in "
                f"rollout.max_model_len = {self.rollout.max_model_len}. Lower the first or raise the second."
            )
        if self.learner.micro_batch_tokens < self.rollout.max_model_len:
            raise ValueError(
                f"learner.micro_batch_tokens = {self.learner.micro_batch_tokens} is less than rollout.max_model_len = "
                f"{self.rollout.max_model_len}: the longest sequence would not fit into a micro-batch. "
                f"Set it to at least {self.rollout.max_model_len}."
            )
        most = {1: 40, 2: 1000}[self.prompts.digits]
        if self.prompts.num_held_out > most:
            raise ValueError(
                f"prompts.num_held_out = {self.prompts.num_held_out} is too many of the sums of prompts.digits = "
                f"{self.prompts.digits}. Set it to at most {most}."
            )
        return self
