"""A recorded run trained again: the same weights, and what differs is named."""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_group, tiny_policy
from transformers import AutoModelForCausalLM

from learner.optim import Optimizer
from learner.publish import Publisher, published_digest
from learner.replay import main, replay
from learner.step import train_step
from shared.config_file import load_resolved
from shared.errors import ConfigError, SchemaError
from shared.ledger import Ledger, LedgerRules
from shared.records import ClipRange, Group, Rollout, Segment, StepPlan
from shared.run_files import read_recorded_step, read_steps
from shared.schema import encode_group
from shared.store import Store, read_trajectories, write_trajectories

STEPS, PROMPTS = 4, 2
WITHOUT_SIGNAL = 2  # a step whose rewards are all equal
UNCLIPPED = ClipRange(0.999, 1e6)  # so that every sequence has a part in the gradient
WORKER = "worker-0"


def record_run(root: Path, kind: str = "dense", num_exported: int = STEPS) -> Path:
    """Train as the learner does, with a real ledger and store; the run directory. The last weights are in `end`."""
    policy, config = tiny_policy(root / "model", kind, tied=kind == "dense", minibatches=2, weight_decay=0.1)
    (root / "model" / "tokenizer.json").write_text("{}")
    run = root / "run"
    store, ledger = Store(run), Ledger(LedgerRules(PROMPTS, 0, STEPS))
    (run / "config.json").write_text(config.model_dump_json())
    optimizer, publisher = Optimizer(policy, config), Publisher(policy, config)
    for step in range(STEPS):
        groups = []
        for ticket in ledger.issue(WORKER, step, PROMPTS, now_s=0.0):
            rewards: list[float | None] = [1.0] * 3 if step == WITHOUT_SIGNAL else [1.0, None, 0.0, 0.5]
            groups.append(replace(tiny_group(ticket.group.number, rewards), group=ticket.group))
            ledger.submit(WORKER, ticket)
            store.save_ready(ledger.row(ticket.group), encode_group(groups[-1]))
        plan = StepPlan(step, tuple(ledger.take(step) or ()), 11 + step, UNCLIPPED)
        ledger.begin_step(plan)
        save_step(store, ledger, step)
        changed = train_step(policy, optimizer, groups, plan, config).num_updates > 0
        publisher.next(step + 1, groups, changed=changed)
        ledger.commit_step(step, publisher.digest)
        save_step(store, ledger, step)
        if step < num_exported:
            store.export_step(plan)
        store.save_published(ledger.publish(step + 1))
    store.close()
    policy.save(root / "end")
    return run


def save_step(store: Store, ledger: Ledger, step: int) -> None:
    row = ledger.step_row(step)
    store.save_step(row, [ledger.row(group) for group in row.plan.groups])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.put", lambda value: None)
        return record_run(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the recorded run that a test may change."""
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def files(directory: Path) -> dict[str, tuple[bytes, int]]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def trajectory(run: Path, step: int) -> Path:
    return run / "trajectories" / f"step-{step:06d}.parquet"


def rewrite(path: Path, change: Callable[[Rollout], Rollout]) -> None:
    """Change the first rollout of a step's file."""
    first, *others = read_trajectories(path)
    changed = replace(first, rollouts=(change(first.rollouts[0]), *first.rollouts[1:]))
    write_trajectories(path, [encode_group(group) for group in (changed, *others)], 0)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_replay_gives_the_recorded_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("ray.put", lambda value: None)
    run = record_run(tmp_path, kind)
    before = files(run)
    steps = list(replay(load_resolved(run / "config.json"), run, out=tmp_path / "again"))
    assert [step.equal for step in steps] == [True] * STEPS
    assert len({step.digest for step in steps}) == STEPS - 1  # the step without a signal moved nothing
    assert [step.num_updates for step in steps] == [2, 2, 0, 2]
    assert [step.reward_mean for step in steps] == [0.5, 0.5, 1.0, 0.5]
    assert steps[WITHOUT_SIGNAL].clip_fraction_positive is None
    ends = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("end", "again")]
    assert all(torch.equal(a, b) for a, b in zip(*(end.parameters() for end in ends), strict=True))
    assert (tmp_path / "again" / "tokenizer.json").exists()
    assert files(run) == before


