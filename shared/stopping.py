"""How a service is asked to end: the first request lets it finish what it holds, the second ends it at once."""

import os
import signal
import threading
from types import FrameType

STOPPED = 3  # exit code of a service that ended on request, before the run was finished
_AT_ONCE = 128 + signal.SIGTERM


class StopRequest:
    """Set once, never taken back; waited for by threads and looked at between two pieces of work."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)

    def on_signals(self) -> None:
        """From now on SIGTERM and SIGINT are requests; the second one ends this process, whatever it does."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self:
                os._exit(_AT_ONCE)
            self.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle)
