"""How fast a disk gives the bytes of files, past the page cache or from it."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inkling_jax.errors import InputError

READ_BYTES = 1 << 24  # at once, as loading does; a multiple of any disk's block, which O_DIRECT wants
THREADS = (4, 16)  # those of loading, and more: the better counts
LIMIT_S = 4.0  # of reading with so many threads


@dataclasses.dataclass(frozen=True)
class ReadSpeed:
    """Bytes a second, and how they were read."""

    bytes_per_second: float
    method: str

    def fields(self) -> dict[str, float | str]:
        """As a row names its ceiling."""
        return {"ceiling": self.method, "ceiling_gbs": round(self.bytes_per_second / 1e9, 2)}


def read_speed(files: Sequence[Path], *, cached: bool, limit_s: float = LIMIT_S) -> ReadSpeed:
    """The fastest of reading the files in order with some numbers of threads, each time for `limit_s` seconds at most.

    Not `cached`: with O_DIRECT, so that the kernel's page cache takes no part; where a file system has no O_DIRECT, after
    `forget`. A machine that runs this one may have a cache of its own, which nothing here can empty.
    """
    best = None
    for threads in THREADS:
        direct = not cached and _takes_direct(files[0])
        if not cached and not direct:
            forget(files)
        found = _timed(files, threads, direct, limit_s)
        method = f"{'O_DIRECT' if direct else 'cached' if cached else 'uncached'} reads, {threads} threads"
        if best is None or found > best.bytes_per_second:
            best = ReadSpeed(found, method)
    assert best is not None
    return best


def forget(files: Iterable[Path]) -> None:
    """Write what is not on the disk yet, and take the files out of the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def bytes_from_disk() -> int | None:
    """Bytes that this process had read from disks until now; None where the system does not count them."""
    try:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return None
    return int(counts["read_bytes"])


def _takes_direct(file: Path) -> bool:
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise InputError(f"{file}: {error.strerror}") from None
    return True


def _timed(files: Sequence[Path], threads: int, direct: bool, limit_s: float) -> float:
    """Bytes a second of reading with so many threads."""
    own, start = threading.local(), time.perf_counter()
    descriptors = [os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for file in files]

    def pieces() -> Iterator[tuple[int, int]]:
        for descriptor in descriptors:
            yield from ((descriptor, place) for place in range(0, os.fstat(descriptor).st_size, READ_BYTES))

    def read(piece: tuple[int, int]) -> int:
        if time.perf_counter() - start > limit_s:
            return 0
        if not hasattr(own, "buffer"):
            own.buffer = mmap.mmap(-1, READ_BYTES)  # O_DIRECT wants memory that begins with a page
        return os.preadv(piece[0], [own.buffer], piece[1])

    try:
        with ThreadPoolExecutor(threads, "read-disk") as pool:
            total = sum(pool.map(read, pieces()))
        return total / (time.perf_counter() - start)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
