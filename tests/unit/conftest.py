"""Hubs for unit tests: as plain objects, on a clock that tests move."""

from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_stories import IDENTITY, LEARNER, POLL_S, Clock, MakeHub, run
from worker_stories import small_config

from shared.config import Config
from shared.hub import Hub

MakeConfig = Callable[..., Config]
Story = Callable[[Config, Hub], Coroutine[Any, Any, None]]


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


@pytest.fixture
def tell(make_config: MakeConfig, make_hub: MakeHub) -> Callable[..., None]:
    """Runs a story with a config and a hub at which a learner sits."""

    def tell(story: Story, **sections: dict[str, Any]) -> None:
        config = small_config(make_config, **sections)
        hub = make_hub(0.1, **{name: values for name, values in config.model_dump().items() if name != "model"})

        async def seated() -> None:
            await hub.sit_down(LEARNER, IDENTITY)
            await story(config, hub)

        run(seated())

    return tell
