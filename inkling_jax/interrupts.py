"""Signals at points of our choosing: an interrupt between a donated call and its result would lose the state."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Let a Ctrl-C that comes inside act when the block is done; a second one acts at once.

    Outside the main thread, which is the one that Python interrupts, it does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        before(*held[0])


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list to which the first Ctrl-C or SIGTERM that comes inside is added, in the place of what it does; a second one acts.

    Those that the process was started to ignore stay so. For the main thread.
    """
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)
        else:
            came.append(number)

    heeded = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, note)
    try:
        yield came
    finally:
        for number in heeded:
            signal.signal(number, before[number])
