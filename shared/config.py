"""The run configuration: one frozen model per section, checked here and nowhere else.

Owns names, defaults, ranges and cross-field rules. Reads no model, imports nothing heavy: a bad file is refused in
well under a second. Loading (TOML, overrides, error messages) is in `shared.config_file`.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
DTypeName = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunConfig(Section):
    """Identity of the run. Everything random derives from `seed`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    directory: str = "runs"
    seed: NonNegative = 0


class ModelConfig(Section):
    """`path`: a local folder with config.json, safetensors and tokenizer, as `save_pretrained` writes it."""

    path: str


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

    group_size: Annotated[int, Field(ge=2)] = 8
    temperature: Annotated[float, Field(ge=0.05, le=2.0)] = 1.0  # vLLM accepts no more than 2
    max_tokens: Positive = 64
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

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

    A worker that is not heard of for `lease_s` seconds is lost, and its groups go to others. A group that takes longer
    than `group_timeout_s` is dropped.
    """

    workers: Positive = 1
    dtype: DTypeName = "bfloat16"
    max_model_len: Positive = 512
    max_num_seqs: Positive = 64
    memory_share: Share = 0.15
    payload: Literal["token", "sequence"] = "token"
    max_attempts: Positive = 3
    threads: Positive = 1
    lease_s: Annotated[float, Field(ge=1.0)] = 30.0
    group_timeout_s: Annotated[float, Field(gt=0.0)] = 600.0


class LearnerConfig(Section):
    """The training side. A step takes `prompts_per_step` groups and makes `minibatches` optimizer updates.

    A checkpoint is written every `checkpoint_steps` steps, when the learner is stopped, and at the end; the newest
    `keep_checkpoints` are kept.
    """

    steps: Positive = 25
    prompts_per_step: Positive = 8
    minibatches: Positive = 2
    micro_batch_tokens: Positive = 2048
    objective: Literal["gspo"] = "gspo"
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 3e-4
    clip_high: Annotated[float, Field(gt=0.0)] = 4e-4
    lr: Annotated[float, Field(gt=0.0)] = 1e-6
    warmup_updates: NonNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    autocast: Literal["auto", "bfloat16", "off"] = "auto"
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


class SyncConfig(Section):
    """Weights on their way back. `max_staleness` = 0 is the synchronous loop."""

    max_staleness: NonNegative = 1
    bucket_mib: Positive = 64
    probe_sequences: NonNegative = 4


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
    sync: SyncConfig = SyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

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
