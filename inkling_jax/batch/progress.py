"""How far a batch is and how fast: a bar at a terminal, a line now and then elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

_SECONDS_BETWEEN_LINES = 10.0
_WINDOW = 60.0  # seconds whose work says how fast it goes


class Progress:
    """A context manager; `update(lines, tokens)` tells how much of `total` lines is done, and how many tokens were made."""

    def __init__(self, total: int, *, quiet: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._total, self._clock = total, clock
        self._stream = sys.stderr if stream is None else stream
        self._plain = not quiet and not self._stream.isatty()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._bar = None if quiet or self._plain else Bar(*columns, console=Console(file=self._stream))

    def __enter__(self) -> Progress:
        self._start = self._told = self._clock()
        self._seen = deque([(self._start, 0, 0)])
        self._now = 0, 0
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def update(self, lines: int, tokens: int) -> None:
        """So much is done by now."""
        now = self._clock()
        self._now = lines, tokens
        if now - self._seen[-1][0] < 0.5 and lines < self._total:
            return
        self._seen.append((now, lines, tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW:
            self._seen.popleft()
        if self._bar is not None:
            self._bar.update(self._task, completed=lines, description=self._pace())
        elif self._plain and now - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = now
            print(f"batch: {lines:,} of {self._total:,} lines, {self._pace()}", file=self._stream, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def average(self) -> str:
        """A line on all that was done here."""
        lines, tokens = self._now
        seconds = max(self._clock() - self._start, 1e-9)
        return f"{lines:,} lines in {time_text(seconds)}: {lines / seconds:.2f} requests/s, {tokens / seconds:,.1f} tokens/s"

    def _pace(self) -> str:
        (then, lines_then, tokens_then), (now, lines, tokens) = self._seen[0], self._seen[-1]
        if not tokens:
            return "no token yet (a first run compiles)"
        seconds = max(now - then, 1e-9)
        rate = (lines - lines_then) / seconds
        left = f"{time_text((self._total - lines) / rate)} left" if rate else "time left unknown"
        return f"{(tokens - tokens_then) / seconds:,.1f} tokens/s, {rate:.2f} requests/s, {left}"


def time_text(seconds: float) -> str:
    """A duration for people."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