def test_the_digest_is_that_of_the_publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.put", lambda value: None)
    policy, config = tiny_policy(tmp_path, "moe")
    publisher = Publisher(policy, config)
    publisher.next(5, [tiny_group(0, [1.0, 0.0])], changed=True)
    assert published_digest(policy, config) == publisher.digest


def test_groups_that_were_not_exported_yet_come_from_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.put", lambda value: None)
    run = record_run(tmp_path, num_exported=STEPS - 1)  # killed between a commit and its export
    assert not trajectory(run, STEPS - 1).exists()
    assert all(step.equal for step in replay(load_resolved(run / "config.json"), run))


def shift(rollout: Rollout) -> Rollout:
    """One token's log-probability 0.1 nats lower, and the segment's sum with it."""
    assert rollout.behavior_logprobs is not None
    logprobs = rollout.behavior_logprobs.copy()
    logprobs[0] -= 0.1
    segment = Segment(0, 0, rollout.num_tokens, float(logprobs.sum(dtype=np.float64)))
    return replace(rollout, behavior_logprobs=logprobs, segments=(segment,))


@pytest.mark.parametrize("change", [shift, lambda rollout: replace(rollout, reward=0.9)])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_changed_data_is_seen_at_its_step(
    run: Path, capsys: pytest.CaptureFixture[str], step: int, change: Callable[[Rollout], Rollout]
) -> None:
    rewrite(trajectory(run, step), change)
    assert main(["--run", str(run)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert ["DIFFERENT" in line for line in lines[1:]] == [False] * step + [True] * (STEPS - step)
    assert last.startswith(f"step {step} is the first of {STEPS - step} (of {STEPS}) that gave other weights: ")


def test_the_table_and_the_json_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run", str(run), "--to-step", "3"]) == 0
    header, *lines, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "reward", "loss", "clip", "+", "clip", "-", "digest"]
    assert [line.split()[:2] for line in lines] == [["0", "0.500"], ["1", "0.500"], ["2", "1.000"]]
    assert lines[WITHOUT_SIGNAL].split()[2:6] == ["0.00000", "-", "-", "equal"]
    assert last == "all 3 steps gave the recorded weights"

    rewrite(trajectory(run, 1), shift)
    assert main(["--run", str(run), "--json"]) == 1
    rows: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["kind"] for row in rows] == ["step"] * STEPS + ["summary"]
    assert [row["equal"] for row in rows[:-1]] == [True, False, False, False]
    assert rows[-1] == {"kind": "summary", "num_steps": STEPS, "num_equal": 1, "first_different": 1}


@pytest.mark.parametrize("to_step", [-1, 0, STEPS + 1])
def test_a_step_out_of_range_is_refused(run: Path, capsys: pytest.CaptureFixture[str], to_step: int) -> None:
    assert main(["--run", str(run), "--to-step", str(to_step)]) == 2
    message = capsys.readouterr().err
    assert f"--to-step = {to_step}" in message
    assert f"has {STEPS} committed steps. Give a number from 1 to {STEPS}" in message


def test_what_cannot_be_replayed_is_refused_with_a_reason(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str, directory: Path = run) -> str:
        assert main(["--run", str(directory), *arguments]) == 2
        return capsys.readouterr().err

    assert "config.json" in refused(directory=tmp_path / "nowhere")
    assert "exists already" in refused("--out", str(tmp_path))

    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(run / "config.json", empty)
    assert "ledger.sqlite" in refused(directory=empty)
    assert [path.name for path in empty.iterdir()] == ["config.json"]
    Store(empty).close()
    assert "no step is committed yet" in refused(directory=empty)

    trajectory(run, 1).unlink()
    assert "step-000001.parquet" in refused()
    values = json.loads((run / "config.json").read_text())
    values["model"]["path"] = "models/elsewhere"
    (run / "config.json").write_text(json.dumps(values))
    message = refused()
    assert f"'models/elsewhere': no such folder in {Path.cwd()}" in message
    assert "start it in the folder the run was started in" in message


