"""A bar for each part of a study that is being made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A function of (part, how much of it is done, how much there is) that shows it, on stderr."""
    with Progress(console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield progress
