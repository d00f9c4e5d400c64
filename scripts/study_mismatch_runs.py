"""Samples of the mismatch study and the learner's log-probabilities of them: what is run, and how.

A sampling run is one model, one engine type and one temperature: sequences as an engine sampled them, with the
log-probabilities it reported. A scoring run gives the same tokens the learner's, in one precision. Engine (a process on
the first core) and learner (a thread here) work side by side: while one batch is sampled, the ones before are scored.
"""

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from learner.packing import pack
from learner.policy import Policy
from shared.config import Config
from shared.protocols import Completion, Engine, GenerateRequest
from shared.seeds import derive_seed
from study_results import Results, Run
from study_runner import EngineFactory, engine_running

SMOLLM2, TINY_MOE = "models/smollm2-135m", "models/tiny-moe"
MAX_TOKENS = 512
MAX_MODEL_LEN, TINY_MODEL_LEN = 640, 512
# Up to so many sequences both temperatures are sampled at once, for an engine's step costs little less with fewer;
# more of them are sampled one temperature after the other, so that the learner can begin.
TOGETHER = 64

# Asked through the chat template. At temperature 1 the model ends some of the answers by itself; they are kept.
QUESTIONS = (
    "Write a very long story about a lighthouse keeper who finds a map. Describe every day of the journey in detail.",
    "Write a long list of one hundred unusual ideas for a small town festival, with two sentences about each.",
    "Write a detailed travel guide to an imaginary island: history, people, food, animals, weather and legends.",
    "Explain at great length, with many examples, how a computer adds, subtracts, multiplies and divides numbers.",
)
# Continued as they are: prose, dialogue, notes and code.
OPENINGS = (
    "Chapter 1\n\nThe old house at the end of the lane had been empty for as long as anyone could remember, until",
    '"You cannot be serious," said the captain.\n\n"I have never been more serious in my life," she answered.\n\n"But',
    "Lecture notes: the history of astronomy\n\n1. The first observations\n\nLong before there were telescopes,",
    "# A small library of functions on lists, with tests\n\ndef flatten(items):\n",
)
SUMS = ("12+34=", "07+90=", "55+55=", "3")


@dataclass(frozen=True)
class Samples:
    """One sampling run: `num_sequences` of up to `max_tokens` from an engine of `precision` at `temperature`."""

    model: str
    precision: str
    temperature: float
    num_sequences: int
    max_tokens: int = MAX_TOKENS

    @property
    def arm(self) -> str:
        return f"{Path(self.model).name}-{self.precision}-T{self.temperature}"

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self) | {"prompts": self.prompts, "max_model_len": self.max_model_len}

    @property
    def prompts(self) -> tuple[str, ...]:
        return QUESTIONS + OPENINGS if self.model == SMOLLM2 else SUMS

    @property
    def max_model_len(self) -> int:
        return MAX_MODEL_LEN if self.model == SMOLLM2 else TINY_MODEL_LEN


@dataclass(frozen=True)
class Scores:
    """One scoring run: the first `num_sequences` of `samples` by a learner of `precision`."""

    samples: Samples
    precision: str
    num_sequences: int

    @property
    def arm(self) -> str:
        return f"{self.samples.arm}-by-{self.precision}"

    @property
    def settings(self) -> dict[str, Any]:
        return {"samples": self.samples.settings, "precision": self.precision, "num_sequences": self.num_sequences}


def study_config(model: str, precision: str, max_model_len: int, max_num_seqs: int = 64) -> Config:
    return Config.model_validate(
        {
            "model": {"path": model, "precision": precision},
            "sampling": {"max_tokens": max_model_len - 1},
            "rollout": {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs},
        }
    )


Progress = Callable[[str, int, int], None]  # what, how much of it is done, how much there is


async def run_all(
    all_samples: Sequence[Samples],
    all_scores: Sequence[Scores],
    results: Results,
    make_engine: EngineFactory,
    progress: Progress,
) -> None:
    """Make every run that is not there yet; samples with one model and precision share an engine."""
    with ThreadPoolExecutor(1, thread_name_prefix="learner") as learner:
        scoring: list[Future[None]] = []

        def score_what_waits(samples: Samples) -> None:
            waiting = [s for s in all_scores if s.samples == samples and results.find(s.arm, s.settings) is None]
            scoring.extend(learner.submit(score_run, scores, results, progress) for scores in waiting)

        for missing in _by_engine(all_samples, results, score_what_waits):
            most = sum(s.num_sequences for s in missing)
            config = study_config(missing[0].model, missing[0].precision, missing[0].max_model_len, most)
            together = len(missing) if most <= TOGETHER else 1
            async with _engine(config, make_engine) as engine:
                for first in range(0, len(missing), together):
                    wave = missing[first : first + together]
                    await _sample_runs(wave, engine, results, progress)
                    for samples in wave:
                        score_what_waits(samples)
        for future in scoring:
            await asyncio.wrap_future(future)


def _by_engine(
    all_samples: Sequence[Samples], results: Results, when_there: Callable[[Samples], None]
) -> list[list[Samples]]:
    """The sampling runs to be made, by the engine they need, in order."""
    by_engine: dict[tuple[str, str], list[Samples]] = {}
    for samples in all_samples:
        if results.find(samples.arm, samples.settings) is None:
            by_engine.setdefault((samples.model, samples.precision), []).append(samples)
        else:
            when_there(samples)
    return list(by_engine.values())


