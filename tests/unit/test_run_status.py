"""Asking a run to stop, and what is said of it, with a stand-in for the hub's handle."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

import shared.run_status
from shared.errors import RunFailed
from shared.hub_state import HubStatus, WorkerStatus
from shared.run_status import _drain, as_text

QUIET = HubStatus(9, 4, {"timeout": 2}, 3, 2, 2, 0, 5, {0: 3, 1: 1}, finished=False)
BUSY = replace(QUIET, learner="host:1", learner_age_s=0.5, workers={"w0": WorkerStatus(2, 0.1, 9.0, 3)})


class StubHub:
    """Answers the looks in turn; `asked` counts requests to stop. An answer may be an exception."""

    def __init__(self, *answers: Any) -> None:
        self._answers, self.asked = list(answers), 0
        self.status = SimpleNamespace(remote=lambda: self._answers.pop(0) if len(self._answers) > 1 else answers[-1])
        self.request_stop = SimpleNamespace(remote=self._stop)

    def _stop(self) -> None:
        self.asked += 1


@pytest.fixture
def drain(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def get(answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("ray.get", get)
    for name, value in (("_POLL_S", 0.0), ("_LOOK_AGAIN_S", 0.01), ("_HUB_BACK_S", 0.3)):
        monkeypatch.setattr(shared.run_status, name, value)

    def drained(hub: StubHub, timeout_s: float = 5.0) -> list[str]:
        said: list[str] = []
        _drain(hub, timeout_s, said.append)
        return said

    return drained


def stopping(status: HubStatus) -> HubStatus:
    return replace(status, stopping=True)


def test_it_waits_for_learner_and_workers_and_says_so(drain: Callable[..., list[str]]) -> None:
    hub = StubHub(BUSY, stopping(BUSY), stopping(replace(BUSY, workers={})), stopping(QUIET))
    assert drain(hub) == ["waiting for learner, w0", "waiting for learner"]
    assert hub.asked == 1


def test_a_learner_that_is_dead_is_not_waited_for(drain: Callable[..., list[str]]) -> None:
    assert drain(StubHub(QUIET, stopping(replace(QUIET, learner="host:1", learner_age_s=60.0)))) == [
        "waiting for the services"
    ]


def test_a_hub_that_was_killed_meanwhile_is_asked_again(drain: Callable[..., list[str]]) -> None:
    hub = StubHub(BUSY, stopping(BUSY), RayActorError(), QUIET, stopping(BUSY), stopping(QUIET))
    assert drain(hub)[0] == "waiting for learner, w0"
    assert hub.asked == 2


def test_a_hub_that_stays_away_ends_the_wait_and_one_that_drags_on_is_an_error(drain: Callable[..., list[str]]) -> None:
    assert drain(StubHub(stopping(BUSY), RayActorError())) == ["waiting for learner, w0"]
    with pytest.raises(RunFailed, match="still waiting for learner, w0"):
        drain(StubHub(stopping(BUSY)), timeout_s=0.2)


def test_the_account_is_the_first_line() -> None:
    text = as_text(BUSY, served=True)
    assert text.splitlines()[0] == "groups    9 issued = 4 trained + 2 dropped (timeout 2) + 3 pending"
    assert "0: 3 (75%), 1: 1 (25%)" in text
    assert "w0: version 2, 3 groups, joined 9 s ago" in text
    assert "nobody serves this run; it is not finished" in as_text(QUIET, served=False)
