"""What `seqrelay doctor` measures: the records, and the file in which the examination hands them over.

learner.examine writes the file, shared.doctor judges what is in it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from shared.records import ProbeReport, SamplingReport, SyncReport

EXAMINATION_FILE = "examination.json"


@dataclass(frozen=True)
class SampleText:
    """One completion as text, whole; special tokens are written out."""

    prompt: str
    completion: str
    reward: float | None


@dataclass(frozen=True)
class Rewards:
    """The rewards of step 0. `num_mixed`: groups with unequal rewards; the others give no gradient.

    `mean`, `least` and `most` are over scored completions, None without any; `num_replaced`: groups that took the place
    of a dropped one.
    """

    num_groups: int
    num_mixed: int
    num_replaced: int
    num_rollouts: int
    num_unscored: int
    num_truncated: int
    mean: float | None
    least: float | None
    most: float | None
    samples: tuple[SampleText, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes on this host, while engine and learner are up and weights are published, before the first gradient.

    `learner_bytes` is resident for the learner, `learner_free_bytes` is free where it trains (RAM, or its GPU), and
    `engine_total_bytes` is what rollout.memory_share is a share of; `engine_kv_bytes` what the KV cache takes without
    it, None on a GPU. `store_bytes`: size of Ray's object store.
    """

    num_parameters: int
    learner_bytes: int
    learner_free_bytes: int
    published_bytes: int
    engine_total_bytes: int
    engine_kv_bytes: int | None
    ram_free_bytes: int
    shared_memory_free_bytes: int
    store_bytes: int


@dataclass(frozen=True)
class Examination:
    """All that was measured, as far as the run came.

    `sampled`: step 0's completions under the weights of the model's files. `resampled`: step 1's, under the same
    weights after they went the way of every later version; `syncs` and `probes` are of that. Of `num_experts` over all
    layers, no token of the probe was routed to `num_unmet_experts`: None for a dense model, or without a probe.
    `sample_s`: until step 0 was sampled, the engine's start included; `score_s`: to score it.
    """

    device: str
    is_emulated: bool
    sampled: tuple[SamplingReport, ...] = ()
    rewards: Rewards | None = None
    memory: Memory | None = None
    has_probe: bool = True
    num_experts: int = 0
    num_unmet_experts: int | None = None
    syncs: tuple[SyncReport, ...] = ()
    probes: tuple[ProbeReport, ...] = ()
    resampled: tuple[SamplingReport, ...] = ()
    sample_s: float = 0.0
    score_s: float = 0.0


def write_examination(run_directory: Path, examination: Examination) -> None:
    """Complete or as it was before, for a reader at any moment. ValueError on NaN or infinity."""
    temporary = run_directory / f".{EXAMINATION_FILE}"
    temporary.write_text(json.dumps(asdict(examination), allow_nan=False), encoding="utf-8")
    temporary.replace(run_directory / EXAMINATION_FILE)


def read_examination(run_directory: Path) -> Examination | None:
    """None when the run did not come as far as step 0's groups."""
    path = run_directory / EXAMINATION_FILE
    return TypeAdapter(Examination).validate_json(path.read_bytes()) if path.exists() else None
