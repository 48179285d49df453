"""Parameters as an Orbax checkpoint whose arrays are written in pieces and read in parts.

The tree is Orbax's own (`orbax.checkpoint.v1.load` restores it), each array a Zarr 3 array in a directory of its own: files of
some tens of MB, in each of them chunks that are read by byte range and carry a checksum. Arrays are written with TensorStore, on
which Orbax stands: Orbax itself takes an array whole, and its `partial.finalize` (0.12.8), killed at a bad moment, leaves what it
can neither finish nor, worse, tell from a finished checkpoint, though arrays are missing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from inkling_jax.convert.view import Box
from inkling_jax.errors import CheckpointError

STATE = "state"  # the name of a tree in an Orbax checkpoint
CHUNK_BYTES = 1 << 20  # read at least
FILE_BYTES = 1 << 25  # written at once


@dataclasses.dataclass(frozen=True)
class Grid:
    """How an array is cut: into files, and those into chunks."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    file: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], itemsize: int, ways: tuple[int, ...]) -> Grid:
        """Chunks of at most CHUNK_BYTES, none of which spans two devices where axis i is split over ways[i] of them."""
        chunk = [size // math.gcd(size, count) for size, count in zip(shape, ways, strict=True)]
        for axis in range(len(chunk)):
            row = math.prod(chunk[axis + 1 :]) * itemsize
            chunk[axis] = max(1, min(chunk[axis], CHUNK_BYTES // row))
        file, nbytes = [*chunk], math.prod(chunk) * itemsize
        for axis in reversed(range(len(file))):
            count = min(-(-shape[axis] // chunk[axis]), max(1, FILE_BYTES // nbytes))
            file[axis] *= count
            nbytes *= count
            if file[axis] < shape[axis]:
                break
        return cls(shape, tuple(chunk), tuple(file))

    def files(self) -> Iterator[Box]:
        """The part of the array that each file holds."""
        starts = (range(0, size, step) for size, step in zip(self.shape, self.file, strict=True))
        for first in itertools.product(*starts):
            ends = (min(a + step, size) for a, step, size in zip(first, self.file, self.shape, strict=True))
            yield tuple(slice(a, b) for a, b in zip(first, ends, strict=True))


class ArrayWriter:
    """A new array in `directory`, which it empties first."""

    def __init__(self, directory: Path, grid: Grid, dtype: np.dtype):
        if directory.exists():
            shutil.rmtree(directory)
        self.directory = directory
        self._array = _open(directory, _metadata(grid, dtype))

    def write(self, box: Box, values: np.ndarray) -> None:
        """Write the part that a file holds, to the disk. Raises CheckpointError where that fails."""
        try:
            self._array[box].write(values, can_reference_source_data_indefinitely=True).result()
        except Exception as error:
            raise CheckpointError(f"{self.directory}: cannot be written: {_reason(error)}") from None


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """The content of a parameter that lies in `directory`, with the shape and dtype that it must have."""

    directory: Path
    shape: tuple[int, ...]
    stored: np.dtype

    @property
    def order(self) -> tuple[int, ...]:
        """Rows lie one after the other."""
        return tuple(range(len(self.shape)))

    @property
    def grain(self) -> tuple[int, ...]:
        """The size of a chunk."""
        return tuple(size or 1 for size in self._array.chunk_layout.read_chunk.shape or ())

    def read(self, box: Box, out: np.ndarray) -> None:
        """Fill `out` with the part `box`. Raises CheckpointError for what is missing, damaged or of another shape or dtype."""
        try:
            out[...] = self._array[box].read().result()
        except Exception as error:
            raise CheckpointError(f"{self.directory}: cannot be read: {_reason(error)}") from None

    @functools.cached_property
    def _array(self) -> tensorstore.TensorStore:
        try:
            array = _open(self.directory)
        except Exception as error:
            raise CheckpointError(f"{self.directory}: cannot be opened: {_reason(error)}") from None
        # A restore would cast in silence, so what is there is compared with what should be.
        found, wanted = (array.shape, array.dtype.numpy_dtype), (self.shape, self.stored)
        if found != wanted:
            raise CheckpointError(f"{self.directory}: holds {found[1]} of shape {found[0]}, expected {wanted[1]} of {wanted[0]}")
        return array


def write_tree(directory: Path, dtypes: Mapping[str, np.dtype]) -> None:
    """Let Orbax describe the tree of the arrays in `directory`: it saves one of scalars, and its descriptions are kept."""
    from orbax.checkpoint import v1 as orbax

    scratch = directory.with_name(directory.name + ".tree")
    if scratch.exists():
        shutil.rmtree(scratch)
    context = orbax.Context()
    saving = context.array.saving
    saving.use_ocdbt, saving.use_zarr3 = False, True
    saving.array_metadata_store, saving.enable_write_sharding_file = None, False
    level = logging.getLogger("absl").level
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of what was asked for
    try:
        with context:
            orbax.save(str(scratch), {path: np.zeros((), dtype) for path, dtype in dtypes.items()})
    finally:
        logging.getLogger("absl").setLevel(level)
    for file in (*scratch.glob("*"), *scratch.glob(f"{STATE}/*")):
        if file.is_file():
            file.replace(directory / file.relative_to(scratch))
    shutil.rmtree(scratch)


def _metadata(grid: Grid, dtype: np.dtype) -> dict[str, Any]:
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs = {"chunk_shape": grid.chunk, "codecs": [plain, {"name": "crc32c"}], "index_codecs": [plain, {"name": "crc32c"}]}
    return {
        "shape": grid.shape,
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": grid.file}},
        "codecs": [{"name": "sharding_indexed", "configuration": codecs}],
    }


def _open(directory: Path, metadata: dict[str, Any] | None = None) -> tensorstore.TensorStore:
    """Open an array, or with `metadata` create it."""
    # By default zeros leave no file, and a lost file reads as zeros.
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{directory}/"}, "store_data_equal_to_fill_value": True}
    if metadata is None:
        return tensorstore.open(spec | {"fill_missing_data_reads": False}).result()
    return tensorstore.open(spec | {"metadata": metadata}, create=True, open=False).result()


def _reason(error: Exception) -> str:
    """The first line of what TensorStore says, without its specification."""
    return str(error).splitlines()[0].split(" [tensorstore_spec", 1)[0].split(" [source locations", 1)[0]
