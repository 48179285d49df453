"""A stored tensor seen as another array, by sizes and strides, so that a slice of a parameter is the bytes of a file it needs."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Shaped

from inkling_jax.convert.header import DTYPES, TensorInfo
from inkling_jax.convert.safetensors_reader import read_into

Box = tuple[slice, ...]  # of an array: a start and a stop for each axis

STAGE_BYTES = 1 << 24  # read at once where the file's order is not the array's
GAP_BYTES = 1 << 16  # of a file that are read over rather than skipped: a read of its own costs more


@dataclasses.dataclass(frozen=True)
class View:
    """Element (i, j, ...) is number offset + i * strides[0] + j * strides[1] + ... of the tensor; a stride of 0 repeats."""

    info: TensorInfo
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, info: TensorInfo, shape: tuple[int, ...]) -> View:
        """The tensor as stored, under another shape of as many elements."""
        assert math.prod(shape) == math.prod(info.shape), (info, shape)
        return cls(info, shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))

    def permuted(self, *axes: int) -> View:
        """Axis i is what axis axes[i] was."""
        return View(self.info, tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes), self.offset)

    def repeated(self, count: int) -> View:
        """The same `count` times along a new last axis."""
        return View(self.info, (*self.shape, count), (*self.strides, 0), self.offset)

    def __getitem__(self, box: Box) -> View:
        shape = tuple(part.stop - part.start for part in box)
        offset = self.offset + sum(part.start * stride for part, stride in zip(box, self.strides, strict=True))
        return View(self.info, shape, self.strides, offset)

    @property
    def order(self) -> tuple[int, ...]:
        """The axes from the one that jumps furthest in the file to the one that runs along it."""
        return tuple(sorted(range(len(self.shape)), key=lambda axis: -self.strides[axis]))

    def read(self, out: Shaped[np.ndarray, "*shape"]) -> None:
        """Fill `out`, of this shape and any dtype, and hold STAGE_BYTES at most beside it.

        Read is what the view covers, and gaps of at most GAP_BYTES in it. Raises CheckpointError for a file that cannot be read.
        """
        if 0 in self.shape:
            return
        dtype = DTYPES[self.info.dtype]
        axes = [axis for axis in self.order if self.shape[axis] > 1 and self.strides[axis]]
        reach, sparse = 1, False  # elements from the first to the last; whether it is better to skip some between
        for axis in reversed(axes):
            sparse |= (self.strides[axis] - reach) * dtype.itemsize > GAP_BYTES
            reach += (self.shape[axis] - 1) * self.strides[axis]
        start, nbytes = self.offset * dtype.itemsize, reach * dtype.itemsize
        once = all(stride or size == 1 for size, stride in zip(self.shape, self.strides, strict=True))
        solid = once and reach == math.prod(self.shape)
        if solid and out.dtype == dtype and out.transpose(self.order).flags.c_contiguous:
            read_into(self.info, start, out.transpose(self.order).reshape(-1).view(np.uint8))
        elif not axes or (nbytes <= STAGE_BYTES and not sparse):
            staged = np.empty(reach, dtype)
            read_into(self.info, start, staged.view(np.uint8))
            steps = tuple(stride * dtype.itemsize for stride in self.strides)
            out[...] = np.lib.stride_tricks.as_strided(staged, self.shape, steps)
        else:
            axis = axes[0]
            rows = 1 if sparse else max(1, STAGE_BYTES // (self.strides[axis] * dtype.itemsize))
            for first in range(0, self.shape[axis], rows):
                box = [slice(0, size) for size in self.shape]
                box[axis] = slice(first, min(first + rows, self.shape[axis]))
                self[tuple(box)].read(out[tuple(box)])