def test_the_ledger_is_read_and_not_changed(run: Path, recorded: Path) -> None:
    before = files(run)
    rows = read_steps(run)
    assert [row.plan.step for row in rows] == list(range(STEPS))
    assert all(row.published and row.weights_digest for row in rows)
    step = read_recorded_step(run, rows[1])
    assert (step.plan, step.weights_digest, len(step.groups)) == (rows[1].plan, rows[1].weights_digest, PROMPTS)
    assert files(run) == before
    (run / "ledger.sqlite").chmod(0o400)
    run.chmod(0o500)  # as another user's run
    assert read_steps(run) == read_steps(recorded)
    run.chmod(0o700)


def test_a_ledger_with_odd_characters_in_its_path_is_read(run: Path, tmp_path: Path) -> None:
    odd = run.rename(tmp_path / "50% a?b#c=d")
    assert len(read_steps(odd)) == STEPS
    assert read_recorded_step(odd, read_steps(odd)[0]).groups


def test_groups_come_in_the_plans_order_and_none_may_be_missing(run: Path) -> None:
    row = read_steps(run)[0]
    as_recorded = read_recorded_step(run, row).groups
    groups: list[Group] = read_trajectories(trajectory(run, 0))
    write_trajectories(trajectory(run, 0), [encode_group(group) for group in groups[::-1]], 0)
    assert read_recorded_step(run, row).groups == as_recorded
    write_trajectories(trajectory(run, 0), [encode_group(group) for group in groups[:1]], 0)
    with pytest.raises(SchemaError, match=r"step-000000\.parquet: group 1\.0 of step 0 is not there"):
        read_recorded_step(run, row)


def test_a_ledger_that_cannot_be_read_is_named(run: Path) -> None:
    with sqlite3.connect(run / "ledger.sqlite") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(SchemaError, match=r"ledger\.sqlite has layout version 99"):
        read_steps(run)
    (run / "ledger.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(SchemaError, match=r"ledger\.sqlite: file is not a database"):
        read_steps(run)


def test_a_ledger_cut_in_the_middle_of_a_change_is_not_guessed_at(run: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    with sqlite3.connect(run / "ledger.sqlite", isolation_level=None) as database:
        database.execute("PRAGMA cache_size = 1")  # pages go to the file before the commit
        database.execute("BEGIN IMMEDIATE")
        database.execute("UPDATE steps SET weights_digest = hex(randomblob(9999))")
        shutil.copytree(run, cut)  # as a kill leaves it
        database.execute("ROLLBACK")
    database.close()
    assert (cut / "ledger.sqlite-journal").exists()
    before = files(cut)
    with pytest.raises(SchemaError, match="resume the run once"):
        read_steps(cut)
    assert files(cut) == before
    Store(cut).close()
    assert [row.plan for row in read_steps(cut)] == [row.plan for row in read_steps(run)]


def test_a_model_that_is_gone_is_a_config_error(run: Path) -> None:
    config = load_resolved(run / "config.json")
    gone = config.model_copy(update={"model": config.model.model_copy(update={"path": "/no/such/model"})})
    with pytest.raises(ConfigError, match=r"model\.path = '/no/such/model': no such folder\. Replay needs"):
        next(replay(gone, run))


@pytest.mark.full
def test_replay_needs_neither_ray_nor_an_engine() -> None:
    code = "import sys, learner.replay; print(*sorted({'ray', 'vllm'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
