"""Reads of a large array at the speed of the memory: what other kernels' bytes are held against. Not part of any model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

TILE = (64, 128)  # int32 words of one bulk copy: 32 KB, contiguous in memory
STAGES = 6  # copies in flight a block: 192 KB of its shared memory


@functools.partial(jax.jit, static_argnames=("blocks", "interpret"))
def tma_read(tiles: Int32[Array, "n 64 128"], blocks: int, interpret: bool = False) -> Int32[Array, "blocks 128"]:
    """Copy every tile into shared memory by the bulk copy engine (TMA), `blocks` blocks each taking every blocks-th tile.

    Result b is the wrapped sum of the first rows of the tiles that block b copied: proof that they arrived. Needs a Hopper GPU or
    `interpret`, and at least STAGES tiles a block.
    """
    count = tiles.shape[0]
    assert tiles.shape[1:] == TILE and count >= STAGES * blocks, tiles.shape

    def body(tiles_ref, out_ref, ring, sums, full):
        block = lax.axis_index("block")
        mine = (count - block + blocks - 1) // blocks

        def start(i):
            slot = lax.rem(i, STAGES)
            plgpu.copy_gmem_to_smem(tiles_ref.at[block + i * blocks], ring.at[slot], full.at[slot])

        pl.loop(0, STAGES)(start)

        def step(i, total):
            slot = lax.rem(i, STAGES)
            plgpu.barrier_wait(full.at[slot])
            total = total + ring[slot, 0]
            pl.when(i + STAGES < mine)(lambda: start(i + STAGES))
            return total

        sums[...] = lax.fori_loop(0, mine, step, jnp.zeros(TILE[1], jnp.int32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums, out_ref.at[block])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((blocks, TILE[1]), jnp.int32),
        scratch_types=[
            plgpu.SMEM((STAGES, *TILE), jnp.int32),
            plgpu.SMEM((TILE[1],), jnp.int32),
            plgpu.Barrier(num_barriers=STAGES),
        ],
        grid=(blocks,),
        grid_names=("block",),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    return kernel(tiles)


@jax.jit
def xla_read(tiles: Int32[Array, "n 64 128"]) -> Int32[Array, ""]:
    """The wrapped sum of all words, as XLA reduces: the second opinion, and the only one off the GPU."""
    return jnp.sum(tiles)
