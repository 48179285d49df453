"""From tensors as stored to arrays as the model wants them: fused, de-interleaved, reshaped, padded, checked.

Every form is a view of the stored tensor, so a slice of a parameter is made as a whole one is, from the bytes that it needs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Shaped

from inkling_jax.convert.header import DTYPES, TensorInfo, show
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.view import Box, View
from inkling_jax.errors import CheckpointError

Check = Callable[[str, np.ndarray, tuple[int, ...]], None]  # of a tensor's name, numbers, and where in the parameter they begin


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A parameter of shape `shape`: views side by side along `axis`, and zeros where they end."""

    shape: tuple[int, ...]
    views: tuple[View, ...]
    axis: int = 0
    check: Check | None = None

    @property
    def stored(self) -> np.dtype:
        """What the tensors hold, float32 where they differ (in every known release they agree)."""
        dtypes = {DTYPES[view.info.dtype] for view in self.views}
        return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

    @property
    def order(self) -> tuple[int, ...]:
        """The axes from the one that jumps furthest in the file to the one that runs along it."""
        return self.views[0].order

    @property
    def grain(self) -> tuple[int, ...]:
        """Any element can be read alone."""
        return (1,) * len(self.shape)

    def read(self, box: Box, out: Shaped[np.ndarray, "*shape"]) -> None:
        """Fill `out` with the part `box` of the parameter. Raises CheckpointError for content that is refused."""
        if not self.shape:
            return self._read_view(self.views[0], out, ())
        end, wanted = 0, box[self.axis]
        for view in self.views:
            start, end = end, end + view.shape[self.axis]
            first, last = max(wanted.start, start), min(wanted.stop, end)
            if first < last:
                inside = (*box[: self.axis], slice(first - start, last - start), *box[self.axis + 1 :])
                part = out[self._along(first - wanted.start, last - wanted.start)]
                self._read_view(view[inside], part, tuple(piece.start for piece in inside))
        if wanted.stop > end:
            out[self._along(max(end - wanted.start, 0), wanted.stop - wanted.start)] = 0

    def _read_view(self, view: View, out: np.ndarray, origin: tuple[int, ...]) -> None:
        view.read(out)
        if self.check is not None:
            self.check(f"{view.info.file}: {view.info.name}", out, origin)

    def _along(self, start: int, stop: int) -> Box:
        return (*(slice(None),) * self.axis, slice(start, stop))


def gate_up(info: TensorInfo) -> View:
    """A [2F, D] matrix or a stack [E, 2F, D] of them as [2, F, D] or [E, 2, F, D]: rows are g0, u0, g1, u1, ... (spec 7.3)."""
    *batch, twice, columns = info.shape
    assert twice % 2 == 0, info
    lead = range(len(batch))
    return View.of(info, (*batch, twice // 2, 2, columns)).permuted(*lead, len(batch) + 1, len(batch), len(batch) + 2)


def transposed(info: TensorInfo) -> View:
    """A matrix with its axes exchanged."""
    return View.of(info, info.shape).permuted(1, 0)


def leading_inside(info: TensorInfo) -> View:
    """A stack [J, D, F] of matrices as [D, J, F], so that one product sums over the stack."""
    return View.of(info, info.shape).permuted(1, 0, 2)


def grouped(info: TensorInfo, groups: int) -> View:
    """A matrix [groups * rows, D] as [groups, rows, D]: what belongs to each key head."""
    rows, columns = info.shape
    return View.of(info, (groups, rows // groups, columns))


def matrix_scale(info: TensorInfo, shape: tuple[int, ...]) -> View:
    """NVFP4 matrix scales as [E] or, gate and up apart, [E, 2]; one scale an expert serves both halves."""
    if math.prod(info.shape) == math.prod(shape):
        return View.of(info, shape)
    return View.of(info, shape[:1]).repeated(shape[1])


def one_for_all(info: TensorInfo, count: int) -> View:
    """A single number as [count]."""
    return View.of(info, ()).repeated(count)


def conv_shapes(channels: int, width: int) -> tuple[tuple[int, ...], ...]:
    """Shapes that a short convolution's weight may have in a file.

    The three share one memory order, so no transposition is ever guessed, whatever the sizes are.
    """
    return (channels, 1, width), (channels, width, 1), (channels, width)


def check_ones(checkpoint: Checkpoint, name: str) -> None:
    """Raise CheckpointError unless every entry is 1 within 1e-3: only then does ignoring this scale change nothing."""
    values = checkpoint.read(name).astype(np.float32).reshape(-1)
    bad = np.flatnonzero(~(np.abs(values - 1) <= 1e-3))
    if bad.size:
        raise CheckpointError(
            f"{checkpoint.info(name).file}: {show(name)} is a scale this model does not apply, and entry {bad[0]} is "
            f"{values[bad[0]]:g}, not 1"
        )
