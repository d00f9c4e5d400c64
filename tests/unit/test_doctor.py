"""What the doctor makes of an examination, how it is shown, and how the command ends. No engine, no Ray."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared import cli, launch
from shared.config import Config
from shared.config_file import load_config
from shared.doctor import conclusion, examined_config, judge, worst
from shared.doctor_view import Stages, as_json, show, stage
from shared.errors import RunFailed
from shared.examination import Examination, Memory, Rewards, SampleText, read_examination, write_examination
from shared.launch import Outcome
from shared.records import Mismatch, ProbeReport, SamplingReport, SyncReport

GIB = 1 << 30
SAMPLES = (SampleText("3+4=", "7<eos>", 1.0), SampleText("9" * 150 + "=", "1" * 150, 0.0))
REWARDS = Rewards(8, 5, 0, 64, 0, 10, 0.25, 0.0, 1.0, SAMPLES)
MEMORY = Memory(135_000_000, GIB, 8 * GIB, 269_000_000, 24 * GIB, GIB // 4, 8 * GIB, 4 * GIB, GIB)


def sampled(**changes: Any) -> SamplingReport:
    mismatch = Mismatch(700, -1.8e-3, 3.6e-3, 1.8e-3)
    report = SamplingReport("worker-a", 0, 64, mismatch, 0.3, 0.025, (0.05, 0.08), (0.02, 0.03), "")
    return replace(report, **changes)


def probed(**changes: Any) -> ProbeReport:
    return replace(ProbeReport("worker-a", 1, Mismatch(48, 0.0, 3e-3, 1.5e-3), 0.2, 0.4, True), **changes)


def examination(**changes: Any) -> Examination:
    sync = SyncReport("worker-a", 1, 269_000_000, 0.02, 0.4, 0.6, 0.1, 2.3, 0.003)
    healthy = Examination(
        "cpu", False, (sampled(),), REWARDS, MEMORY, True, 0, None, (sync,), (probed(),), (sampled(version=1),)
    )
    return replace(healthy, **changes)


def verdicts(config: Config, found: Examination | None, failure: str = "") -> dict[str, str]:
    """By name, of what is not ok. Whatever is not ok has a remedy."""
    findings = [finding for finding in judge(config, found, failure) if finding.verdict != "ok"]
    assert all(finding.remedy for finding in findings)
    return {finding.name: finding.verdict for finding in findings}


def test_engine_memory_is_told_whatever_decides_it(make_config: Callable[..., Config]) -> None:
    def told(memory: Memory, **rollout: Any) -> str:
        findings = judge(make_config(rollout=rollout), examination(memory=memory))
        return next(finding.value for finding in findings if finding.name == "engine memory")

    assert "KV cache 268 MB a worker (5 sequences of 512 tokens)" in told(MEMORY, max_num_seqs=5)
    assert "2.58 GB a worker (rollout.memory_share = 0.1)" in told(MEMORY, memory_share=0.1)
    assert "vLLM's own share of 25.77 GB" in told(replace(MEMORY, engine_kv_bytes=None))


def test_a_healthy_run_has_neither_fault_nor_warning(make_config: Callable[..., Config]) -> None:
    config = make_config()
    findings = judge(config, examination())
    assert verdicts(config, examination()) == {}
    assert [f.name for f in findings] == [
        "precision", "sampling check", "smallest shift", "clipped by noise", "sampling after a sync", "weight sync",
        "load check", "reward", "groups", "truncated", "learner memory", "engine memory", "published weights",
    ]  # fmt: skip
    assert "engine and learner agree" in conclusion(findings, config, examination())


@pytest.mark.parametrize(
    ("name", "verdict", "changes"),
    [
        ("sampling check", "fault", {"sampled": (sampled(fault="refused: rms 1 nat"),)}),
        ("sampling check", "warning", {"sampled": (sampled(mismatch=Mismatch(700, 0.03, 3.6e-3, 1.8e-3)),)}),
        ("sampling check", "fault", {"sampled": (), "resampled": ()}),
        ("sampling after a sync", "fault", {"resampled": (sampled(), sampled(fault="refused: rms 1 nat"))}),
        ("clipped by noise", "warning", {"sampled": (sampled(calibrated_clip=(0.02, 0.3)),)}),
        ("clipped by noise", "warning", {"sampled": (sampled(mismatch=Mismatch(200, -1.8e-3, 3.6e-3, 1.8e-3)),)}),
        ("load check", "fault", {"probes": (probed(released=False),)}),
        ("load check", "warning", {"probes": (), "has_probe": False}),
        ("experts", "warning", {"num_experts": 32, "num_unmet_experts": 7}),
        ("precision", "warning", {"is_emulated": True}),
        ("reward", "fault", {"rewards": replace(REWARDS, num_unscored=64, mean=None, least=None, most=None)}),
        ("reward", "warning", {"rewards": replace(REWARDS, num_unscored=40)}),
        ("groups", "warning", {"rewards": replace(REWARDS, num_mixed=0)}),
        ("dropped groups", "warning", {"rewards": replace(REWARDS, num_replaced=2)}),
        ("truncated", "warning", {"rewards": replace(REWARDS, num_truncated=64)}),
        ("learner memory", "warning", {"memory": replace(MEMORY, learner_free_bytes=GIB)}),
        ("published weights", "warning", {"memory": replace(MEMORY, shared_memory_free_bytes=GIB // 2)}),
        ("published weights", "warning", {"memory": replace(MEMORY, store_bytes=GIB // 4)}),
    ],
)
def test_each_fault_and_warning(
    name: str, verdict: str, changes: dict[str, Any], make_config: Callable[..., Config]
) -> None:
    assert verdicts(make_config(), examination(**changes)) == {name: verdict}


def test_no_reward_for_anything_is_a_fault(make_config: Callable[..., Config]) -> None:
    nothing = replace(REWARDS, num_mixed=0, mean=0.0, least=0.0, most=0.0)
    assert verdicts(make_config(), examination(rewards=nothing)) == {"reward": "fault", "groups": "warning"}


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("learner.anchor", {"learner": {"anchor": "recompute", "minibatches": 2}}),
        ("sync.probe_sequences", {"sync": {"probe_sequences": 0}}),
        ("sync.max_mismatch", {"sync": {"max_mismatch": 2.0}}),
    ],
)
def test_settings_that_are_worth_a_warning(
    name: str, sections: dict[str, Any], make_config: Callable[..., Config]
) -> None:
    assert verdicts(make_config(**sections), examination()) == {name: "warning"}
    assert verdicts(make_config(**sections), None) == {name: "warning"}  # also of a run that did not come far


def test_a_fixed_range_below_the_noise_is_a_warning_with_the_shares_it_cuts(make_config: Callable[..., Config]) -> None:
    config = make_config(clip={"calibration": "none"})
    assert verdicts(config, examination()) == {}
    found = examination(sampled=(sampled(fixed_clip=(0.31, 0.67)),))
    assert verdicts(config, found) == {"clipped by noise": "warning"}
    said = next(f for f in judge(config, found) if f.name == "clipped by noise")
    assert "0.0003/0.0004 31% of good and 67% of bad samples" in said.value
    assert verdicts(make_config(), found) == {}


def test_a_failure_is_a_fault_unless_one_explains_it(make_config: Callable[..., Config]) -> None:
    config = make_config()
    assert verdicts(config, None, "no engine") == {"run": "fault"}
    refused = examination(probes=(probed(released=False),))
    assert verdicts(config, refused, "Traceback") == {"load check": "fault"}


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "Traceback (most recent call last):\n  File\nRuntimeError: no engine\nPID: 7\nLook.",
            "RuntimeError: no engine",
        ),
        ("ended by signal 9. /a/log:\nloading\nupdate: 7\n", "ended by signal 9. /a/log: update: 7"),
        ("a group was dropped\nupdate: 7", "a group was dropped"),
    ],
)
def test_of_a_failure_the_line_that_names_it_is_in_the_table(
    text: str, cause: str, make_config: Callable[..., Config]
) -> None:
    assert judge(make_config(), None, text)[-1].value == cause


def test_the_last_sentence_counts_and_promises_nothing_with_a_fault(make_config: Callable[..., Config]) -> None:
    config, found = make_config(), examination(sampled=(sampled(fault="refused"),), is_emulated=True)
    assert conclusion(judge(config, found), config, found) == "1 fault, 1 warning"
    assert worst(judge(config, found)) == "fault"
    assert worst(judge(config, examination(is_emulated=True))) == "warning"


def test_the_examined_run_differs_only_in_how_long_it_is_and_where(make_config: Callable[..., Config]) -> None:
    config = make_config(
        clip={"calibration": "none"}, rollout={"workers": 3}, sync={"max_staleness": 2}, evaluation={"samples": 4}
    )
    examined = examined_config(config, "elsewhere")
    before, after = config.model_dump(), examined.model_dump()
    changed = {(s, k): after[s][k] for s, keys in before.items() for k, value in keys.items() if after[s][k] != value}
    assert changed == {
        ("run", "directory"): "elsewhere",
        ("clip", "calibration"): "measured",
        ("rollout", "workers"): 1,
        ("learner", "steps"): 2,
        ("sync", "max_staleness"): 0,
        ("evaluation", "samples"): 0,
    }


def test_an_examination_comes_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_examination(tmp_path) is None
    write_examination(tmp_path, examination())
    assert read_examination(tmp_path) == examination()
    with pytest.raises(ValueError, match="JSON"):
        write_examination(tmp_path, examination(score_s=float("nan")))
    assert read_examination(tmp_path) == examination()


def test_json_holds_every_number(make_config: Callable[..., Config]) -> None:
    config, found = make_config(), examination()
    told = json.loads(as_json(judge(config, found), found, config, ""))
    assert told["measured"] == json.loads(json.dumps(asdict(found)))
    assert (told["verdict"], told["failure"], told["max_mismatch"]) == ("ok", "", 0.25)
    assert {"name", "value", "verdict", "remedy"} == set(told["findings"][0])
    assert json.loads(as_json([], None, config, "why"))["measured"] is None


def test_a_person_sees_a_line_a_finding_the_samples_cut_and_a_last_sentence(
    make_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    config, found = make_config(), examination(is_emulated=True)
    show(judge(config, found), found, config, "a traceback that the report explains")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("warning  precision")
    assert "trains faster here" in lines[1]
    cut = '"...' + "9" * 99 + '=" -> "' + "1" * 100 + '..."'
    assert lines[-3:-1] == ['reward 1: "3+4=" -> "7<eos>"', f"reward 0: {cut}"]
    assert lines[-1].startswith("no faults, 1 warning; engine and learner agree")
    assert len(lines) == len(judge(config, found)) + 1 + 3
    show(judge(config, None, "RuntimeError: no engine"), None, config, "RuntimeError: no engine")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert (lines[0], lines[-2]) == ("fault  run  RuntimeError: no engine", "RuntimeError: no engine")


def test_the_stage_follows_the_files_that_appear(tmp_path: Path) -> None:
    def append(file: str, line: dict[str, Any]) -> None:
        with (tmp_path / file).open("a") as out:
            out.write(json.dumps(line) + "\n")

    seen = [stage(tmp_path)]
    append("events.jsonl", {"name": "joined"})
    seen.append(stage(tmp_path))
    write_examination(tmp_path, examination())
    seen.append(stage(tmp_path))
    append("syncs.jsonl", {"version": 1})
    seen.append(stage(tmp_path))
    append("events.jsonl", {"name": "learner_left"})
    seen.append(stage(tmp_path))
    assert [text.split()[0] for text in seen] == ["starting", "sampling,", "sending", "sampling", "ending"]


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    path = tmp_path / "first.toml"
    path.write_text(f'[model]\npath = "{model}"\n')
    return path


class Launch:
    """In place of the services: leaves an examination, or fails."""

    def __init__(self, found: Examination | None, failure: str = "", interrupted: bool = False) -> None:
        self.found, self.failure, self.interrupted = found, failure, interrupted
        self.folder = Path()

    def __call__(self, config: Config, run_directory: Path, view: launch.View) -> Outcome:
        self.folder = run_directory
        assert (run_directory / "config.json").exists()
        assert config.learner.steps == 2
        view.update()
        view.close()
        if self.found is not None:
            write_examination(run_directory, self.found)
        if self.failure:
            raise RunFailed(self.failure)
        return Outcome(finished=True, interrupted=self.interrupted)


@pytest.mark.parametrize(
    ("services", "code"),
    [
        (Launch(examination()), 0),
        (Launch(examination(is_emulated=True)), 0),
        (Launch(examination(sampled=(sampled(fault="refused"),))), 1),
        (Launch(None, "the rollout service ended with code 1. no engine"), 1),
        (Launch(examination(), "the learner service was ended by signal 9."), 1),
        (Launch(examination(), interrupted=True), 130),
    ],
)
def test_the_command_ends_with_1_for_a_fault_and_leaves_nothing(
    services: Launch, code: int, toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "examine", services)
    assert cli.main(["doctor", str(toml), "--json", "learner.lr=2e-5"]) == code
    assert not services.folder.exists()
    out = capsys.readouterr().out
    assert "seqrelay-doctor-" in str(services.folder)
    if code == 130:
        assert out == ""
        return
    told = json.loads(out)  # one object and nothing else
    assert (told["verdict"] == "fault", told["failure"]) == (code == 1, services.failure)


def test_without_json_it_says_what_it_does_and_what_it_found(
    toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "examine", Launch(examination()))
    assert cli.main(["doctor", str(toml)]) == 0
    out = capsys.readouterr().out
    assert "starting engine and learner" in out
    assert "no faults, no warnings; engine and learner agree" in out


def test_the_examination_takes_the_learners_place_beside_the_unchanged_rollout_service(
    make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    cluster = nullcontext(SimpleNamespace(address="here"))
    monkeypatch.setattr(launch, "private_cluster", lambda *arguments: cluster)
    monkeypatch.setattr(launch, "interrupt_at_signals", lambda: None)
    monkeypatch.setattr("shared.hub_start.start_hub", lambda config, run_directory: None)
    monkeypatch.setattr(launch, "run_services", lambda *arguments: started.append(arguments))
    view = Stages(tmp_path, quiet=True)
    launch.examine(make_config(), tmp_path, view)
    launch.train(make_config(), tmp_path, view)
    assert [modules for modules, *_ in started] == [("rollout.main", f"learner.{m}") for m in ("examine", "main")]
    assert [address for _, _, _, address, _ in started] == ["here", "here"]


@pytest.mark.parametrize("command", ["doctor", "train"])
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sampling.group_size=1", "a group of one has none. Set sampling.group_size to 2 or more"),
        ("sampling.top_p=0.9", "every importance ratio would be off by the kept mass. Set sampling.top_p = 1.0"),
        ("learner.loss_aggregation=token-mean", "unknown key 'learner.loss_aggregation'; known here: steps,"),
        ("learner.anchor=recompute", ""),
    ],
)
def test_what_cannot_be_run_as_written_is_refused_before_anything_starts(
    command: str, override: str, said: str, toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [] if said else ["learner.minibatches=1"]
    assert cli.main([command, str(toml), override, *more]) == 2
    assert (said or "makes every ratio 1") in capsys.readouterr().err


def test_help_names_the_command() -> None:
    helped = subprocess.run([sys.executable, "-m", "shared.cli", "--help"], capture_output=True, text=True, timeout=60)
    assert "doctor" in helped.stdout


def test_shipped_configs_give_no_warning_by_themselves() -> None:
    for path in sorted((Path(__file__).parents[2] / "scripts" / "configs").glob("*.toml")):
        assert verdicts(load_config(path), None) == {}
