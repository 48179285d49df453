"""What one warpgroup does in the kernel for many rows an expert, beside what `device` holds: tiles of products, and what becomes
of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from inkling_jax.kernels import mlir as m
from inkling_jax.kernels.expert_matmul import device
from inkling_jax.kernels.expert_matmul.pack import LINES
from inkling_jax.kernels.mlir import Value

set_registers = device.set_registers
STAGING_BYTES = 8192  # of shared memory that a warpgroup turns its results in
_REF = plgpu.RefType()


def decode_half(lines: int, half: int) -> Callable:
    """Columns 64 half .. + 63 of a block in shared memory as 64 x 64 bfloat16 in registers, as f(words [lines, 128]).

    Columns of packed weights c, j, kh, lo/hi come in the order j, kh, c, lo/hi: rows of x must be in that order too.
    """
    result = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(_REF,), return_type=result)
    def run(_: Any, words: Value) -> mgpu.FragmentedArray:
        array = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64, 64)), dtype=object)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        for j, four in enumerate(device.fragments(mgpu.utils.memref_ptr(words), lines == LINES, half)):
            for i, value in enumerate(four):
                array[(0, 2 * j + i // 2, 0, 0, i % 2, 0, 0, 0, 0)] = mgpu.utils.bitcast(value, pair)
        return mgpu.FragmentedArray(_registers=array, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run


def store_tile(width: int, paired: bool, shared: int = 0) -> Callable:
    """Write a float32 tile, 64 rows of weights by some rows of x, to `used` rows of out [., width] from `row` on, bfloat16.

    As f(acc, staging, out, row, used, block, scale, up scale). If `paired`, rows g of weights are gate and g + 8 up, and their
    silu(gate) * up makes 32 columns, in the order in which the next product meets its columns; else 64. With `shared` experts
    side by side one more argument, weights [., shared], multiplies each row's columns by the weight for their expert. A warpgroup
    turns its results in its own `staging` memory, so that what it writes to the GPU's memory lies together.
    """
    row_bytes = 64 if paired else 128
    tokens = STAGING_BYTES // row_bytes  # a round
    mask, down = (3, 1) if paired else (7, 0)
    types = (plgpu.Layout.WGMMA, _REF, _REF, *[device.SCALAR] * 5, *[_REF] * (shared > 0))

    @plgpu.inline_mgpu(arg_types=types, return_type=())
    def run(
        _: Any, acc: Any, staging: Value, out: Value, row: Any, used: Any, block: Any, scale: Any, up_scale: Any, *more: Value
    ) -> tuple[()]:
        row, used, block, *factors = (m.scalar(a) for a in (row, used, block, scale, up_scale))
        staging, out = mgpu.utils.memref_ptr(staging), mgpu.utils.memref_ptr(out)
        weights = [_weights(mgpu.utils.memref_ptr(w), acc.shape[1], row, used, block, width, shared) for w in more]
        halves = [
            _halves(four, factors, paired, weights[0][n] if weights else None) for n, four in enumerate(device.registers_of(acc))
        ]
        column = m.multiply(block, row_bytes // 2)

        def place(token: Value, piece: Value) -> Value:
            """Where 16 bytes of a token lie: pieces trade places so that eight tokens meet no bank twice."""
            swapped = arith.xori(piece, m.both(m.shift(token, -down), mask))
            return m.at(staging, m.add(m.multiply(token, row_bytes // 4), m.shift(swapped, 2)), m.i32())

        for start in range(0, acc.shape[1], tokens):
            mgpu.utils.warpgroup_barrier()
            here = halves[start // 8 : (start + tokens) // 8]
            _turn(here, paired, place)
            mgpu.utils.warpgroup_barrier()
            pieces = row_bytes // 16
            for first in range(0, len(here) * 8 * pieces, 128):
                index = m.add(m.thread(), first)
                token, piece = m.shift(index, -(pieces.bit_length() - 1)), m.both(index, pieces - 1)
                there = m.add(token, start)
                if len(here) * 8 * pieces < 128:
                    there = arith.select(m.less(index, len(here) * 8 * pieces), there, m.as_int(1 << 30))
                with mgpu.utils.when(m.less(there, used)):
                    value = llvm.load(ir.VectorType.get((4,), m.i32()), place(token, piece), alignment=16)
                    target = arith.muli(m.wide(m.add(row, there)), m.wide(width))
                    target = arith.addi(target, m.wide(m.add(column, m.shift(piece, 3))))
                    llvm.store(value, m.at(out, target, ir.BF16Type.get()), alignment=16)
        return ()

    return run


def _weights(weights: Value, size: int, row: Value, used: Value, block: Value, width: int, shared: int) -> list[list[Value]]:
    """For every eight rows of a tile, this thread's two rows' weights for the expert of its 32 columns."""
    expert, (_, _, c) = arith.divui(block, m.as_int(width // shared // 32)), m.lane()
    found = []
    for n in range(size // 8):
        tokens = [m.add(row, arith.minsi(m.add(m.shift(c, 1), 8 * n + i), m.subtract(used, 1))) for i in (0, 1)]
        found.append([m.load(weights, m.add(m.multiply(token, shared), expert), m.f32()) for token in tokens])
    return found


def _halves(four: list[Value], scales: list[Value], paired: bool, weights: list[Value] | None) -> list[Value]:
    """Pairs of bfloat16 of neighbouring columns of an accumulator: of row g and of row g + 8, or of what they make."""
    if paired:
        values = [device.swiglu(arith.mulf(four[i], scales[0]), arith.mulf(four[2 + i], scales[1])) for i in (0, 1)]
        if weights is not None:
            values = [arith.mulf(value, weight) for value, weight in zip(values, weights, strict=True)]
    else:
        values = [arith.mulf(v, scales[0]) for v in four]
    return [
        mgpu.utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", values[i + 1], values[i], result_types=m.i32())
        for i in range(0, len(values), 2)
    ]


def _turn(halves: list[list[Value]], paired: bool, place: Callable) -> None:
    """Lay 8 x 8 matrices, weights by rows of x, into memory with a row of x in 16 bytes: four at a time, a lane a row of x."""
    lane = m.both(m.thread(), 31)
    warp = m.shift(m.thread(), -5)
    flat = [value for eight in halves for value in eight]
    for start in range(0, len(flat), 4):
        four = flat[start : start + 4]
        matrix, within = m.shift(lane, -3), m.both(lane, 7)
        if paired:
            token, piece = m.add(lane, 8 * start), warp
        else:
            token = m.add(within, m.shift(m.shift(matrix, -1), 3), 4 * start)
            piece = m.add(m.shift(warp, 1), m.both(matrix, 1))
        words = ", ".join(f"${i + 1}" for i in range(len(four)))
        mgpu.utils.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x{len(four)}.trans.shared.b16 [$0], {{{words}}};", place(token, piece), *four
        )


def product(scratch: dict[str, Any], me: Any, base: Any, size: int, plan: Any) -> Any:
    """64 x `size` sums over the columns of weights and rows, of stages from block `base` on, each freed when it is done with."""
    halves = [decode_half(plan.lines, half) for half in (0, 1)]

    def at(ring: str, what: str, i: Any) -> Any:
        return scratch[ring + what].at[lax.rem(i, plan.w_stages if ring == "w" else plan.x_stages)]

    def decoded(k: Any, half: int) -> Any:
        return halves[half](at("w", "_ring", base + k).at[me])

    def scope(acc: Any) -> Any:
        def start(k: Any, half: int, weights: Any) -> None:
            i = 2 * (base + k) + half
            plgpu.barrier_wait(at("x", "_full", i))
            plgpu.wgmma(acc, weights, at("x", "_ring", i).at[pl.ds(0, size)].T)

        def free(k: Any, half: int) -> None:
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(at("x", "_empty", 2 * (base + k) + half))

        def block(k: Any, weights: Any, more: bool) -> Any:
            start(k, 0, weights)
            weights = decoded(k, 1)
            free(k, 0)
            start(k, 1, weights)
            plgpu.barrier_arrive(at("w", "_empty", base + k))
            if more:
                plgpu.barrier_wait(at("w", "_full", base + k + 1))
                weights = decoded(k + 1, 0)
            free(k, 1)
            return weights

        plgpu.barrier_wait(at("w", "_full", base))
        weights = lax.fori_loop(0, plan.depth - 1, lambda k, w: block(k, w, True), decoded(jnp.int32(0), 0))
        block(jnp.int32(plan.depth - 1), weights, False)
        return acc[...]

    return pl.run_scoped(scope, plgpu.ACC((64, size)))  # pyright: ignore[reportPrivateImportUsage]  it is public
