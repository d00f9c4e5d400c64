"""One training run of a study: its parts, and their order within a step.

Gate: step k trains on the groups `generate(k)`. With `sync.max_staleness` = 0 they are sampled under version k, before
the step; with 1 under version k - 1, beside step k - 1 (step 0: under version 0, before it). Version k + 1 is loaded
when the step and what runs beside it are done, so a step's data never depends on timing.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from learner.calibration import with_probes
from learner.main import step_plan
from learner.optim import Optimizer
from learner.policy import Policy
from learner.probe import make_probe
from learner.publish import build_publication_parts
from learner.report import step_metrics
from learner.sampling_check import calibrated, sampling_reports
from learner.step import StepResult, calibration_after, train_step
from rollout.evaluate import evaluate
from rollout.generate import GroupGenerator
from rollout.prompts import PromptSource
from rollout.receive import Staging
from rollout.rewards import load_reward
from rollout.verify import check_load
from shared.config import Config
from shared.errors import RunFailed
from shared.metrics import as_row
from shared.protocols import Engine
from shared.records import Calibration, Group, GroupId, Manifest, ProbeReport, StepPlan, Ticket
from shared.spans import Recorder, Timing
from shared.weights import Blob

Row = dict[str, Any]
_LANE = "study"


class Loop:
    """The parts of one run, and their order within a step."""

    def __init__(self, engine: Engine, config: Config, folder: Path) -> None:
        torch.set_num_threads(config.learner.threads)
        self._recorder = Recorder(_LANE)
        self._generate_s: dict[int, float] = {}
        self._check_s = self._load_s = self._probe_s = 0.0
        self._upcoming: asyncio.Task[list[Group]] | None = None
        self._engine, self._config = engine, config
        tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
        self._prompts = PromptSource(config, tokenizer)
        reward = load_reward(config.reward.function)
        self._generator = GroupGenerator(config, engine, tokenizer, reward, self._recorder)
        self._policy = Policy.load(config)
        self._optimizer = Optimizer(self._policy, config)
        self._calibration = Calibration()
        self._staging = Staging(f"study-{os.getpid()}", fallback=folder)

    async def step(self, step: int) -> Row:
        """Train step `step` and load what it leaves: its record, with the seconds of each part."""
        config, recorder = self._config, self._recorder
        with recorder.span("step", step) as stepped:
            with recorder.span("wait", step) as waited:
                groups = await (self._upcoming or self._generate(step))
            if config.sync.max_staleness and step + 1 < config.learner.steps:
                self._upcoming = asyncio.create_task(self._generate(step + 1))
            plan, result, trained = await asyncio.to_thread(self._train, step, groups)
            if self._upcoming:
                await asyncio.wait({self._upcoming})
            with recorder.span("publish", step) as published:
                await self.load(step + 1, groups, changed=result.num_updates > 0)
        timings = {"stepped": stepped, "waited": waited, "trained": trained, "published": published}
        return as_row(step_metrics(plan, groups, result, unmet_experts=None, **timings)) | {
            "generate_s": self._generate_s[step],
            "check_s": self._check_s if step == 0 else 0.0,
            "load_s": self._load_s,
            "probe_s": self._probe_s,
        }

    async def close(self) -> None:
        """End what still runs beside a step."""
        if self._upcoming:
            self._upcoming.cancel()
            await asyncio.gather(self._upcoming, return_exceptions=True)

    async def _generate(self, step: int) -> list[Group]:
        """The step's groups, sampled under whatever weights the engine holds."""
        first, num = step * self._config.learner.prompts_per_step, self._config.learner.prompts_per_step
        tickets = [Ticket(GroupId(number)) for number in range(first, first + num)]
        version = self._generator.verdicts.current.version
        with self._recorder.span("generate", version) as generated:
            groups = await asyncio.gather(
                *[self._generator.generate(t, self._prompts.training_prompt(t.group), version) for t in tickets]
            )
        self._generate_s[step] = generated.duration_s
        return groups

    def _train(self, step: int, groups: Sequence[Group]) -> tuple[StepPlan, StepResult, Timing]:
        """Plan and train one step, as learner.main does; before step 0 the groups pass the sampling check."""
        if step == 0:
            with self._recorder.span("check", 0) as checked:
                reports = sampling_reports(self._policy, groups, self._config, version=0)
            self._check_s = checked.duration_s
            self._calibration = calibrated(reports, self._calibration, self._config.sampling.temperature)
        with self._recorder.span("train", step) as trained:
            plan = step_plan(self._config, step, groups, self._calibration)
            result = train_step(self._policy, self._optimizer, groups, plan, self._config)
        self._calibration = calibration_after(plan, result, self._config)
        return plan, result, trained

    async def load(self, version: int, groups: Sequence[Group], *, changed: bool) -> None:
        """Make the policy's weights the engine's version `version`, checked with a probe from `groups`."""
        with ExitStack() as until_loaded, self._recorder.span("load", version) as loaded:
            manifest, files = Manifest(version, version, ()), tuple[Path, ...]()
            if changed:
                manifest, buckets = await asyncio.to_thread(self._parts, version)
                files = until_loaded.enter_context(self._staging.stage(manifest, buckets)).files
            with self._generator.verdicts.loading(version) as load:
                await self._engine.load(manifest, files)
        with self._recorder.span("probe", version) as probed:
            if changed and groups and self._config.sync.probe_sequences:
                await self._probe(version, groups)
        load.decide(True)
        self._load_s, self._probe_s = loaded.duration_s, probed.duration_s

    def _parts(self, version: int) -> tuple[Manifest, list[Blob]]:
        return build_publication_parts(
            self._policy.checkpoint_tensors(),
            version=version,
            weights_version=version,
            dtype=self._config.model.mode.engine,
            bucket_bytes=self._config.sync.bucket_mib * 2**20,
        )

    async def _probe(self, version: int, groups: Sequence[Group]) -> None:
        config = self._config
        probe = await asyncio.to_thread(
            make_probe,
            self._policy,
            groups,
            config.sync.probe_sequences,
            max_tokens=config.rollout.max_model_len - 1,
            micro_batch_tokens=config.learner.micro_batch_tokens,
            chunk_tokens=config.learner.logprob_chunk_tokens,
        )
        check = await check_load(self._engine, probe, config.max_mismatch)
        if check.fault:
            raise RunFailed(f"version {version} was refused by the load check: {check.fault}")
        report = ProbeReport(_LANE, version, check.mismatch, check.max_abs, probe_s=0.0, released=True)
        self._calibration = with_probes(self._calibration, [report])

    async def held_out(self, version: int) -> float | None:
        """Pass rate on the held-out prompts; None where the config asks for none."""
        if not self._config.evaluation.samples:
            return None
        report = await evaluate(self._config, self._engine, self._generator, self._prompts.held_out, version)
        return report.pass_rate
