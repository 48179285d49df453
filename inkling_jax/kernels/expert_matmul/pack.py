"""The Hopper kernels' order of expert weights: the published bits rearranged so that a thread finds what it multiplies in 16
bytes.

Rows are cut into blocks of 64 and columns into blocks of 128, the unit that one warpgroup multiplies. In a block, thread t of the
warpgroup (warp w = t / 32, g = t % 32 / 4, c = t % 4) holds rows 16w + g and 16w + g + 8, which are the rows of its tensor-core
fragment, and of every 64 columns the 16 from 16c on: one scale for each row. Its word j of those holds columns 16c + 4j + 0..3 of
both rows. A block is nine lines of 128 words: four lines for each 64 columns, then a word of four scales for each thread.

In each half of a word (even columns low, odd ones high) lie four codes, their bits placed so that one shift and one mask turn
each into a bfloat16 of the value times 2**-126: see `_place`. Scales become one byte 2**(e - 9) * (1 + m / 8), e in the upper
five bits, which shifts into a bfloat16 of the scale times 2**106 and holds every positive E4M3 number, the subnormal ones too.
What is left, 2**20, is multiplied with scale2. A scale of zero has no such byte: its codes become zeros instead, so values stay
exact.

Weights that are bfloat16 keep their bits, in blocks of 32 lines: for each 16 columns j of 64, the four words of a thread's
fragment.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int32, UInt8

from inkling_jax.errors import CheckpointError
from inkling_jax.kernels.expert_matmul.nvfp4 import Nvfp4

BLOCK_ROWS = 64
BLOCK_COLUMNS = 128
LINES = 9  # of 128 words, in a block
BF16_LINES = 32  # of a block of bfloat16
SCALE_FACTOR = 2.0**20  # what a product of decoded words lacks
_NAN_BYTE = 0x7F


class Packed(NamedTuple):
    """Weights [E, O, I], or gate and up [E, 2, F, I] taken as O = 2F rows, in the kernels' order."""

    words: Int32[Array, "E O/64 I/128 lines 128"]
    scale2: Float[Array, "*lead"]  # [E], or [E, 2] for gate and up: what Nvfp4 holds; ones for bfloat16

    @property
    def lines(self) -> int:
        """Of a block: LINES, or BF16_LINES."""
        return self.words.shape[3]

    @property
    def factor(self) -> float:
        """What a product of decoded words lacks beside scale2."""
        return SCALE_FACTOR if self.lines == LINES else 1.0

    @property
    def paired(self) -> bool:
        """Whether rows are gate and up by turns (`_interleave`): both rows of a thread then belong to one channel."""
        return self.scale2.ndim == 2


class Shared(NamedTuple):
    """Experts that every token takes, side by side as one: w13 of [1, 2, J F, D] and w2 of [1, D, J F], and their weights."""

    weights: Float[Array, "T J"]
    w13: Packed
    w2: Packed


def fits(rows: int, columns: int) -> bool:
    """Whether weights of so many rows (of gate and up: each) and columns can be packed."""
    return rows % BLOCK_ROWS == 0 and columns % BLOCK_COLUMNS == 0


def packed_shape(shape: tuple[int, ...], codes: bool) -> tuple[int, ...]:
    """Of the words of weights [E, O, I] or [E, 2, F, I], NVFP4 or bfloat16."""
    experts, *rows, columns = shape
    return experts, math.prod(rows) // BLOCK_ROWS, columns // BLOCK_COLUMNS, LINES if codes else BF16_LINES, 128


def pack(weight: Nvfp4 | Array, name: str) -> Packed:
    """Rearrange the weights [E, O, I] or [E, 2, F, I] of experts, each independent of the others; `name` is for messages.

    Raises what `check` does.
    """
    check(weight, name)
    scale2 = weight.scale2 if isinstance(weight, Nvfp4) else jnp.ones(weight.shape[:-2], jnp.float32)
    return Packed(arrange(weight), scale2)


