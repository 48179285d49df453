"""What the attention kernels share of Pallas Mosaic GPU: shared-memory layouts, and products that the interpreter can also run.

The interpreter (CPU) knows neither accumulators that persist over a product nor operands in registers. With `interpret` a product
starts from zero and is added, and register operands pass through a scratch of shared memory; the rest of a kernel is one text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # query rows of one warpgroup: the M of its products
LOG2E = math.log2(math.e)
NEVER = -1e30  # score of a masked key, and the running maximum of a row that has seen none
NOTHING_SEEN = -1e29  # a running maximum below this has met masked keys only
WGMMA = plgpu.Layout.WGMMA
SHARED_MEMORY = 232_448  # bytes of a block on Hopper


def tiled_smem(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory that matrix products read, as plgpu.SMEM makes it: rows in tiles of 8, swizzled as wide as a row allows."""
    return plgpu.SMEM(shape, dtype, transforms=tiled_transforms(shape[-1], dtype))


def tiled_transforms(columns: int, dtype: jnp.dtype) -> tuple[Any, ...]:
    """How `tiled_smem` lays rows of so many columns out."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = min(128, columns * bits // 8)
    # jax leaves a method of theirs to a protocol, which pyright takes for abstract
    return (
        plgpu.TilingTransform((8, 8 * swizzle // bits)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )


def smem_bytes(array: Any) -> int:
    """Of an array in shared memory; what plgpu.SMEM makes has no public type."""
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize


def int32(value: int) -> jax.Array:
    """A 32-bit scalar: with Python integers alone, scalar arithmetic in a kernel could be done in other widths."""
    return jnp.int32(value)


def full(shape: tuple[int, ...], value: float) -> jax.Array:
    """A float32 constant laid out as an accumulator (two dimensions) or as one value a row of it (one dimension)."""
    layout = WGMMA if len(shape) == 2 else WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def by_row(vector: jax.Array, columns: int) -> jax.Array:
    """One value a row, broadcast over columns."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], columns), [0])


def scaled(array: jax.Array, scales: Any) -> jax.Array:
    """`array`, laid out as an accumulator, times a scale a column, which lies in shared memory."""
    scale = plgpu.load(scales, layout=WGMMA.reduce(0), optimized=False)
    return array * lax.broadcast_in_dim(scale, array.shape, [1])


def iota(shape: tuple[int, int], dimension: int) -> jax.Array:
    """Row or column numbers laid out as an accumulator."""
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=WGMMA)


def operand(value: jax.Array, scratch: jax.Array | None) -> jax.Array:
    """`value` as left operand of a product: itself, in registers, or by way of `scratch` under the interpreter."""
    if scratch is None:
        return value
    scratch[...] = value
    plgpu.commit_smem()
    return scratch


def accumulate(carried: jax.Array, product: Callable, interpret: bool) -> jax.Array:
    """carried + what product(accumulator) adds to it, all products awaited."""
    accumulator_type: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  it is public
    if not interpret:
        return pl.run_state(product)(accumulator_type.init(carried))

    def fresh(accumulator: Any) -> jax.Array:
        product(accumulator)
        return accumulator[...]

    return carried + pl.run_scoped(fresh, accumulator_type(carried.shape, jnp.float32))


def softmax_weights(score: jax.Array, top: jax.Array, scale: float, masked: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """exp2(score * scale - new top), the new running maximum, and the factor that what was summed so far shrinks by.

    `masked`: some scores may be NEVER. Their weight is then zero even in a row that has seen nothing else: its maximum is low.
    """
    new_top = jnp.maximum(top, score.max(axis=1) * scale)
    base = jnp.where(new_top < NOTHING_SEEN * scale, 0.0, new_top) if masked else new_top
    weights = jnp.exp2(score * scale - by_row(base, score.shape[1]))
    return weights, new_top, jnp.exp2(top - base)


def drain(s: dict[str, Any], *names: str) -> None:
    """Wait for these barriers: a block must not end with arrivals outstanding."""
    for name in names:
        for slot in range(s[name].shape[0]):
            plgpu.barrier_wait(s[name].at[slot])
