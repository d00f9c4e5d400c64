"""Every option, given two values, makes a difference that can be observed; none is accepted and ignored.

An observer is a function of a config that calls the code which reads the option. `Refused` stands for a ConfigError.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from tiny_models import tiny_group, tiny_model

import tiny_moe
from learner.calibration import with_drift
from learner.main import step_plan
from learner.optim import Optimizer
from learner.policy import Policy, choose_device
from learner.probe import make_probe
from learner.publish import build_publication_parts
from learner.recover import Recovered
from learner.sampling_check import sampling_reports
from learner.step import train_step
from rollout.dispatch import rollout_request
from rollout.engine import sampling_params
from rollout.engine_start import engine_args, thread_environment
from rollout.generate import GroupGenerator
from rollout.prompts import PromptSource
from rollout.rewards import load_reward
from shared.config import Config
from shared.config_file import parse_config
from shared.errors import ConfigError
from shared.hub import Hub
from shared.protocols import Completion
from shared.records import Calibration, GroupId, Mismatch, Rollout, Segment, Ticket
from shared.run_directory import run_directory
from shared.schema import encode_group
from shared.stopping import StopRequest

REWARDS = "rollout.rewards"
MEASURED = Calibration(mismatch=Mismatch(1000, 0.0, 0.1, 0.01))  # at 8 tokens z spread / sqrt(T) is 0.2
MIXED = [1.0, 0.0, 1.0, 0.0]
GROUPS = [tiny_group(n, MIXED, lengths=[8, 3, 5, 8]) for n in range(4)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("a", "b", "runs")}
    for seed, name in enumerate("ab"):
        tiny_model(initializer_range=0.3 + seed / 10).save_pretrained(made[name])
    tiny_moe.make_tokenizer().save_pretrained(made["a"])
    return made


def prompt_source(config: Config) -> PromptSource:
    tokenizer = SimpleNamespace(
        chat_template="yes",
        encode=lambda text, add_special_tokens: [ord(c) for c in text],
        apply_chat_template=lambda conversation, add_generation_prompt, tokenize: conversation[0]["content"],
    )
    return PromptSource(config, tokenizer)


def prompts(config: Config) -> Any:
    source = prompt_source(config)
    return [source.training_prompt(GroupId(n)) for n in range(20)], source.held_out


def request(config: Config) -> Any:
    return sampling_params(rollout_request(config, Ticket(GroupId(1)), 0, 0, [1, 2], 0))


def engine(config: Config) -> Any:
    return engine_args(config, 0, True), thread_environment(0, config.rollout.threads, range(8), {})


def hub(config: Config, folder: Path) -> Any:
    served = Hub(config, folder)
    try:
        return served._core.ledger.rules, dict(served._core.evaluations._holder), served._core.workers._lease_s
    finally:
        served.close()


def trained(config: Config) -> Any:
    """Weights after two steps, and how the work was cut up on the way."""
    policy = Policy.load(config)
    optimizer = Optimizer(policy, config)
    forwards: list[tuple[int, ...]] = []
    layers: list[int] = []
    heads: list[int] = []
    decoder = policy.model.get_decoder()
    decoder.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    decoder.layers[0].mlp.register_forward_pre_hook(lambda module, args: layers.append(1))
    policy.model.get_output_embeddings().register_forward_pre_hook(lambda module, args: heads.append(len(args[0])))
    for step in range(2):
        plan = step_plan(config, step, GROUPS, Calibration())
        train_step(policy, optimizer, GROUPS, plan, config)
    weights = [p.detach().clone().tolist() for p in policy.model.parameters()]
    return weights, forwards, len(layers), heads


def clipped(config: Config) -> Any:
    """Clip counts of a first step in which half of the sequences have log s = 0.1 and half have log s = -0.1."""
    policy = Policy.load(config)
    probe = iter(make_probe(policy, GROUPS, 16, max_tokens=64, micro_batch_tokens=512, chunk_tokens=64))

    def shifted(rollout: Rollout, log_ratio: float) -> Rollout:
        loglik = float(next(probe).logprobs.sum()) - log_ratio * rollout.num_tokens
        return replace(rollout, segments=(Segment(0, 0, rollout.num_tokens, loglik),))

    groups = [
        replace(g, rollouts=tuple(shifted(r, 0.1 if n < 2 else -0.1) for r in g.rollouts)) for n, g in enumerate(GROUPS)
    ]
    metrics = train_step(
        policy, Optimizer(policy, config), groups, step_plan(config, 0, groups, MEASURED), config
    ).metrics
    return metrics.num_clipped_positive, metrics.num_clipped_negative


def sized(config: Config, **clip: Any) -> float:
    """The scale of the clip range after a step that clipped nine of ten sequences."""
    section = config.clip.model_copy(update=clip)
    return with_drift(Calibration(), section, 0.9).scale


def refused_samples(config: Config) -> list[bool]:
    reports = sampling_reports(Policy.load(config), GROUPS, config, version=0)
    return [bool(report.fault) for report in reports]


def published(config: Config) -> Any:
    tensors = [(f"t{i}", torch.ones(300_000)) for i in range(4)]
    manifest, buckets = build_publication_parts(
        tensors,
        version=1,
        weights_version=1,
        dtype=config.model.mode.engine,
        bucket_bytes=config.sync.bucket_mib * 2**20,
    )
    policy = Policy.load(config)
    num = config.sync.probe_sequences
    probe = make_probe(policy, GROUPS, num, max_tokens=64, micro_batch_tokens=512, chunk_tokens=64)
    return [t.dtype for t in manifest.tensors], len(buckets), len(probe)


def learner_threads(config: Config) -> Any:
    from unittest.mock import patch

    import learner.main

    seen: list[int] = []
    with (
        patch.object(torch, "set_num_threads", seen.append),
        patch.object(learner.main, "FileLock", side_effect=KeyError),
        pytest.raises(KeyError),
    ):
        learner.main.run_learner(config, Path(), StopRequest())
    return seen


def checkpoints(config: Config, folder: Path) -> list[str]:
    """Which checkpoints three steps leave, with a hub that gives every step the same groups."""
    from unittest.mock import MagicMock

    from learner.main import Learner
    from learner.publish import Publisher

    hub, policy = MagicMock(), Policy.load(config)
    hub.take.return_value = [encode_group(group) for group in GROUPS]
    publisher = MagicMock(spec=Publisher, digest="digest", num_unmet_experts=None)
    state = Recovered(policy, Optimizer(policy, config), publisher, Calibration())
    hub.probes.return_value = []
    learner = Learner(config, folder, hub, 0, state)
    for _ in range(3):
        learner.step(None)
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def generator_payload(config: Config) -> Any:
    completion = Completion(np.array([5, 6], np.int32), np.array([-0.5, -0.25], np.float32), ((0, 0, 2),), "stop")
    generator = GroupGenerator(config, None, None, None, None)
    return generator._rollout(completion, 1.0).behavior_logprobs is None


OBSERVERS: dict[str, tuple[Any, Any, Callable[..., Any]]] = {
    "run.name": ("one", "two", run_directory),
    "run.directory": ("runs", "elsewhere", run_directory),
    "run.seed": (0, 1, lambda c: (request(c), prompts(c), step_plan(c, 0, [], Calibration()))),
    "model.path": ("a", "b", lambda c: Policy.load(c).model.state_dict()["lm_head.weight"].tolist()),
    "model.precision": ("bfloat16", "float32", lambda c: (engine(c), published(c), Policy.load(c).mode)),
    "prompts.source": ("sums", "other", prompts),
    "prompts.style": ("chat", "plain", prompts),
    "prompts.digits": (1, 2, prompts),
    "prompts.num_held_out": (8, 16, prompts),
    "reward.function": (
        "rollout.rewards:last_number",
        "rollout.rewards:exact_match",
        lambda c: load_reward(c.reward.function),
    ),
    "sampling.group_size": (4, 8, lambda c: members(c)),
    "sampling.temperature": (1.0, 0.6, request),
    "sampling.max_tokens": (8, 9, request),
    "sampling.top_p": (1.0, 0.9, request),
    "sampling.top_k": (0, 50, request),
    "sampling.min_p": (0.0, 0.1, request),
    "rollout.workers": (1, 2, lambda c: actors(c)),
    "rollout.max_model_len": (64, 32, engine),
    "rollout.max_num_seqs": (64, 32, engine),
    "rollout.memory_share": (0.1, 0.2, engine),
    "rollout.payload": ("token", "sequence", generator_payload),
    "rollout.max_attempts": (3, 1, lambda c: attempts(c)),
    "rollout.threads": (1, 2, engine),
    "rollout.lease_s": (30.0, 3.0, hub),
    "rollout.group_timeout_s": (60.0, 0.05, lambda c: in_time(c)),
    "learner.steps": (3, 4, hub),
    "learner.prompts_per_step": (4, 8, hub),
    "learner.minibatches": (1, 2, trained),
    "learner.micro_batch_tokens": (64, 512, trained),
    "learner.objective": ("gspo", "other", trained),
    "learner.anchor": ("engine", "recompute", clipped),
    "learner.lr": (1e-3, 2e-3, trained),
    "learner.warmup_updates": (0, 4, trained),
    "learner.schedule": ("constant", "linear", trained),
    "learner.weight_decay": (0.0, 0.1, trained),
    "learner.max_grad_norm": (1.0, 1e-9, trained),
    "learner.device": ("cpu", "cuda:99", lambda c: choose_device(c.learner.device)),
    "learner.activation_checkpointing": (False, True, trained),
    "learner.logprob_chunk_tokens": (256, 16, trained),
    "learner.threads": (1, 2, learner_threads),
    "learner.checkpoint_steps": (1, 2, checkpoints),
    "learner.keep_checkpoints": (2, 1, checkpoints),
    "sync.max_staleness": (0, 1, hub),
    "sync.bucket_mib": (1, 64, published),
    "sync.probe_sequences": (2, 4, published),
    "sync.max_mismatch": (1e-3, 1e3, lambda c: refused_samples(c)),
    "clip.low": (3e-4, 0.5, clipped),
    "clip.high": (4e-4, 0.5, clipped),
    "clip.calibration": ("none", "measured", clipped),
    "clip.z": (0.1, 1.96, clipped),
    "clip.sizing": ("off", "drift", sized),
    "clip.target": (0.1, 0.6, lambda c: sized(c, sizing="drift")),
    "clip.max_scale": (1.5, 3.0, lambda c: sized(c, sizing="drift")),
    "evaluation.samples": (0, 4, hub),
}


def members(config: Config) -> int:
    """How many completions a group asks the engine for."""
    import asyncio

    from shared.spans import Recorder

    asked: list[Any] = []

    class Engine:
        async def generate(self, request: Any) -> Any:
            asked.append(request)
            return Completion(np.array([1], np.int32), np.zeros(1, np.float32), ((0, 0, 1),), "stop")

    decoder = SimpleNamespace(decode=lambda ids, skip_special_tokens: "x")
    generator = GroupGenerator(config, Engine(), decoder, lambda samples, answer: [1.0] * len(samples), Recorder("w"))
    asyncio.run(generator.generate(Ticket(GroupId(0)), prompt_source(config).training_prompt(GroupId(0)), 0))
    return len(asked)


def in_time(config: Config) -> bool:
    """Whether a group whose completions take 0.2 s is generated."""
    import asyncio

    from shared.errors import GroupTimeout
    from shared.spans import Recorder

    class Engine:
        async def generate(self, request: Any) -> Any:
            await asyncio.sleep(0.2)
            return Completion(np.array([1], np.int32), np.zeros(1, np.float32), ((0, 0, 1),), "stop")

    decoder = SimpleNamespace(decode=lambda ids, skip_special_tokens: "x")
    generator = GroupGenerator(config, Engine(), decoder, lambda samples, answer: [1.0] * len(samples), Recorder("w"))
    prompt = prompt_source(config).training_prompt(GroupId(0))
    try:
        return bool(asyncio.run(generator.generate(Ticket(GroupId(0)), prompt, 0)))
    except GroupTimeout:
        return False


def attempts(config: Config) -> int:
    """How often a completion is sampled that is rejected every time."""
    import asyncio

    from shared.errors import RolloutRejected

    asked: list[Any] = []

    class Engine:
        async def generate(self, request: Any) -> Any:
            asked.append(request)
            raise RolloutRejected("never good")

    generator = GroupGenerator(config, Engine(), None, None, None)
    prompt = prompt_source(config).training_prompt(GroupId(0))
    with pytest.raises(RolloutRejected):
        asyncio.run(generator._sample(Ticket(GroupId(0)), 0, prompt))
    assert len({request.seed for request in asked}) == len(asked)
    return len(asked)


def actors(config: Config) -> int:
    """How many actors the rollout service starts."""
    from unittest.mock import MagicMock, patch

    import rollout.crew
    from rollout.main import run_workers

    with patch.object(rollout.crew, "ray") as ray, patch.object(rollout.crew, "NodeAffinitySchedulingStrategy"):
        ray.wait.side_effect = lambda pending, num_returns, timeout: (pending, [])
        actor: MagicMock = ray.remote.return_value.options.return_value
        run_workers(config, Path(), StopRequest())
        return actor.remote.call_count


def paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from paths(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_the_table_has_every_option_and_no_other() -> None:
    assert set(OBSERVERS) == set(paths(Config))


@pytest.mark.parametrize("option", OBSERVERS)
def test_option_makes_a_difference(option: str, folders: dict[str, Path], tmp_path: Path) -> None:
    first, second, observe = OBSERVERS[option]
    seen = [observed(option, value, observe, folders, tmp_path / str(i)) for i, value in enumerate((first, second))]
    assert seen[0] != seen[1]
    assert seen[0] != "Refused"


def observed(option: str, value: Any, observe: Callable[..., Any], folders: dict[str, Path], scratch: Path) -> Any:
    section, name = option.split(".")
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(folders["a"]), "precision": "float32"},
        "run": {"directory": str(folders["runs"])},
        "sampling": {"max_tokens": 8},
        "rollout": {"max_model_len": 64},
        "prompts": {"num_held_out": 4},
        "learner": {
            "prompts_per_step": 4,
            "minibatches": 1,
            "steps": 2,
            "lr": 1e-3,
            "micro_batch_tokens": 64,
            "max_grad_norm": 0.01,
        },
        "clip": {"low": 0.01, "high": 0.01, "calibration": "measured"},
        "sync": {"max_mismatch": 1e6},
    }
    if option == "learner.anchor":
        values["learner"]["minibatches"] = 2
    if option == "learner.schedule":
        values["learner"]["steps"] = 8
    if option == "learner.keep_checkpoints":
        values["learner"]["checkpoint_steps"] = 1
    if option == "model.path":
        value = str(folders[value])
    values.setdefault(section, {})[name] = value
    if option == "run.directory":
        values["run"]["directory"] = str(folders["runs"] / value)
    try:
        config = parse_config(values)
        if observe in (hub, checkpoints):
            scratch.mkdir()
            return observe(config, scratch)
        return observe(config)
    except ConfigError:
        return "Refused"
