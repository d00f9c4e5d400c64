"""Hubs for unit tests: as plain objects, on a clock that tests move."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_stories import POLL_S, Clock, MakeHub

from shared.config import Config
from shared.hub import Hub


@pytest.fixture
def make_hub(make_config: Callable[..., Config], tmp_path: Path) -> Iterator[MakeHub]:
    """A hub on `tmp_path`. Made again, it is what a killed hub comes back as; the one before is closed."""
    hubs: list[Hub] = []

    def make(poll_s: float = POLL_S, **sections: dict[str, Any]) -> Hub:
        if hubs:
            hubs[-1].close()
        hubs.append(Hub(make_config(**sections), tmp_path, poll_s))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which the hub measures leases."""
    clock = Clock()
    for module in ("shared.hub", "shared.hub_core"):
        monkeypatch.setattr(f"{module}.time", clock)
    return clock