def check(weight: Nvfp4 | Array, name: str) -> None:
    """O (or F) must be in blocks of 64 rows and I of 128 columns: CheckpointError, and so is a block scale that is NaN or
    negative, or an array that is not bfloat16.
    """
    if isinstance(weight, Nvfp4):
        rows, columns = weight.values.shape[-2], weight.values.shape[-1] * 2
    else:
        rows, columns = weight.shape[-2:]
    if not fits(rows, columns):
        raise CheckpointError(f"{name}: {rows} x {columns} is not in blocks of {BLOCK_ROWS} rows and {BLOCK_COLUMNS} columns")
    if not isinstance(weight, Nvfp4):
        if weight.dtype != jnp.bfloat16:
            raise CheckpointError(f"{name}: the kernels take weights of bfloat16, not {weight.dtype}")
        return
    worst = int(_largest_byte(weight.scale))
    if worst >= _NAN_BYTE:
        kind = "NaN" if worst & 0x7F == _NAN_BYTE else "negative"
        raise CheckpointError(f"{name}: a block scale is {kind} (byte 0x{worst:02X}); expected 0x00 to 0x7E")


def arrange(weight: Nvfp4 | Array) -> Int32[Array, "E O/64 I/128 lines 128"]:
    """The words of `pack`, without its checks; one expert at a time, so that temporaries stay small."""
    return pack_words(weight.values, weight.scale) if isinstance(weight, Nvfp4) else pack_bfloat16(weight)


def unpack(weight: Packed) -> Nvfp4 | Array:
    """What `pack` was given, except that where a scale was zero it is 2**-9 and the codes are zeros."""
    if weight.lines == BF16_LINES:
        return unpack_bfloat16(weight.words, weight.paired)
    values, scale = unpack_words(weight.words, weight.paired)
    return Nvfp4(values, scale, weight.scale2)


@jax.jit
def pack_bfloat16(weight: Float[Array, "E *rows I"]) -> Int32[Array, "E O/64 I/128 32 128"]:
    """The words of bfloat16 weights, one expert at a time."""

    def one(rows: Array) -> Array:
        rows = _interleave(rows) if rows.ndim == 3 else rows
        n, k = rows.shape[0] // BLOCK_ROWS, rows.shape[1] // BLOCK_COLUMNS
        rows = rows.reshape(n, 4, 2, 8, k, 2, 4, 4, 2, 2)  # n w h g k k64 c j kh lo/hi
        words = rows.transpose(0, 4, 5, 7, 1, 3, 6, 8, 2, 9)  # n k k64 j w g c kh h lo/hi
        return jax.lax.bitcast_convert_type(words, jnp.int32).reshape(n, k, BF16_LINES, 128)

    return jax.lax.map(one, weight)


@jax.jit(static_argnames="paired")
def unpack_bfloat16(words: Int32[Array, "E O/64 I/128 32 128"], paired: bool) -> Float[Array, "E *rows I"]:
    """The weights of `pack_bfloat16`."""

    def one(block: Array) -> Array:
        n, k = block.shape[:2]
        rows = jax.lax.bitcast_convert_type(block.reshape(n, k, 2, 4, 4, 8, 4, 2, 2), jnp.bfloat16)
        rows = rows.transpose(0, 4, 8, 5, 1, 2, 6, 3, 7, 9).reshape(n * BLOCK_ROWS, k * BLOCK_COLUMNS)
        return _separate(rows) if paired else rows

    return jax.lax.map(one, words)


@jax.jit
def pack_words(values: UInt8[Array, "E *rows I/2"], scale: Float[Array, "E *rows I/16"]) -> Int32[Array, "E O/64 I/128 9 128"]:
    """The words of packed codes and their scales."""
    return jax.lax.map(lambda one: _pack_expert(*one), (values, scale))


@jax.jit(static_argnames="paired")
def unpack_words(
    words: Int32[Array, "E O/64 I/128 9 128"], paired: bool
) -> tuple[UInt8[Array, "E *rows I/2"], Float[Array, "E *rows I/16"]]:
    """Values and scales as published, of [E, 2, F, I] if paired."""
    return jax.lax.map(lambda one: _unpack_expert(one, paired), words)


