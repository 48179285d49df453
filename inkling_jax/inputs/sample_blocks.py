"""Streams of samples in blocks of fixed size, so that audio of any length takes bounded memory and few compilations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float32


def overlapping(
    blocks: Iterable[Float32[np.ndarray, " n"]], hop: int, before: int, after: int
) -> Iterator[tuple[Float32[np.ndarray, " size"], int]]:
    """Windows of before + hop + after samples, each `hop` further in the stream, and how many of its `hop` are the stream's.

    The stream has `before` zeros in front of it and zeros without end behind it. A stream without samples has no windows.
    """
    window, filled = np.zeros(before + hop + after, np.float32), before
    for block in blocks:
        while len(block):
            taken = min(len(block), len(window) - filled)
            window[filled : filled + taken] = block[:taken]
            block, filled = block[taken:], filled + taken
            if filled == len(window):
                yield window, hop
                # A new array: whoever took the last one may still read it.
                window, filled = np.concatenate([window[hop:], np.zeros(hop, np.float32)]), before + after
    while filled > before:
        yield window, min(filled - before, hop)
        window, filled = np.concatenate([window[hop:], np.zeros(hop, np.float32)]), filled - hop


def bucket(needed: int, sizes: Sequence[int]) -> int:
    """The least of the ascending `sizes` that holds `needed`."""
    return next(size for size in sizes if size >= needed)
