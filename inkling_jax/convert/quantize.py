"""Weights to NVFP4 (spec 7.4): round to nearest, with the block scale that leaves the smallest squared error."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Float32, Int, UInt8

from inkling_jax.convert.nvfp4 import BLOCK, E2M1_MAX, E4M3_MAX
from inkling_jax.errors import InputError

# Scales are tried by their E4M3 bytes, eight an octave, around the one nearest to block max / 6: those above it, up to where the
# largest number becomes a 3 or a 4, and two below it, where it saturates. Of all other scales none was ever the best.
STEPS = (0, 1, -1, 2, -2, 3, 4, 5, 6, 7)
_LARGEST_BYTE = 0x7E  # 448
_PIECE = 1 << 22  # numbers worked on at once: some tens of MB
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbouring magnitudes
_GAPS = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0)  # from one magnitude to the next


class Quantized(NamedTuple):
    """A matrix in NVFP4, w near e2m1 * scale * scale2, and how near: the 2-norm of what is left over that of the matrix."""

    values: UInt8[np.ndarray, "rows half"]  # two codes a byte
    scale: Float[np.ndarray, "rows blocks"]  # float8_e4m3fn
    scale2: np.float32
    error: float


def quantize(weight: Float[np.ndarray, "rows columns"]) -> Quantized:
    """The matrix in NVFP4. scale2 is amax / (6 * 448).

    Each block takes the scale of `STEPS` with the smallest squared error, the first of equals; a number goes to the nearest code,
    a tie to the even one. Raises InputError for columns that are not whole blocks of 16 and for a weight that is not finite.
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        raise InputError(f"{columns} columns are not whole blocks of {BLOCK}")
    amax = np.abs(weight).max().astype(np.float32)
    if not np.isfinite(amax):
        raise InputError("a weight is not finite")
    # A matrix of zeros has no scale of its own; any positive one will do.
    scale2 = np.maximum(amax, np.float32(2.0**-110)) / np.float32(E2M1_MAX * E4M3_MAX)
    values, scale = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // BLOCK), np.uint8)
    squares = np.zeros(2)
    for first in range(0, rows, step := piece_rows(rows, columns)):
        part = slice(first, first + step)
        values[part], scale[part], *found = _search(weight[part], scale2)
        squares += np.array(found, np.float64)
    error = float(np.sqrt(squares[0] / squares[1])) if squares[1] else 0.0
    return Quantized(values, scale.view(ml_dtypes.float8_e4m3fn), scale2, error)


def piece_rows(rows: int, columns: int) -> int:
    """Rows worked on at once: a divisor of all, so that one program does."""
    most = max(1, _PIECE // columns)
    return next(count for count in range(min(rows, most), 0, -1) if rows % count == 0)


@jax.jit
def _search(weight: Float[Array, "rows columns"], scale2: Float32[Array, ""]) -> tuple[Array, Array, Array, Array]:
    """Packed codes, bytes of block scales, and the sums of squares of what is left and of the weight, in units of scale2."""
    rows, columns = weight.shape
    blocks = (weight.astype(jnp.float32) / scale2).reshape(rows, columns // BLOCK, BLOCK)
    magnitude = jnp.abs(blocks)
    plain = _nearest_byte(magnitude.max(-1) / E2M1_MAX)

    def tried(step: Int[Array, ""]) -> tuple[Array, Array]:
        byte = jnp.clip(plain + step, 1, _LARGEST_BYTE)  # a scale of zero would lose the block
        return byte, jnp.square(magnitude - _rounded(magnitude, _from_byte(byte)[..., None])[1]).sum(-1)

    def better(i: Int[Array, ""], best: tuple[Array, Array]) -> tuple[Array, Array]:
        (byte, error), (best_byte, best_error) = tried(jnp.asarray(STEPS)[i]), best
        wins = error < best_error
        return jnp.where(wins, byte, best_byte), jnp.where(wins, error, best_error)

    byte, error = jax.lax.fori_loop(1, len(STEPS), better, tried(jnp.int32(0)))
    codes = _rounded(magnitude, _from_byte(byte)[..., None])[0] | jnp.where(jnp.signbit(blocks), 8, 0).astype(jnp.uint8)
    codes = codes.reshape(rows, columns)
    return codes[:, 0::2] | codes[:, 1::2] << 4, byte.astype(jnp.uint8), error.sum(), jnp.square(blocks).sum()


def _rounded(magnitude: Float32[Array, "..."], scale: Float32[Array, "..."]) -> tuple[UInt8[Array, "..."], Float32[Array, "..."]]:
    """The code nearest to each magnitude under a scale, and what it stands for. By comparisons: a quotient would blur ties."""
    code, value = jnp.zeros(magnitude.shape, jnp.uint8), jnp.zeros(magnitude.shape, jnp.float32)
    for lower, (midpoint, gap) in enumerate(zip(_MIDPOINTS, _GAPS, strict=True)):
        beyond = magnitude >= midpoint * scale if lower % 2 else magnitude > midpoint * scale
        code += beyond.astype(jnp.uint8)
        value += jnp.where(beyond, gap, 0)
    return code, value * scale


def _nearest_byte(x: Float32[Array, "..."]) -> Int[Array, "..."]:
    """The byte from 1 to 0x7E of the E4M3 number nearest to x."""
    nearest = jnp.clip(x, 2.0**-9, E4M3_MAX).astype(jnp.float8_e4m3fn)  # the cast turns what is above into NaN
    return jax.lax.bitcast_convert_type(nearest, jnp.uint8).astype(jnp.int32)


def _from_byte(byte: Int[Array, "..."]) -> Float32[Array, "..."]:
    return jax.lax.bitcast_convert_type(byte.astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.float32)
