"""What `device` does, in plain operations: Pallas' interpreter on the CPU runs the kernels' copies, barriers and loops with
these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from inkling_jax.kernels.expert_matmul.decode_plan import Product
from inkling_jax.kernels.expert_matmul.pack import BLOCK_COLUMNS, LINES, SCALE_FACTOR, decode_block


def set_registers(count: int) -> None:
    """There are none."""


def multiply_unit(product: Product) -> Callable:
    """See device.multiply_unit."""

    def run(acc: Array, words: Array, x: Array, q: Array) -> Array:
        packed = words[...]
        if product.unit < BLOCK_COLUMNS:  # a block is decoded whole
            packed = jnp.concatenate([packed, packed])
        x = x[pl.ds(0, product.x_rows * product.x_columns)].reshape(product.x_rows, product.split, product.columns)
        x = lax.dynamic_index_in_dim(x, q, 1, keepdims=False).astype(jnp.float32)
        x = jnp.concatenate([x] * (product.rows // product.x_rows)) if product.x_rows < product.rows else x
        lines = len(packed) // max(1, product.columns // BLOCK_COLUMNS)
        for b in range(0, product.columns, BLOCK_COLUMNS):
            weight = decode(packed[b // BLOCK_COLUMNS * lines :][:lines])[:, : product.columns - b]
            part = x[:, b : b + BLOCK_COLUMNS]
            acc = acc + lax.dot_general(weight, part, (((1,), (1,)), ((), ())), precision="highest")
        return acc

    return run


def decode(words: Array) -> Array:
    """The numbers of a block as the chip decodes them, SCALE_FACTOR too small where they were packed codes."""
    return decode_block(words) / (SCALE_FACTOR if words.shape[0] == LINES else 1)


def put_handed(acc: Array, ref: Array) -> None:
    """See device.put_handed."""
    ref[...] = acc.reshape(-1)


def add_handed(rows: int) -> Callable:
    """See device.add_handed."""
    return lambda acc, ref: acc + ref[...].reshape(acc.shape)


def await_rows(later: int) -> None:
    """Rows are there when `load_rows` returns."""


def load_rows(columns: int, x_rows: int, width: int, gather: bool) -> Callable:
    """See device.load_rows."""

    def run(x: Array, token: Array, to: Array, row: Array, used: Array, column: Array) -> None:
        @pl.loop(0, used)
        def _(i: Array) -> None:
            source = token[row + i] if gather else row + i
            to[pl.ds(i * columns, columns)] = x[source, pl.ds(column, columns)]

    return run


def store_hidden(width: int) -> Callable:
    """See device.store_hidden."""

    def run(acc: Array, hidden: Array, row: Array, used: Array, block: Array, gate_scale: Array, up_scale: Array) -> None:
        _store_channels(acc, hidden, row, used, block, gate_scale, up_scale, lambda _: 1)

    return run


def store_shared_hidden(width: int, shared: int) -> Callable:
    """See device.store_shared_hidden."""

    def run(acc: Array, hidden: Array, row: Array, used: Array, block: Array, weights: Array) -> None:
        expert = lax.div(block, width // shared // 32)
        _store_channels(acc, hidden, row, used, block, 1, 1, lambda token: weights[token, expert])

    return run


def _store_channels(
    acc: Array, hidden: Array, row: Array, used: Array, block: Array, gate_scale: Any, up_scale: Any, weight: Callable
) -> None:
    rows = acc.shape[1]
    both = acc.reshape(4, 2, 4, 2, rows)  # j, kh (four of eight) of 64 channels, gate or up, c, lo/hi
    gate, up = both[:, 0] * gate_scale, both[:, 1] * up_scale
    value = (gate / (1 + jnp.exp(-gate)) * up).transpose(1, 0, 2, 3).reshape(4, 8, rows)
    channel = lax.div(block, 2) * 64 + lax.rem(block, 2) * 8

    @pl.loop(0, used)
    def _(i: Array) -> None:
        one = lax.dynamic_index_in_dim(value, i, 2, keepdims=False)
        weighed = (one * weight(row + i)).astype(jnp.bfloat16)
        for c in range(4):
            hidden[row + i, pl.ds(channel + 16 * c, 8)] = weighed[c]


def store_rows(width: int) -> Callable:
    """See device.store_rows."""

    def run(acc: Array, y: Array, row: Array, used: Array, column: Array, scale: Array) -> None:
        value = acc * scale

        @pl.loop(0, used)
        def _(i: Array) -> None:
            y[row + i, pl.ds(column, 64)] = lax.dynamic_index_in_dim(value, i, 1, keepdims=False)

    return run
