"""What one warpgroup of the prefill kernel does thread by thread, in the compiler's own operations: the bias, and zeros.

Thread t of a warpgroup is lane 4i + c of warp w. Of every eight columns of 64 rows it holds rows 16w + i and 16w + 8 + i of
columns 2c and 2c + 1, which is what mma.m16n8k16 works on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from inkling_jax.kernels import mlir as m
from inkling_jax.kernels.mlir import Value
from inkling_jax.kernels.paged_attention.mosaic import NEVER, ROWS
from inkling_jax.kernels.paged_attention.prefill_shape import GROUP, PrefillShape

SCALAR = plgpu.Layout.WG_SPLAT
REF = plgpu.RefType()
_BYTES = 16  # of a row of half the bias table


def read_rel(shape: PrefillShape) -> Callable:
    """The bias coefficients of a warpgroup's rows [64, 16], as f(rel of the tile [tokens, share, 16], warpgroup)."""
    result = plgpu.ShapeDtypeStruct((ROWS, 16), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(REF, SCALAR), return_type=result)
    def run(_: Any, rel: Value, group: Any) -> mgpu.FragmentedArray:
        warp, i, c = m.lane()
        pointer = mgpu.utils.memref_ptr(rel)
        array = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((ROWS, 16)), dtype=object)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        for half in (0, 1):
            token = m.add(_token(shape, m.scalar(group), warp), GROUP * half)
            row = m.add(m.multiply(token, shape.share), i)  # of a group that holds several tokens i goes on to their heads
            for n in (0, 1):
                word = m.load(pointer, m.add(m.shift(row, 3), 4 * n, c), m.i32())
                array[(0, n, 0, 0, half, 0, 0, 0, 0)] = mgpu.utils.bitcast(word, pair)
        return mgpu.FragmentedArray(_registers=array, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run


def add_bias(shape: PrefillShape) -> Callable:
    """scores [64, keys] + rel @ table, as f(scores, rel [64, 16], table, row).

    `row`: of the table, that the first key has for the first token of the warpgroup. A token later is a row earlier: hence a
    product of a warp's own rows for each token of a group.
    """
    scores_type = plgpu.ShapeDtypeStruct((ROWS, shape.keys), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, REF, SCALAR), return_type=scores_type)
    def run(_: Any, scores: Any, rel: Any, table: Value, row: Any) -> mgpu.FragmentedArray:
        total = _registers(scores)
        factors = _factors(shape, rel)
        lane = m.both(m.thread(), 31)
        warp = m.shift(m.thread(), -5)
        matrix, line = m.shift(lane, -3), m.both(lane, 7)  # of four 8 x 8 matrices a lane names a row of one
        first = m.add(m.scalar(row), line, m.multiply(warp, -shape.group_tokens))
        if shape.group_tokens == 2:
            first = m.subtract(first, m.shift(matrix, -1))  # matrices 2 and 3: the second token
        else:
            first = m.add(first, m.shift(m.shift(matrix, -1), 3))  # the next 8 keys
        plane = m.multiply(m.both(matrix, 1), shape.table_rows * _BYTES)
        base = m.add(_address(table), m.shift(first, 4), plane)
        for n, block, fragment in _fragments(shape, base):
            before = total[n] if n >= 0 else [m.as_float(0.0)] * 4
            after = total[n + 1] if n + 1 < len(total) else [m.as_float(0.0)] * 4
            made = m.multiply_add(factors[block], fragment, [*before[:2], *after[2:]])
            if n >= 0:
                total[n] = [*made[:2], *total[n][2:]]
            if n + 1 < len(total):
                total[n + 1] = [*total[n + 1][:2], *made[2:]]
        return _array(total)

    return run


def _fragments(shape: PrefillShape, base: Value) -> Any:
    """(n, token of a group, fragment) of keys 8n .. 8n + 7 as tokens of upper rows see them, those of lower rows the next 8."""
    last = shape.keys // 8
    if shape.group_tokens == 2:
        for n in range(-1, last):
            four = _load_matrices(m.add(base, 8 * n * _BYTES), 4)
            yield n, 0, four[:2]
            yield n, 1, four[2:]
        return
    for n in range(-1, last - 1, 2):
        four = _load_matrices(m.add(base, 8 * n * _BYTES), 4)
        yield n, 0, four[:2]
        yield n + 1, 0, four[2:]
    yield last - 1, 0, _load_matrices(m.add(base, 8 * (last - 1) * _BYTES), 2)