def decode_block(words: Int32[Array, "lines 128"]) -> Float[Array, "64 128"]:
    """The float32 numbers of one block, exact, before scale2: the same arithmetic as on the chip, in plain JAX."""
    if words.shape[0] == BF16_LINES:
        rows = jax.lax.bitcast_convert_type(words.reshape(2, 4, 4, 8, 4, 2, 2), jnp.bfloat16)  # k64 j w g c kh h lo/hi
        return rows.transpose(2, 6, 3, 0, 4, 1, 5, 7).reshape(BLOCK_ROWS, BLOCK_COLUMNS).astype(jnp.float32)
    codes = jnp.stack([_take(words[:8].reshape(2, 4, 8, 4, 4).astype(jnp.uint32), h, kh) for h in (0, 1) for kh in (0, 1)], -1)
    lo, hi = codes & 0xF, codes >> 4
    numbers = jnp.stack([_e2m1(lo), _e2m1(hi)], -1).reshape(2, 4, 8, 4, 4, 2, 2, 2)  # k64 w g c j h kh lo/hi
    scales = _bytes_of(words[8].reshape(4, 8, 4).astype(jnp.uint32)).reshape(4, 8, 4, 2, 2)  # w g c k64 h
    scales = jnp.exp2((scales >> 3).astype(jnp.float32) - 9) * (1 + (scales & 7).astype(jnp.float32) / 8)
    numbers = numbers * scales.transpose(3, 0, 1, 2, 4)[:, :, :, :, None, :, None, None]
    return numbers.transpose(1, 5, 2, 0, 3, 4, 6, 7).reshape(BLOCK_ROWS, BLOCK_COLUMNS)


def _largest_byte(scale: Array) -> Array | np.integer:
    if isinstance(scale, np.ndarray):
        return scale.view(np.uint8).max(initial=0)
    return jnp.max(jax.lax.bitcast_convert_type(scale, jnp.uint8), initial=0)


def _scale_bytes() -> tuple[np.ndarray, np.ndarray]:
    """Tables from E4M3 bytes to ours and back."""
    there, back = np.zeros(256, np.uint8), np.zeros(256, np.uint8)
    for byte in range(1, _NAN_BYTE):
        number = float(np.uint8(byte).view(ml_dtypes.float8_e4m3fn))
        mantissa, exponent = np.frexp(number)
        there[byte] = (int(exponent) + 8) << 3 | int(mantissa * 16 - 8)
        back[there[byte]] = byte
    return there, back


_TO_OURS, _TO_E4M3 = _scale_bytes()


def _pack_expert(values: UInt8[Array, "*rows I/2"], scale: Float[Array, "*rows I/16"]) -> Int32[Array, "O/64 I/128 9 128"]:
    scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    if values.ndim == 3:
        values, scale = _interleave(values), _interleave(scale)
    n, k = values.shape[0] // BLOCK_ROWS, values.shape[1] * 2 // BLOCK_COLUMNS
    scale = scale.reshape(n, 4, 2, 8, k, 2, 4)  # n w h g k k64 c
    values = values.reshape(n, 4, 2, 8, k, 2, 4, 4, 2)  # n w h g k k64 c j kh
    values = jnp.where((scale == 0)[..., None, None], 0, values).astype(jnp.uint32)
    words = jnp.zeros((n, 4, 8, k, 2, 4, 4), jnp.uint32)
    for h in (0, 1):
        for kh in (0, 1):
            byte = values[:, :, h, ..., kh]
            words |= _place(byte & 0xF, h, kh) | _place(byte >> 4, h, kh) << 16
    words = words.transpose(0, 3, 4, 1, 2, 5, 6).reshape(n, k, LINES - 1, 128)
    ours = jnp.take(jnp.asarray(_TO_OURS), scale.astype(jnp.int32)).astype(jnp.uint32)
    shifts = 8 * jnp.arange(4, dtype=jnp.uint32).reshape(2, 2)  # of k64 and h
    line = (ours.transpose(0, 4, 1, 3, 6, 5, 2) << shifts).sum((-2, -1), dtype=jnp.uint32)
    return jnp.concatenate([words, line.reshape(n, k, 1, 128)], 2).astype(jnp.int32)


