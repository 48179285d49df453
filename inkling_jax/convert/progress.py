"""Progress of a long read or write in bytes: a bar on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """A context manager; `advance(nbytes)` reports work done. Everything goes to `stream`, standard error by default."""

    def __init__(
        self,
        total: int,
        *,
        label: str,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total = total
        self.done = 0
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._plain = not quiet and not self._stream.isatty()
        self._bar = None if quiet or self._plain else _bar(self._stream)

    def __enter__(self) -> Progress:
        self._start = self._last = self._clock()
        if self._bar is not None:
            self._task = self._bar.add_task(self._label, total=self.total)
            self._bar.start()
        elif self._plain:
            self._line(f"{size_text(self.total)} to go")
        return self

    def advance(self, nbytes: int) -> None:
        """`nbytes` more are done."""
        self.done += nbytes
        if self._bar is not None:
            self._bar.update(self._task, advance=nbytes)
        elif self._plain and self._clock() - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = self._clock()
            percent = 100 * self.done // max(self.total, 1)
            self._line(f"{percent}%, {size_text(self.done)} of {size_text(self.total)}, {self._rate()}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._plain and kind is None:
            self._line(f"{size_text(self.done)} in {self._clock() - self._start:.1f} s, {self._rate()}")

    def _line(self, text: str) -> None:
        print(f"{self._label}: {text}", file=self._stream, flush=True)

    def _rate(self) -> str:
        return f"{self.done / max(self._clock() - self._start, 1e-9) / 1e9:.2f} GB/s"


def _bar(stream: TextIO) -> Bar:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Bar(*columns, console=Console(file=stream))


def size_text(nbytes: int) -> str:
    """A number of bytes for people."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
