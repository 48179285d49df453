"""What `device` does, in plain operations: Pallas' interpreter on the CPU runs the kernels' copies, barriers and loops with
these.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from inkling_jax.kernels.expert_matmul.pack import BLOCK_COLUMNS, LINES, SCALE_FACTOR, decode_block


def multiply_unit(blocks: int, lines: int, rows: int, x_rows: int, x_stride: int) -> Callable:
    """See device.multiply_unit."""

    def run(acc: Array, words: Array, x: Array) -> Array:
        packed, x = words[...], x[...].astype(jnp.float32)
        x = jnp.concatenate([x] * (rows // x_rows)) if x_rows < rows else x
        for b in range(blocks):
            weight = decode(packed[b * lines : (b + 1) * lines])
            part = x[:, b * BLOCK_COLUMNS : (b + 1) * BLOCK_COLUMNS]
            acc = acc + lax.dot_general(weight, part, (((1,), (1,)), ((), ())), precision="highest")
        return acc

    return run


def decode(words: Array) -> Array:
    """The numbers of a block as the chip decodes them, SCALE_FACTOR too small where they were packed codes."""
    return decode_block(words) / (SCALE_FACTOR if words.shape[0] == LINES else 1)


def put_partial(acc: Array, ref: Array) -> None:
    """See device.put_partial."""
    ref[...] = acc.reshape(-1)


def add_partial(rows: int) -> Callable:
    """See device.add_partial."""
    return lambda acc, ref: acc + ref[...].reshape(acc.shape)


def await_rows(later: int) -> None:
    """Rows are there when `load_rows` returns."""


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
        rows = acc.shape[1]
        both = acc.reshape(4, 2, 4, 2, rows)  # j, kh (four of eight) of 64 channels, gate or up, c, lo/hi
        gate, up = both[:, 0] * gate_scale, both[:, 1] * up_scale
        value = (gate / (1 + jnp.exp(-gate)) * up).astype(jnp.bfloat16).transpose(1, 0, 2, 3).reshape(4, 8, rows)
        channel = lax.div(block, 2) * 64 + lax.rem(block, 2) * 8
        for i in range(acc.shape[1]):

            @pl.when(i < used)
            def _(i: int = i) -> None:
                for c in range(4):
                    hidden[row + i, pl.ds(channel + 16 * c, 8)] = value[c, :, i]

    return run


def store_rows(width: int) -> Callable:
    """See device.store_rows."""

    def run(acc: Array, y: Array, row: Array, used: Array, column: Array, scale: Array) -> None:
        value = acc * scale
        for i in range(acc.shape[1]):

            @pl.when(i < used)
            def _(i: int = i) -> None:
                y[row + i, pl.ds(column, 64)] = value[:, i]

    return run
