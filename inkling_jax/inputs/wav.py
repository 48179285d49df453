"""WAV files of whole numbers (8, 16, 24 or 32 bits) and of floats (32 or 64), RF64 among them, read block by block."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from inkling_jax.errors import InputError

EXTENSIBLE = 0xFFFE  # the tag proper then begins a GUID that ends so:
GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")
NUMBERS = {(1, 1): "u1", (1, 2): "<i2", (1, 3): "u1", (1, 4): "<i4", (3, 4): "<f4", (3, 8): "<f8"}  # by tag and bytes
STREAMED = 0x7FFFF000  # from this size on, one that the file does not have means "not known when this was written"
MAX_CHUNKS = 1000  # before the samples: a file of zeros would be many empty ones
BLOCK = 1 << 20  # bytes read at a time


class Format(NamedTuple):
    """What a "fmt " chunk says of the samples."""

    tag: int
    channels: int
    rate: int
    frame: int  # bytes of one sample of all channels


def open_wav(file: BinaryIO, name: str) -> tuple[int, Iterator[np.ndarray]] | None:
    """Rate and samples [n, channels] of a WAV file of plain numbers, as stored, except that 24 bits become the upper of 32.

    None, with the file at its beginning again, where it is another kind of file or holds compressed samples. Raises InputError,
    beginning with `name`, where it is broken.
    """
    head = file.read(12)
    if head[:4] not in (b"RIFF", b"RF64") or head[8:] != b"WAVE":
        file.seek(0)
        return None
    fmt, size = _find_samples(file, name)
    if not fmt.channels or fmt.frame % fmt.channels or not fmt.frame:
        raise InputError(f"{name} is a broken WAV file: {fmt.frame} bytes for {fmt.channels} channels")
    kind = NUMBERS.get((fmt.tag, fmt.frame // fmt.channels))
    if kind is None:
        file.seek(0)
        return None
    return fmt.rate, _samples(file, fmt, kind, size)


def _find_samples(file: BinaryIO, name: str) -> tuple[Format, int]:
    """The format and the bytes of samples; leaves the file at the first of them."""
    fmt, long_size = None, None
    for _ in range(MAX_CHUNKS):
        header = file.read(8)
        if len(header) < 8:
            break
        kind, size = struct.unpack("<4sI", header)
        start = file.tell()
        if kind == b"data":
            if fmt is None:
                raise InputError(f"{name} is a broken WAV file: no format before its samples")
            there = file.seek(0, os.SEEK_END) - start
            file.seek(start)
            wanted = long_size if long_size is not None and size == 0xFFFFFFFF else size
            if wanted > there and wanted < STREAMED:
                raise InputError(f"{name} is a broken WAV file: it says {wanted} bytes of samples and has {there}")
            return fmt, min(wanted, there)
        if kind == b"ds64" and size >= 16:
            body = file.read(16)
            long_size = struct.unpack("<Q", body[8:])[0] if len(body) == 16 else None
        elif kind == b"fmt ":
            fmt = _format(file.read(min(size, 40)), name)
        file.seek(start + size + size % 2)
    raise InputError(f"{name} is a broken WAV file: it has no samples (no data chunk)")


def _format(body: bytes, name: str) -> Format:
    """The body of a "fmt " chunk."""
    if len(body) < 16:
        raise InputError(f"{name} is a broken WAV file: a format of {len(body)} bytes; 16 would be right")
    tag, channels, rate, _, frame, _ = struct.unpack("<HHIIHH", body[:16])
    if tag == EXTENSIBLE and len(body) == 40 and body[26:] == GUID_TAIL:
        tag = struct.unpack("<H", body[24:26])[0]
    return Format(tag, channels, rate, frame)


def _samples(file: BinaryIO, fmt: Format, kind: str, size: int) -> Iterator[np.ndarray]:
    """The samples in blocks; a part of a sample at the end is no sample."""
    left = size // fmt.frame
    while left:
        count = min(left, max(BLOCK // fmt.frame, 1))
        values = np.frombuffer(file.read(count * fmt.frame), kind)
        if fmt.frame == 3 * fmt.channels:
            wide = np.zeros((count * fmt.channels, 4), np.uint8)
            wide[:, 1:] = values.reshape(-1, 3)
            values = wide.view("<i4")
        yield values.reshape(count, fmt.channels)
        left -= count
