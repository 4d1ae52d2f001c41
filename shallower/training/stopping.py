"""Ctrl-C and SIGTERM: whoever is at work hears of them, and ends in good order."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """The work was stopped by the signal `number`, after its checkpoint was written."""

    def __init__(self, text: str = "", number: int = signal.SIGINT) -> None:
        super().__init__(text)
        self.number = number

    @property
    def exit_code(self) -> int:
        """As of a process that the signal has ended: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.number


@contextmanager
def stopping(tell: Callable[[int], None] | None = None) -> Iterator[list[int]]:
    """A list that Ctrl-C and SIGTERM put their number in, after which `tell` is called with it."""
    stop: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        stop.append(number)
        if tell is not None:
            tell(number)

    previous: dict[signal.Signals, Any] = {}
    try:
        for which in (signal.SIGINT, signal.SIGTERM):
            previous[which] = signal.signal(which, note)
    except ValueError:  # signals belong to the main thread
        pass
    try:
        yield stop
    finally:
        for which, handler in previous.items():
            signal.signal(which, handler)