def _load_matrices(address: Value, count: int) -> list[Value]:
    names = ", ".join(f"${i}" for i in range(count))
    return list(
        mgpu.utils.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {{{names}}}, [${count}];",
            address,
            result_types=[m.i32()] * count,
            has_side_effects=True,
            convergent=True,
        )
    )


def _factors(shape: PrefillShape, rel: mgpu.FragmentedArray) -> list[list[Value]]:
    """For each token of a group, the coefficients in its rows and zero in others'."""
    words = [mgpu.utils.bitcast(rel.registers[(0, n, 0, 0, h, 0, 0, 0, 0)], m.i32()) for n in (0, 1) for h in (0, 1)]
    if shape.group_tokens == 1:
        return [words]
    second = m.less(15, m.both(m.thread(), 31))
    return [[m.choose(second, 0, w) for w in words], [m.choose(second, w, 0) for w in words]]


def hide(shape: PrefillShape, causal: bool, window: bool) -> Callable:
    """Scores with NEVER at keys out of sight, as f(scores, distance of the tile's first token from the first key, warpgroup).

    The number of a column is a constant of an instruction: of an array of them the compiler would keep every one in a register.
    """
    scores_type = plgpu.ShapeDtypeStruct((ROWS, shape.keys), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, SCALAR, SCALAR), return_type=scores_type)
    def run(_: Any, scores: Any, distance: Any, group: Any) -> mgpu.FragmentedArray:
        warp, i, c = m.lane()
        total, never = _registers(scores), m.as_float(NEVER)
        own = m.add(_token(shape, m.scalar(group), warp), m.shift(i, -2) if shape.group_tokens == 2 else 0)
        for half in (0, 1):
            youngest = m.add(m.scalar(distance), own, GROUP * half, m.multiply(c, -2))  # column, counted from 2c
            oldest = m.subtract(youngest, (shape.window or 0) - 1)
            for n, four in enumerate(total):
                for j in (0, 1):
                    column, at = m.as_int(8 * n + j), 2 * half + j
                    if causal:
                        four[at] = arith.select(m.less(youngest, column), never, four[at])
                    if window:
                        four[at] = arith.select(m.less(column, oldest), never, four[at])
        return _array(total)

    return run


def clear_rows(shape: PrefillShape) -> Callable:
    """Zero the rows of a tile of values outside first .. end - 1, as f(values [keys, width], first, end)."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(_values_transforms()), SCALAR, SCALAR), return_type=())
    def run(_: Any, values: Value, first: Any, end: Any) -> tuple[()]:
        pointer = mgpu.utils.memref_ptr(values)
        lines = shape.keys * shape.pieces  # of 128 bytes: 8 rows of a piece, then 8 of the next
        zero = m.as_int(0)
        for step in range(lines * 8 // 128):
            chunk = m.add(m.thread(), 128 * step)
            line = m.shift(chunk, -3)
            row = m.add(m.shift(arith.divui(line, m.as_int(8 * shape.pieces)), 3), m.both(line, 7))
            outside = arith.ori(m.less(row, m.scalar(first)), arith.xori(m.less(row, m.scalar(end)), _true()))
            with mgpu.utils.when(outside):
                m.store_vector(pointer, m.shift(chunk, 2), [zero] * 4, m.i32())
        return ()

    return run


def _values_transforms() -> tuple[Any, ...]:
    return (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


def _true() -> Value:
    boolean = ir.IntegerType.get_signless(1)
    return arith.constant(boolean, ir.IntegerAttr.get(boolean, 1))


def _token(shape: PrefillShape, group: Value, warp: Value) -> Value:
    return m.add(m.multiply(group, shape.group_step), m.multiply(warp, shape.group_tokens))


def _address(ref: Value) -> Value:
    return llvm.ptrtoint(m.i32(), mgpu.utils.memref_ptr(ref))


def _registers(array: mgpu.FragmentedArray) -> list[list[Value]]:
    """For every eight columns: row i of columns 2c and 2c + 1, then row i + 8 of them."""
    return [
        [vector.extract(array.registers[(0, n, 0, 0, h, 0, 0, 0, 0)], [], [j]) for h in (0, 1) for j in (0, 1)]
        for n in range(array.shape[1] // 8)
    ]


def _array(registers: list[list[Value]]) -> mgpu.FragmentedArray:
    pair = ir.VectorType.get((2,), m.f32())
    array = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((ROWS, 8 * len(registers))), dtype=object)
    for n, four in enumerate(registers):
        for h in (0, 1):
            array[(0, n, 0, 0, h, 0, 0, 0, 0)] = vector.from_elements(pair, four[2 * h : 2 * h + 2])
    return mgpu.FragmentedArray(_registers=array, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
