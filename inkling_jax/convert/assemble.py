"""From tensors as stored to arrays as the model wants them: fused, de-interleaved, reshaped, checked.

Each `read_*` function returns one new array and holds little beside it: what is large is read a row block at a time.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Float32, Shaped

from inkling_jax.convert import nvfp4
from inkling_jax.convert.header import DTYPES, show
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.errors import CheckpointError

_CHUNK_ROWS = 4096  # even, so that a chunk holds whole gate/up pairs


def split_gate_up(rows: Shaped[np.ndarray, "*batch twice columns"]) -> Shaped[np.ndarray, "*batch 2 half columns"]:
    """A view with gate rows first and up rows second, of a matrix whose rows are g0, u0, g1, u1, ... (spec 7.3)."""
    *batch, twice, columns = rows.shape
    if twice % 2:
        raise CheckpointError(f"gate and up rows interleave, so their number must be even; found {twice}")
    return np.moveaxis(rows.reshape(*batch, twice // 2, 2, columns), -2, -3)


def conv_taps(weight: Shaped[np.ndarray, "*shape"], channels: int, width: int) -> Shaped[np.ndarray, "channels width"]:
    """Taps a channel, the last one for the current token, from (C, 1, K), (C, K, 1) or (C, K).

    The three share one memory order, so no transposition is ever guessed, whatever C and K are.
    """
    if weight.shape not in conv_shapes(channels, width):
        raise CheckpointError(f"short convolution of shape {weight.shape}; expected one of {conv_shapes(channels, width)}")
    return weight.reshape(channels, width)


def conv_shapes(channels: int, width: int) -> tuple[tuple[int, ...], ...]:
    """Shapes that a short convolution's weight may have in a file."""
    return (channels, 1, width), (channels, width, 1), (channels, width)


def read_plain(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Shaped[np.ndarray, "*shape"]:
    """The tensor as stored, under another shape of as many elements."""
    return checkpoint.read(name).reshape(shape)


def read_padded(checkpoint: Checkpoint, name: str, rows: int) -> Shaped[np.ndarray, "rows columns"]:
    """A vocabulary matrix with zero rows added up to `rows`."""
    info = checkpoint.info(name)
    if info.shape[0] == rows:
        return checkpoint.read(name)
    out = np.zeros((rows, info.shape[1]), DTYPES[info.dtype])
    for start in range(0, info.shape[0], _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, info.shape[0])
        out[start:stop] = checkpoint.read_rows(name, start, stop)
    return out


def read_conv(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Shaped[np.ndarray, "*channels width"]:
    """A short convolution's taps, its channels split over all axes of `shape` but the last."""
    *channels, width = shape
    return conv_taps(checkpoint.read(name), math.prod(channels), width).reshape(shape)


def read_transposed(checkpoint: Checkpoint, name: str) -> Shaped[np.ndarray, "columns rows"]:
    """The transposed matrix, contiguous."""
    return np.ascontiguousarray(checkpoint.read(name).T)


def read_leading_inside(checkpoint: Checkpoint, name: str) -> Shaped[np.ndarray, "rows batch columns"]:
    """A stack of matrices with its leading axis moved inside the rows, so that one product sums over the stack."""
    return np.ascontiguousarray(checkpoint.read(name).swapaxes(0, 1))


def read_gate_up(checkpoint: Checkpoint, name: str) -> Shaped[np.ndarray, "*batch 2 half columns"]:
    """A [2F, D] matrix or a stack [E, 2F, D] of them, gate rows apart from up rows."""
    info = checkpoint.info(name)
    *batch, twice, columns = info.shape
    out = np.empty((*batch, 2, twice // 2, columns), DTYPES[info.dtype])
    if batch:
        for expert in range(info.shape[0]):
            out[expert] = split_gate_up(checkpoint.read_rows(name, expert, expert + 1)[0])
        return out
    for start in range(0, twice, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, twice)
        out[:, start // 2 : stop // 2] = split_gate_up(checkpoint.read_rows(name, start, stop))
    return out


def read_grouped(checkpoint: Checkpoint, names: tuple[str, ...], groups: int) -> Shaped[np.ndarray, "groups rows columns"]:
    """Matrices [groups * rows_i, D] fused so that each group (KV head) has its rows of the first, then of the second, and so on.

    They are stored in one dtype in every known release; where they are not, the result is float32.
    """
    infos = [checkpoint.info(name) for name in names]
    stored = {info.dtype for info in infos}
    dtype = DTYPES[stored.pop()] if len(stored) == 1 else np.dtype(np.float32)
    counts = [info.shape[0] // groups for info in infos]
    out = np.empty((groups, sum(counts), infos[0].shape[1]), dtype)
    start = 0
    for name, count in zip(names, counts, strict=True):
        out[:, start : start + count] = checkpoint.read(name).reshape(groups, count, -1)
        start += count
    return out


def read_block_scale(checkpoint: Checkpoint, name: str, gate_up: bool) -> Float[np.ndarray, "*shape"]:
    """NVFP4 block scales, refused when NaN or negative; rows de-interleaved like those of the values they belong to."""
    scale = read_gate_up(checkpoint, name) if gate_up else checkpoint.read(name)
    nvfp4.check_scale(f"{checkpoint.info(name).file}: {name}", scale)
    return scale


def read_matrix_scale(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Float32[np.ndarray, "*shape"]:
    """NVFP4 matrix scales of shape [E] or, gate and up apart, [E, 2]; one scale an expert serves both halves."""
    scale2 = checkpoint.read(name)
    nvfp4.check_scale2(f"{checkpoint.info(name).file}: {name}", scale2)
    if scale2.shape == shape:
        return scale2
    return np.broadcast_to(scale2.reshape(-1, *[1] * (len(shape) - 1)), shape).copy()


def check_ones(checkpoint: Checkpoint, name: str) -> None:
    """Raise CheckpointError unless every entry is 1 within 1e-3: only then does ignoring this scale change nothing."""
    values = checkpoint.read(name).astype(np.float32).reshape(-1)
    bad = np.flatnonzero(~(np.abs(values - 1) <= 1e-3))
    if bad.size:
        raise CheckpointError(
            f"{checkpoint.info(name).file}: {show(name)} is a scale this model does not apply, and entry {bad[0]} is "
            f"{values[bad[0]]:g}, not 1"
        )
