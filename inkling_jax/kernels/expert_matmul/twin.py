"""What `device` does, in plain operations: Pallas' interpreter on the CPU runs the kernels' copies, barriers and loops with
these.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from inkling_jax.kernels.expert_matmul.device import ROWS
from inkling_jax.kernels.expert_matmul.pack import BLOCK_COLUMNS, LINES, SCALE_FACTOR, decode_block


def multiply_unit(blocks: int, x_rows: int, x_stride: int) -> Callable:
    """See device.multiply_unit."""

    def run(acc: Array, words: Array, x: Array) -> Array:
        packed, rows = words[...], x[...].astype(jnp.float32)
        weights = [decode_block(packed[b * LINES : (b + 1) * LINES]) / SCALE_FACTOR for b in range(blocks)]
        rows = jnp.concatenate([rows] * (ROWS // x_rows)) if x_rows < ROWS else rows
        for b, weight in enumerate(weights):
            part = rows[:, b * BLOCK_COLUMNS : (b + 1) * BLOCK_COLUMNS]
            acc = acc + lax.dot_general(weight, part, (((1,), (1,)), ((), ())), precision="highest")
        return acc

    return run


def put_partial(acc: Array, ref: Array) -> None:
    """See device.put_partial."""
    ref[...] = acc.reshape(512)


def add_partial(acc: Array, ref: Array) -> Array:
    """See device.add_partial."""
    return acc + ref[...].reshape(acc.shape)


def load_rows(columns: int, x_rows: int, x_stride: int, width: int, gather: bool) -> Callable:
    """See device.load_rows."""

    def run(x: Array, token: Array, to: Array, row: Array, used: Array, column: Array) -> None:
        for i in range(x_rows):

            @pl.when(i < used)
            def _(i: int = i) -> None:
                source = token[row + i] if gather else row + i
                to[i, pl.ds(0, columns)] = x[source, pl.ds(column, columns)]

    return run


def store_hidden(width: int) -> Callable:
    """See device.store_hidden."""

    def run(acc: Array, hidden: Array, row: Array, used: Array, block: Array, gate_scale: Array, up_scale: Array) -> None:
        both = acc.reshape(4, 2, 4, 2, ROWS)  # j, kh (four of eight) of 64 channels, gate or up, c, lo/hi
        gate, up = both[:, 0] * gate_scale, both[:, 1] * up_scale
        value = (gate / (1 + jnp.exp(-gate)) * up).astype(jnp.bfloat16).transpose(1, 0, 2, 3).reshape(4, 8, ROWS)
        channel = lax.div(block, 2) * 64 + lax.rem(block, 2) * 8
        for i in range(ROWS):

            @pl.when(i < used)
            def _(i: int = i) -> None:
                for c in range(4):
                    hidden[row + i, pl.ds(channel + 16 * c, 8)] = value[c, :, i]

    return run


def store_rows(width: int) -> Callable:
    """See device.store_rows."""

    def run(acc: Array, y: Array, row: Array, used: Array, column: Array, scale: Array) -> None:
        value = acc * scale
        for i in range(ROWS):

            @pl.when(i < used)
            def _(i: int = i) -> None:
                y[row + i, pl.ds(column, 64)] = value[:, i]

    return run
