"""From the e4m3 codes of a tile of keys or values to the bfloat16 that products take, in shared memory.

Mosaic converts e4m3 to float16 alone. The bits of an e4m3 number, moved four places down from the top of a half-word with
the sign left there, are those of a bfloat16 2^120 times smaller, of subnormal numbers too, so that a product is exact. What
would be NaN becomes 480, which is harmless: where a vector is not finite its scale says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_jax.kernels import mlir as m
from inkling_jax.kernels.mlir import Value
from inkling_jax.kernels.paged_attention.mosaic import tiled_transforms
from inkling_jax.kernels.pages import decode

CODES = 8  # that a thread takes at once: 16 bytes of bfloat16, a chunk of a swizzled line
LINE = 64  # numbers of a line of shared memory, 128 bytes
EXPONENT = 0x7B807B80  # twice 2^120 in bfloat16
REF, SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT


def code_smem(stages: int, keys: int, width: int, wide_stages: int) -> dict[str, Any]:
    """Shared memory of tiles of codes with their scales, and of the scales of tiles that are bfloat16 by now."""
    found: dict[str, Any] = {}
    for name in ("keys", "values"):
        found[f"{name}_codes"] = plgpu.SMEM((stages, keys, width), jnp.uint8)
        found[f"{name}_codes_scale"] = plgpu.SMEM((stages, keys), jnp.float32)
        found[f"{name}_scale"] = plgpu.SMEM((wide_stages, keys), jnp.float32)
    return found


def code_barriers(stages: int, copies: int) -> dict[str, Any]:
    """Barriers of tiles of codes that so many copies fill, and as many their scales."""
    found: dict[str, Any] = {}
    for name in ("keys", "values"):
        found[f"{name}_codes_full"] = plgpu.Barrier(num_barriers=stages, num_arrivals=2 * copies)
        found[f"{name}_codes_free"] = plgpu.Barrier(num_barriers=stages)
    return found


def widen(keys: int, width: int, interpret: bool) -> Callable:
    """By one warpgroup, as f(codes [keys, width], their scales [keys], numbers [keys, width], scales [keys], first, end).

    `numbers` is bfloat16 as `tiled_smem` makes it. Scales of keys outside first .. end - 1, which may be anything, become zero.
    """
    if interpret:
        return _twin

    @plgpu.inline_mgpu(
        arg_types=(REF, REF, plgpu.RefType(tiled_transforms(width, jnp.bfloat16)), REF, SCALAR, SCALAR), return_type=()
    )
    def run(_: Any, codes: Value, given: Value, numbers: Value, scales: Value, first: Any, end: Any) -> tuple[()]:
        source, factors, target, made = (mgpu.utils.memref_ptr(ref) for ref in (codes, given, numbers, scales))
        widen_tile(keys, width, source, factors, target, made, m.scalar(first), m.scalar(end))
        return ()

    return run


def release_codes(s: dict[str, Any], stages: int) -> None:
    """All tiles of codes begin as free, so that the loader needs no special first round."""
    for name in ("keys", "values"):
        for slot in range(stages):
            plgpu.barrier_arrive(s[f"{name}_codes_free"].at[slot])


def pass_on(widen: Callable, s: dict[str, Any], name: str, code_slot: Any, slot: Any, first: Any, end: Any) -> None:
    """Make bfloat16 of a tile of codes, of "keys" or "values", as soon as it is there and there is room."""
    plgpu.barrier_wait(s[f"{name}_codes_full"].at[code_slot])
    plgpu.barrier_wait(s[f"{name}_free"].at[slot])
    codes = (s[f"{name}_codes"].at[code_slot], s[f"{name}_codes_scale"].at[code_slot])
    widen(*codes, s[name].at[slot], s[f"{name}_scale"].at[slot], first, end)
    plgpu.commit_smem()
    plgpu.barrier_arrive(s[f"{name}_full"].at[slot])
    plgpu.barrier_arrive(s[f"{name}_codes_free"].at[code_slot])


def widen_tile(
    keys: int, width: int, codes: Value, given: Value, numbers: Value, scales: Value, first: Value, end: Value
) -> None:
    """The same by a thread of 128, of pointers."""
    me, chunks = m.thread(), width // CODES
    for step in range(keys * chunks // 128):
        chunk = m.add(me, 128 * step)
        row, column = m.divide(chunk, chunks), m.remainder(chunk, chunks)
        words = m.words_at(codes, m.multiply(chunk, 2), 2)
        # Lines of 8 rows of a piece of the columns, then of the next piece; within a line chunks are swizzled by the row.
        eight, inside = m.shift(row, -3), m.both(row, 7)
        line = m.add(m.multiply(m.add(m.multiply(eight, width // LINE), m.shift(column, -3)), 8), inside)
        place = m.differ(m.both(column, 7), inside)
        m.store_words(numbers, m.add(m.multiply(line, 32), m.multiply(place, 4)), [w for word in words for w in _four(word)])
    with m.when(m.less(me, keys)):
        scale = m.load(given, me, m.i32())
        outside = m.less(me, first)
        scale = m.choose(outside, 0, scale)
        m.store_words(scales, me, [m.choose(m.less(me, end), scale, 0)])


def _four(word: Value) -> list[Value]:
    """Two pairs of bfloat16 of the four codes of a word."""
    made = []
    for half in (m.permute(word, 0x1404), m.permute(word, 0x3424)):  # codes in the upper bytes of half-words
        small = m.either(m.both(half, 0x8000_8000), m.both(m.shift(half, -4), 0x07F0_07F0))
        made.append(m.times_pairs(small, EXPONENT))
    return made


def _twin(codes: Any, given: Any, numbers: Any, scales: Any, first: jax.Array, end: jax.Array) -> None:
    """What it does, in operations that the interpreter knows."""
    wide = decode(plgpu.load(codes), jnp.bfloat16)
    numbers[...] = jnp.where(jnp.isnan(wide), jnp.bfloat16(480), wide)
    key = lax.iota(jnp.int32, given.shape[0])
    scales[...] = jnp.where((key >= first) & (key < end), plgpu.load(given), 0.0)