def _unpack_expert(words: Int32[Array, "n k 9 128"], paired: bool) -> tuple[Array, Array]:
    n, k = words.shape[:2]
    bits = words.astype(jnp.uint32)
    values = bits[:, :, :-1].reshape(n, k, 2, 4, 8, 4, 4)  # n k k64 w g c j
    values = jnp.stack([jnp.stack([_take(values, h, kh) for kh in (0, 1)], -1) for h in (0, 1)], -1)  # ... kh h
    values = values.transpose(0, 3, 8, 4, 1, 2, 5, 6, 7).reshape(n * BLOCK_ROWS, k * BLOCK_COLUMNS // 2)
    ours = _bytes_of(bits[:, :, -1].reshape(n, k, 4, 8, 4)).reshape(n, k, 4, 8, 4, 2, 2)  # n k w g c k64 h
    ours = ours.transpose(0, 2, 6, 3, 1, 5, 4).reshape(n * BLOCK_ROWS, k * BLOCK_COLUMNS // 16)
    scale = jnp.take(jnp.asarray(_TO_E4M3), ours.astype(jnp.int32))
    # Our smallest byte is 0, the table's default: it stands for 2**-9, the smallest E4M3 number.
    scale = jax.lax.bitcast_convert_type(jnp.where(ours == 0, jnp.uint8(1), scale), jnp.float8_e4m3fn)
    values = values.astype(jnp.uint8)
    return (_separate(values), _separate(scale)) if paired else (values, scale)


def _interleave(rows: Array) -> Array:
    """[2, F, C] to [2F, C]: eight rows of gate and eight of up by turns, of the 64 channels c, j, kh, lo/hi in the order j, kh,
    c, lo/hi.

    That order is the one in which tensor cores that read x from shared memory meet the columns of the next product: hidden values
    can be written in it, eight neighbours at a time.
    """
    return rows.reshape(2, -1, 4, 4, 2, 2, rows.shape[-1]).transpose(1, 3, 4, 0, 2, 5, 6).reshape(-1, rows.shape[-1])


def _separate(rows: Array) -> Array:
    return rows.reshape(-1, 4, 2, 2, 4, 2, rows.shape[-1]).transpose(3, 0, 4, 1, 2, 5, 6).reshape(2, -1, rows.shape[-1])


def _place(code: Array, h: int, kh: int) -> Array:
    """Sign s, exponent ee and mantissa m of a code within 16 bits, for row half h and column half kh.

    After a shift left by 0, 3 and 6 the first three have s at bit 15 and eem at bits 8 to 6, where a bfloat16 has its sign, the
    low two bits of its exponent and the top bit of its mantissa. The fourth takes the bits that are left, and three shifts.
    """
    sign, eem = code >> 3, code & 7
    if (h, kh) == (0, 0):
        return sign << 15 | eem << 6
    if (h, kh) == (1, 0):
        return sign << 12 | eem << 3
    if (h, kh) == (0, 1):
        return sign << 9 | eem
    return sign << 14 | (eem >> 1) << 10 | (eem & 1) << 13


def _take(words: Array, h: int, kh: int) -> Array:
    """The published byte, two codes, that `_place` put for h and kh into the two halves of words."""

    def code(half: Array) -> Array:
        if (h, kh) == (0, 0):
            return (half >> 15 & 1) << 3 | half >> 6 & 7
        if (h, kh) == (1, 0):
            return (half >> 12 & 1) << 3 | half >> 3 & 7
        if (h, kh) == (0, 1):
            return (half >> 9 & 1) << 3 | half & 7
        return (half >> 14 & 1) << 3 | (half >> 10 & 3) << 1 | half >> 13 & 1

    return code(words) | code(words >> 16) << 4


def _bytes_of(words: Array) -> Array:
    """The four bytes of words on a new last axis."""
    return words[..., None] >> (8 * jnp.arange(4, dtype=jnp.uint32)) & 0xFF


def _e2m1(code: Array) -> Array:
    exponent, mantissa = (code >> 1 & 3).astype(jnp.int32), (code & 1).astype(jnp.int32)
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    return jnp.where(code >= 8, -0.5, 0.5) * halves.astype(jnp.float32)
