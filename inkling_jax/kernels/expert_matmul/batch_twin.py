"""What `batch_device` does, in plain operations, for Pallas' interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from inkling_jax.kernels.expert_matmul import twin

set_registers = twin.set_registers


def product(scratch: dict[str, Any], me: Any, base: Any, size: int, plan: Any) -> Any:
    """See batch_device.product."""

    def block(k: Array, acc: Array) -> Array:
        stage = lax.rem(base + k, plan.w_stages)
        plgpu.barrier_wait(scratch["w_full"].at[stage])
        weights = twin.decode(scratch["w_ring"][stage, me])
        weights = weights.reshape(64, 2, 4, 4, 2, 2).transpose(0, 1, 3, 4, 2, 5).reshape(64, 128)
        plgpu.barrier_arrive(scratch["w_empty"].at[stage])
        for half in (0, 1):
            stage = lax.rem(2 * (base + k) + half, plan.x_stages)
            plgpu.barrier_wait(scratch["x_full"].at[stage])
            rows = scratch["x_ring"][stage, pl.ds(0, size)].astype(jnp.float32)
            part = weights[:, 64 * half : 64 * half + 64]
            acc = acc + lax.dot_general(part, rows, (((1,), (1,)), ((), ())), precision="highest")
            plgpu.barrier_arrive(scratch["x_empty"].at[stage])
        return acc

    return lax.fori_loop(0, plan.depth, block, jnp.zeros((64, size), jnp.float32))


def store_tile(width: int, paired: bool, shared: int = 0) -> Callable:
    """See batch_device.store_tile."""

    def run(
        acc: Array, _: Any, out: Any, row: Array, used: Array, block: Array, scale: Array, up_scale: Array, *more: Any
    ) -> None:
        if paired:
            both = acc.reshape(4, 2, 8, -1)
            gate, up = both[:, 0] * scale, both[:, 1] * up_scale
            value = (gate / (1 + jnp.exp(-gate)) * up).reshape(32, -1)
        else:
            value = acc * scale
        columns = value.shape[0]

        @pl.loop(0, used)
        def _(i: Array) -> None:
            weight = more[0][row + i, lax.div(block, width // shared // 32)] if more else 1
            one = lax.dynamic_index_in_dim(value, i, 1, keepdims=False)
            out[row + i, pl.ds(block * columns, columns)] = (one * weight).astype(jnp.bfloat16)

    return run