@asynccontextmanager
async def _engine(config: Config, make_engine: EngineFactory) -> AsyncIterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="seqrelay-study-") as folder:
        if config.model.path == TINY_MOE:
            path = without_end_token(Path(TINY_MOE), Path(folder) / "model")
            config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})
        async with engine_running(config, make_engine) as engine:
            yield engine


def without_end_token(source: Path, out: Path) -> Path:
    """A copy of a model folder whose end token is its beginning token, which is never sampled: answers run on."""
    shutil.copytree(source, out)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((out / name).read_text())
        (out / name).write_text(json.dumps(values | {"eos_token_id": values["bos_token_id"]}))
    tokenizer = json.loads((out / "tokenizer_config.json").read_text())
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": tokenizer["bos_token"]}))
    return out


def prompt_ids(samples: Samples) -> list[list[int]]:
    """The prompt of each sequence, in order."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(samples.model, local_files_only=True)

    def encode(text: str) -> list[int]:
        if text in QUESTIONS:
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)

    encoded = [encode(text) for text in samples.prompts]
    return [encoded[i % len(encoded)] for i in range(samples.num_sequences)]


async def _sample_runs(wave: Sequence[Samples], engine: Engine, results: Results, progress: Progress) -> None:
    """Sample them at once; their cost is split by tokens."""
    all_prompts = [prompt_ids(samples) for samples in wave]
    start_s, start_cpu_s = time.monotonic(), _children_cpu_s()
    pairs = zip(wave, all_prompts, strict=True)
    sampled = await asyncio.gather(*[_sample(samples, prompts, engine, progress) for samples, prompts in pairs])
    wall_s, cpu_s = time.monotonic() - start_s, _children_cpu_s() - start_cpu_s
    num_tokens = [sum(len(c.token_ids) for c in completions) for completions in sampled]
    for samples, prompts, completions, num in zip(wave, all_prompts, sampled, num_tokens, strict=True):
        share = num / sum(num_tokens)
        columns = {
            "prompt_ids": _lists(prompts, pa.int32()),
            "completion_ids": _lists([c.token_ids for c in completions], pa.int32()),
            "engine_logprobs": _lists([c.logprobs for c in completions], pa.float32()),
            "finish_reason": pa.array([c.finish_reason for c in completions]),
        }
        cost = {"wall_s": share * wall_s, "cpu_s": share * cpu_s, "num_tokens": num}
        results.write(samples.arm, samples.settings, pa.table(columns), cost)


async def _sample(
    samples: Samples, prompts: Sequence[list[int]], engine: Engine, progress: Progress
) -> list[Completion]:
    finished: list[Completion] = []

    async def one(index: int, prompt: list[int]) -> Completion:
        request = GenerateRequest(
            request_id=f"{samples.arm}-{index}",
            prompt_ids=prompt,
            max_tokens=min(samples.max_tokens, samples.max_model_len - len(prompt)),
            temperature=samples.temperature,
            seed=derive_seed(0, samples.arm, index),
            cache_salt="0",
        )
        finished.append(await engine.generate(request))
        progress(f"sampling {samples.arm}", len(finished), len(prompts))
        return finished[-1]

    return await asyncio.gather(*[one(i, prompt) for i, prompt in enumerate(prompts)])


def _children_cpu_s() -> float:
    """CPU seconds of the engine's processes: unlike wall time, they do not count what else runs on this host."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return float(sum(t.user + t.system for t in times))


def score_run(scores: Scores, results: Results, progress: Progress) -> None:
    """Score a finished sampling run; ValueError when it is not there. Called in a thread of its own."""
    import torch

    torch.set_num_threads(1)
    run = results.find(scores.samples.arm, scores.samples.settings)
    if run is None:
        raise ValueError(f"{scores.samples.arm} was not sampled yet: sample it before it is scored")
    sequences = list(zip(*(arrays(run, name) for name in ("prompt_ids", "completion_ids")), strict=True))
    sequences = sequences[: scores.num_sequences]
    config = study_config(scores.samples.model, scores.precision, scores.samples.max_model_len)
    policy = Policy.load(config)
    parts: list[Any] = [None] * len(sequences)
    num_done, num_tokens, start_s, start_cpu_s = 0, 0, time.monotonic(), time.thread_time()
    with torch.no_grad():
        for batch in pack(sequences, config.learner.micro_batch_tokens, share_prompts=policy.shares_prompts):
            logprobs_T = policy.completion_logprobs(
                batch, scores.samples.temperature, config.learner.logprob_chunk_tokens
            ).cpu()
            for index, part in zip(batch.indices_S, logprobs_T.split(batch.lengths_S.tolist()), strict=True):
                parts[index] = part.numpy()
            num_done, num_tokens = num_done + len(batch.indices_S), num_tokens + len(logprobs_T)
            progress(f"scoring {scores.arm}", num_done, len(sequences))
    wall_s, cpu_s = time.monotonic() - start_s, time.thread_time() - start_cpu_s
    cost = {"wall_s": wall_s, "cpu_s": cpu_s, "num_tokens": num_tokens}
    results.write(scores.arm, scores.settings, pa.table({"learner_logprobs": _lists(parts, pa.float32())}), cost)


def _lists(values: Sequence[Any], item: pa.DataType) -> pa.Array:
    return pa.array([np.asarray(v) for v in values], type=pa.list_(item))


def arrays(run: Run, column: str) -> list[np.ndarray]:
    """A list column as one array a sequence."""
    return [value.values.to_numpy() for value in run.table.column(column)]
