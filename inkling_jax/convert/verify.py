"""Proof that a converted checkpoint holds what its source does: every number read from both, and compared bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from inkling_jax.config import ModelConfig
from inkling_jax.convert.conversion import Conversion
from inkling_jax.convert.converted import RECORD, open_weights, read_record
from inkling_jax.convert.progress import Progress
from inkling_jax.convert.provenance import copied_files, sha256
from inkling_jax.convert.slices import extents
from inkling_jax.convert.view import Box
from inkling_jax.errors import CheckpointError

THREADS = 4  # that read; each holds a file's worth of numbers twice


def verify(conversion: Conversion, *, quiet: bool = False) -> int:
    """Compare the destination with the source; the bytes of numbers that are equal.

    Raises CheckpointError naming the parameter and the place of the first number that differs, or the file that does.
    """
    place = conversion.destination
    if not (place / RECORD).exists():
        raise CheckpointError(f"{place}: no finished conversion is there: {RECORD} is missing")
    stored = open_weights(ModelConfig.from_directory(place), place, draft=True)
    if stored.parameters.keys() != conversion.plan.parameters.keys():
        raise CheckpointError(f"{place}: holds other parameters than {conversion.source}")
    _compare_copies(conversion)

    def compare(task: tuple[str, Box]) -> int:
        path, box = task
        dtype = conversion.dtypes[path]
        ours, theirs = np.empty(extents(box), dtype), np.empty(extents(box), dtype)
        if (held := stored.parameters[path].content.stored) != dtype:
            raise CheckpointError(f"{place}: {path} holds {held}, its source {dtype}")
        stored.parameters[path].content.read(box, ours)
        conversion.plan.parameters[path].content.read(box, theirs)
        _compare(f"{place}: {path}", ours, theirs, box)
        return ours.nbytes

    total = sum(map(conversion.nbytes, conversion.dtypes))
    tasks = ((path, box) for path, grid in conversion.grids.items() for box in grid.files())
    with Progress(total, label=f"verifying {place}", quiet=quiet) as progress, ThreadPoolExecutor(THREADS, "verify") as pool:
        try:
            for nbytes in pool.map(compare, tasks):
                progress.advance(nbytes)
        finally:
            pool.shutdown(cancel_futures=True)
        return progress.done


def _compare(name: str, ours: np.ndarray, theirs: np.ndarray, box: Box) -> None:
    width = f"u{ours.dtype.itemsize}"
    bits, wanted = ours.view(width), theirs.view(width)
    if not np.array_equal(bits, wanted):
        first = np.argwhere(bits != wanted)[0]
        where = tuple(int(i) + part.start for i, part in zip(first, box, strict=True))
        here = tuple(first)
        raise CheckpointError(f"{name}: {where} is 0x{bits[here]:x}, the source has 0x{wanted[here]:x}; convert again")


def _compare_copies(conversion: Conversion) -> None:
    copied = read_record(conversion.destination).get("copied")
    for file in copied_files(conversion.source):
        copy = conversion.destination / file.name
        found = sha256(file)
        if not copy.is_file() or sha256(copy) != found or not isinstance(copied, dict) or copied.get(file.name) != found:
            raise CheckpointError(f"{copy}: is not the file of the source")
