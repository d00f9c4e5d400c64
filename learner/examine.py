"""The doctor's examination: `python -m learner.examine`, in the learner's place in a run that never trains.

Takes the groups of step 0 and scores them under the same weights; commits the step untrained and publishes those
weights as version 1, so that the worker loads them as it will load every later version; then takes and scores step 1,
which was sampled under what was loaded. Each part is on disk (shared.examination) before the next one begins.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import ceil
from pathlib import Path

import psutil
import ray
import torch
from transformers import AutoTokenizer

from learner.main import step_plan
from learner.policy import Policy, is_emulated
from learner.publish import Publisher
from learner.routing import experts_counted
from learner.sampling_check import sampling_reports
from shared.config import Config
from shared.errors import RunFailed, WeightsRefused
from shared.examination import Examination, Memory, Rewards, SampleText, write_examination
from shared.hub_client import LearnerHubClient
from shared.hub_start import start_hub
from shared.identity import identity_of
from shared.kv_cache import kv_cache_bytes
from shared.records import Calibration, Group, Manifest, ProbeReport, Publication, SamplingReport, SyncReport
from shared.run_files import read_syncs
from shared.schema import decode_group
from shared.service import run_service
from shared.spans import Recorder
from shared.stopping import StopRequest

NUM_SAMPLES = 5
ENGINE_START_S = 900.0  # 20 to 50 s on a small host; minutes where a large model is read over a network
LOAD_S = 600.0
_LOOK_AGAIN_S = 0.2

Decode = Callable[[Sequence[int]], str]


def run_examination(config: Config, run_directory: Path, stop: StopRequest) -> bool:
    """True once the run is examined and finished, False when stopped before.

    RunFailed with the other side's failure, or with what did not come in time; WeightsRefused when the worker refuses
    the learner's own weights.
    """
    torch.set_num_threads(config.learner.threads)
    hub = LearnerHubClient(config.run.name, start_hub(config, run_directory), stop)
    with hub.seated(identity_of(config)):
        policy = Policy.load(config)
        return Examiner(config, run_directory, hub, policy, text_decoder(config), stop).examine()


@dataclass
class Examiner:
    """The examination's course; `found` is what is known so far."""

    config: Config
    run_directory: Path
    hub: LearnerHubClient
    policy: Policy
    decode: Decode
    stop: StopRequest
    found: Examination = field(init=False)

    def __post_init__(self) -> None:
        self.publisher = Publisher(self.policy, self.config)
        self.recorder = Recorder("learner")
        self.found = Examination(str(self.policy.device), is_emulated(self.config.model.mode, self.policy.device))

    def examine(self) -> bool:
        """As `run_examination`."""
        with self.recorder.span("wait", 0) as waited:
            groups = self._take(0, ENGINE_START_S)
        if groups is None:
            return False
        with self.recorder.span("check", 0) as checked:
            sampled = self._score(groups, version=0)
        self._note(
            sampled=sampled,
            rewards=rewards_of(groups, self.decode),
            sample_s=waited.duration_s,
            score_s=checked.duration_s,
        )
        publication = self._publish(0, groups, changed=True)
        if not self._wait_for_load(publication) or (groups := self._take(1)) is None:
            return False
        self._note(resampled=self._score(groups, version=1))
        self._publish(1, groups, changed=False)
        return self.hub.wait_finished()

    def _take(self, step: int, more_s: float = 0.0) -> list[Group] | None:
        """The step's groups; None when asked to stop. RunFailed after the time that they may take, and `more_s`."""
        rollout = self.config.rollout
        at_once = max(1, rollout.max_num_seqs // self.config.sampling.group_size)
        limit_s = more_s + ceil(self.config.learner.prompts_per_step / at_once) * rollout.group_timeout_s
        with _limited(self.stop, limit_s) as late:
            payloads = self.hub.take(step)
        if payloads is None and late.is_set():
            raise RunFailed(f"no groups of step {step} within {limit_s:g} s: {self.hub.status().waiting_for}")
        return None if payloads is None else [decode_group(payload) for payload in payloads]

    def _score(self, groups: Sequence[Group], version: int) -> tuple[SamplingReport, ...]:
        reports = sampling_reports(self.policy, groups, self.config, version)
        self.hub.report(reports)
        return tuple(reports)

    def _publish(self, step: int, groups: Sequence[Group], *, changed: bool) -> Publication:
        """Commit the step with the weights as they are, and send them, if `changed` as if they were new."""
        self.hub.begin_step(step_plan(self.config, step, groups, Calibration()))
        publication = self.publisher.next(step + 1, groups, changed=changed)
        self.hub.commit_step(step, self.publisher.digest)
        self.hub.publish(publication)
        return publication

    def _wait_for_load(self, publication: Publication) -> bool:
        """Until the worker's verdict on version 1; False when asked to stop before."""
        deadline_s, has_probe = time.monotonic() + LOAD_S, bool(publication.manifest.probe)
        while not self.stop:
            syncs = tuple(sync for sync in read_syncs(self.run_directory) if sync.version == 1)
            probes = tuple(self.hub.probes(1))
            if probes or (syncs and not has_probe):
                self._note_load(syncs, probes, publication.manifest)
                if refused := [probe.worker_id for probe in probes if not probe.released]:
                    raise WeightsRefused(f"{refused[0]} refused the learner's own weights by the load check.")
                return True
            status = self.hub.status()
            if status.failure:
                raise RunFailed(status.failure)
            if time.monotonic() > deadline_s:
                raise RunFailed(f"no worker loaded version 1 within {LOAD_S:g} s: {status.waiting_for}")
            self.stop.wait(_LOOK_AGAIN_S)
        return False

    def _note_load(self, syncs: tuple[SyncReport, ...], probes: tuple[ProbeReport, ...], manifest: Manifest) -> None:
        with experts_counted(self.policy.model) as count:  # of no forward pass: how many there are
            self._note(
                syncs=syncs,
                probes=probes,
                has_probe=bool(manifest.probe),
                num_experts=count.num_experts,
                num_unmet_experts=self.publisher.num_unmet_experts,
                memory=measure_memory(self.policy, manifest.num_bytes, self.config),
            )

    def _note(self, **found: object) -> None:
        self.found = replace(self.found, **found)  # type: ignore[arg-type]
        write_examination(self.run_directory, self.found)


@contextmanager
def _limited(stop: StopRequest, limit_s: float) -> Iterator[threading.Event]:
    """Ends a wait that looks at `stop` after `limit_s` seconds; the event then says that it was for this reason."""
    late = threading.Event()

    def end() -> None:
        late.set()
        stop.set()

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def text_decoder(config: Config) -> Decode:
    """Token ids to text, special tokens written out."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True, trust_remote_code=False)
    return lambda ids: str(tokenizer.decode(ids))


def rewards_of(groups: Sequence[Group], decode: Decode) -> Rewards:
    """What the reward function said of these groups, and some of their completions as text."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    by_group = [[r.reward for r in group.rollouts if r.reward is not None] for group in groups]
    scored = [reward for rewards in by_group for reward in rewards]
    return Rewards(
        num_groups=len(groups),
        num_mixed=sum(bool(rewards) and max(rewards) > min(rewards) for rewards in by_group),
        num_replaced=sum(group.group.replacement > 0 for group in groups),
        num_rollouts=len(rollouts),
        num_unscored=len(rollouts) - len(scored),
        num_truncated=sum(rollout.finish_reason == "length" for rollout in rollouts),
        mean=sum(scored) / len(scored) if scored else None,
        least=min(scored, default=None),
        most=max(scored, default=None),
        samples=_samples(groups, decode),
    )


def _samples(groups: Sequence[Group], decode: Decode) -> tuple[SampleText, ...]:
    """Of as many rewards as possible, then of as many groups."""
    by_group = ([(group, rollout) for rollout in group.rollouts] for group in groups)
    pairs = [pair for members in zip_longest(*by_group) for pair in members if pair is not None]
    first = {rollout.reward: number for number, (_, rollout) in reversed(list(enumerate(pairs)))}
    chosen = sorted(first.values())[:NUM_SAMPLES]
    chosen += [number for number in range(len(pairs)) if number not in chosen][: NUM_SAMPLES - len(chosen)]
    return tuple(
        SampleText(decode(group.prompt_ids.tolist()), decode(rollout.completion_ids.tolist()), rollout.reward)
        for group, rollout in (pairs[number] for number in chosen)
    )


def measure_memory(policy: Policy, published_bytes: int, config: Config) -> Memory:
    """Of this process and this host, now."""
    ram, shared_memory = psutil.virtual_memory(), Path("/dev/shm")
    used, free = psutil.Process().memory_info().rss, ram.available
    if policy.device.type == "cuda":
        used, free = torch.cuda.memory_allocated(policy.device), torch.cuda.mem_get_info(policy.device)[0]
    has_gpu = torch.cuda.is_available()
    return Memory(
        num_parameters=sum(parameter.numel() for _, parameter in policy.named_parameters()),
        learner_bytes=used,
        learner_free_bytes=free,
        published_bytes=published_bytes,
        engine_total_bytes=torch.cuda.get_device_properties(0).total_memory if has_gpu else ram.total,
        engine_kv_bytes=None if has_gpu or config.rollout.memory_share else kv_cache_bytes(config),
        ram_free_bytes=ram.available,
        shared_memory_free_bytes=shutil.disk_usage(shared_memory).free if shared_memory.is_dir() else 0,
        store_bytes=int(ray.cluster_resources().get("object_store_memory", 0)),
    )


def main(arguments: list[str]) -> int:
    return run_service("learner", run_examination, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
