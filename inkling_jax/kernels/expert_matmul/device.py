"""What one warpgroup does in the decode kernel, in the compiler's own operations: Pallas cannot move bits between types of other
widths.

Thread t of a warpgroup is lane 4g + c of warp w. Of every eight columns of a float32 accumulator (64 rows of weights by rows of
x) it holds rows 16w + g and 16w + g + 8 of columns 2c and 2c + 1, the fragment of mma.m16n8k16; `pack` orders the weights to
match.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from inkling_jax.kernels import mlir as m
from inkling_jax.kernels.expert_matmul.decode_plan import Plan, Product
from inkling_jax.kernels.expert_matmul.pack import LINES
from inkling_jax.kernels.mlir import Value

SCALAR = plgpu.Layout.WG_SPLAT
_REF = plgpu.RefType()


def set_registers(count: int) -> None:
    """Take more registers for each thread of this warpgroup, or give up all but -count."""
    plgpu.set_max_registers(abs(count), action="increase" if count > 0 else "decrease")


def accumulator_type(rows: int) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((64, rows), jnp.float32, layout=plgpu.Layout.WGMMA)


def registers_of(acc: mgpu.FragmentedArray) -> list[list[Value]]:
    """For every eight columns: row g of columns 2c and 2c + 1, then row g + 8 of them."""
    return [
        [vector.extract(acc.registers[(0, n, 0, 0, h, 0, 0, 0, 0)], [], [i]) for h in (0, 1) for i in (0, 1)]
        for n in range(acc.shape[1] // 8)
    ]


def _accumulator(registers: list[list[Value]]) -> mgpu.FragmentedArray:
    pair = ir.VectorType.get((2,), m.f32())
    array = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64, 8 * len(registers))), dtype=object)
    for n, four in enumerate(registers):
        for h in (0, 1):
            array[(0, n, 0, 0, h, 0, 0, 0, 0)] = vector.from_elements(pair, four[2 * h : 2 * h + 2])
    return mgpu.FragmentedArray(_registers=array, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def decode_word(word: Value) -> list[Value]:
    """The four registers of a weight fragment that a packed word holds, as pairs of bfloat16 of the value times 2**-126."""
    mask = 0x81C081C0
    last = m.either(m.both(m.shift(word, 1), 0x80008000), m.both(m.shift(word, -3), 0x01800180))
    last = m.either(last, m.both(m.shift(word, -7), 0x00400040))
    return [m.both(word, mask), m.both(m.shift(word, 3), mask), m.both(m.shift(word, 6), mask), last]


def decode_scale(word: Value, byte: int) -> Value:
    """Two copies of scale `byte` of a word as bfloat16 of the scale times 2**106."""
    pairs = mgpu.utils.inline_ptx(
        f"prmt.b32 $0, $1, $2, {4 << 12 | byte << 8 | 4 << 4 | byte:#x};", word, m.as_int(0x07070707), result_types=m.i32()
    )
    return m.shift(pairs, 4)


def fragments(words: Value, codes: bool, k64: int) -> list[list[Value]]:
    """The weight fragments, as pairs of bfloat16, of four times 16 columns: columns 64 k64 .. + 63 of what lies in shared memory.

    `codes`: blocks of NVFP4, else of bfloat16.
    """
    thread = m.thread()
    if not codes:
        return [m.vector_at(words, m.add(m.shift(thread, 2), k64 * 2048 + 512 * j), m.i32(), 4) for j in range(4)]
    start, half = k64 // 2 * LINES * 128, k64 % 2
    packed = m.vector_at(words, m.add(m.shift(thread, 2), start + half * 512), m.i32(), 4)
    scales = m.load(words, m.add(thread, start + (LINES - 1) * 128), m.i32())
    scale = [decode_scale(scales, 2 * half + h) for h in (0, 1)]
    # Exact, since three bits and four make at most six.
    return [[m.times_pairs(pair, scale[i % 2]) for i, pair in enumerate(decode_word(word))] for word in packed]


def multiply_unit(product: Product) -> Callable:
    """acc += weights @ x.T over the columns of a stage, as f(acc, words [lines, 128], x, q); returns the new acc.

    acc has `product.rows` columns. x is a stage of rows in shared memory, `x_columns` elements each, pieces of 16 bytes where
    `load_rows` puts them, of which those of part `q` of the split are taken; columns of acc past those rows repeat them.
    """
    rows, x_rows, stride = product.rows, product.x_rows, product.x_columns
    acc_type = accumulator_type(rows)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _REF, _REF, SCALAR), return_type=acc_type)
    def run(_: Any, acc: mgpu.FragmentedArray, words: Value, x: Value, q: Any) -> mgpu.FragmentedArray:
        total = registers_of(acc)
        words, x = mgpu.utils.memref_ptr(words), mgpu.utils.memref_ptr(x)
        _, g, c = m.lane()
        row = m.both(g, x_rows - 1)
        start = m.add(m.multiply(row, stride // 2), m.multiply(m.scalar(q), product.columns // 2))
        pieces = [m.add(start, m.shift(arith.xori(m.add(m.shift(c, 1), i), m.both(row, 7)), 2)) for i in (0, 1)]
        for k64 in range(product.columns // 64):
            weights = fragments(words, product.lines == LINES, k64)
            for n in range(rows // 8):
                offset = (k64 * 64 + 8 * (n % max(1, x_rows // 8)) * stride) // 2
                columns = [v for piece in pieces for v in m.vector_at(x, m.add(piece, offset), m.i32(), 4)]
                for j in range(4):
                    total[n] = m.multiply_add(weights[j], columns[2 * j : 2 * j + 2], total[n])
        return _accumulator(total)

    return run


@plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _REF), return_type=())
def put_handed(_: Any, acc: mgpu.FragmentedArray, ref: Value) -> tuple[()]:
    """Lay an accumulator into as many floats of shared memory, in no order but `add_handed`'s."""
    for n, four in enumerate(registers_of(acc)):
        value = vector.from_elements(ir.VectorType.get((4,), m.f32()), four)
        at = m.add(m.shift(m.thread(), 2), 512 * n)
        llvm.store(value, m.at(mgpu.utils.memref_ptr(ref), at, m.f32()), alignment=16)
    return ()


def add_handed(rows: int) -> Callable:
    """acc plus what `put_handed` laid there, as f(acc, ref)."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _REF), return_type=accumulator_type(rows))
    def run(_: Any, acc: mgpu.FragmentedArray, ref: Value) -> mgpu.FragmentedArray:
        total = registers_of(acc)
        for n, four in enumerate(total):
            other = m.vector_at(mgpu.utils.memref_ptr(ref), m.add(m.shift(m.thread(), 2), 512 * n), m.f32(), 4)
            total[n] = [arith.addf(a, b) for a, b in zip(four, other, strict=True)]
        return _accumulator(total)

    return run


def load_rows(columns: int, x_rows: int, width: int, gather: bool) -> Callable:
    """Start to copy `columns` columns of `used` rows of x into shared memory, as f(x, token, to, row, used, column).

    Row i is row token[row + i] of x [., width] if `gather`, else row + i; it lands `columns` elements after row i - 1 of `to`. Of
    its pieces of 16 bytes, every eight trade places by the exclusive or with i, so that eight lanes that read one piece each of
    eight rows, or two each of four, meet no bank twice. `await_rows` waits.
    """

    @plgpu.inline_mgpu(arg_types=(_REF, _REF, _REF, SCALAR, SCALAR, SCALAR), return_type=())
    def run(_: Any, x: Value, token: Value, to: Value, row: Any, used: Any, column: Any) -> tuple[()]:
        x, token, to = (mgpu.utils.memref_ptr(ref) for ref in (x, token, to))
        row, used, column = (m.scalar(a) for a in (row, used, column))
        bf16, pieces = ir.BF16Type.get(), columns // 8  # of 16 bytes
        for start in range(0, x_rows * pieces, 128):
            piece = m.add(m.thread(), start)
            i, piece = arith.divui(piece, m.as_int(pieces)), arith.remui(piece, m.as_int(pieces))
            with mgpu.utils.when(m.less(i, used)):
                source = m.add(row, i)
                if gather:
                    source = llvm.load(m.i32(), m.at(token, source, m.i32()), alignment=4)
                index = arith.addi(arith.muli(m.wide(source), m.wide(width)), m.wide(m.add(column, m.shift(piece, 3))))
                place = m.shift(arith.xori(piece, m.both(i, 7)), 3)
                mgpu.utils.inline_ptx(
                    "cp.async.cg.shared.global [$0], [$1], 16;",
                    m.at(to, m.add(m.multiply(i, columns), place), bf16),
                    m.at(x, index, bf16),
                )
        mgpu.utils.inline_ptx("cp.async.commit_group;")
        return ()

    return run


def await_rows(later: int) -> None:
    """Wait until all but the last `later` calls of `load_rows` have copied what this thread asked for."""

    @plgpu.inline_mgpu(arg_types=(), return_type=())
    def run(_: Any) -> tuple[()]:
        mgpu.utils.inline_ptx(f"cp.async.wait_group {later};")
        return ()

    run()  # pyright: ignore[reportCallIssue]  jax passes the first argument


def store_hidden(width: int) -> Callable:
    """silu(gate) * up of an accumulator whose rows g are gate and g + 8 up, into `used` rows from `row` on of hidden [., width],
    bfloat16.

    As f(acc, hidden, row, used, block, gate scale, up scale), `block` of 64 packed rows being half of 64 channels
    (`pack._interleave`).
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _REF, *[SCALAR] * 5), return_type=())
    def run(_: Any, acc: Any, hidden: Value, row: Any, used: Any, block: Any, gate_scale: Any, up_scale: Any) -> tuple[()]:
        row, used, block, gate_scale, up_scale = (m.scalar(a) for a in (row, used, block, gate_scale, up_scale))

        def value(gate: Value, up: Value, _: Value) -> Value:
            return swiglu(arith.mulf(gate, gate_scale), arith.mulf(up, up_scale))

        _store_channels(acc, hidden, width, row, used, block, value)
        return ()

    return run


def store_shared_hidden(width: int, shared: int) -> Callable:
    """The same for `shared` experts side by side, as f(acc, hidden, row, used, block, weights): a token's hidden values are
    multiplied with its weight [T, shared] for the expert that they belong to.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _REF, *[SCALAR] * 3, _REF), return_type=())
    def run(_: Any, acc: Any, hidden: Value, row: Any, used: Any, block: Any, weights: Value) -> tuple[()]:
        row, used, block = (m.scalar(a) for a in (row, used, block))
        weights, expert = mgpu.utils.memref_ptr(weights), arith.divui(block, m.as_int(width // shared // 32))

        def value(gate: Value, up: Value, token: Value) -> Value:
            weight = m.load(weights, m.add(m.multiply(token, shared), expert), m.f32())
            return arith.mulf(swiglu(gate, up), weight)

        _store_channels(acc, hidden, width, row, used, block, value)
        return ()

    return run


def _store_channels(
    acc: mgpu.FragmentedArray, hidden: Value, width: int, row: Value, used: Value, block: Value, value: Callable
) -> None:
    """value(gate, up, row of hidden) for each of the accumulator's channels and rows."""
    hidden, bf16 = mgpu.utils.memref_ptr(hidden), ir.BF16Type.get()
    w, g, c = m.lane()
    channel = m.add(m.shift(m.shift(block, -1), 6), m.shift(m.shift(g, -1), 4), m.shift(m.both(block, 1), 3))
    channel = m.add(channel, m.shift(w, 1), m.both(g, 1))
    for n, i in itertools.product(range(acc.shape[1] // 8), (0, 1)):
        column, four = m.add(m.shift(c, 1), 8 * n + i), registers_of(acc)[n]
        with mgpu.utils.when(m.less(column, used)):
            target = m.add(row, column)
            index = arith.addi(arith.muli(m.wide(target), m.wide(width)), m.wide(channel))
            llvm.store(arith.truncf(bf16, value(four[i], four[2 + i], target)), m.at(hidden, index, bf16))


def swiglu(gate: Value, up: Value) -> Value:
    power = mgpu.utils.inline_ptx(
        "ex2.approx.ftz.f32 $0, $1;", arith.mulf(gate, m.as_float(-1.4426950408889634)), result_types=m.f32()
    )
    sigmoid = mgpu.utils.inline_ptx("rcp.approx.ftz.f32 $0, $1;", arith.addf(power, m.as_float(1.0)), result_types=m.f32())
    return arith.mulf(arith.mulf(gate, sigmoid), up)


def store_rows(width: int) -> Callable:
    """Write an accumulator times `scale` to y, as f(acc, y, row, used, column, scale): 64 columns of `used` rows of y [., width],
    float32.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _REF, *[SCALAR] * 4), return_type=())
    def run(_: Any, acc: Any, y: Value, row: Any, used: Any, column: Any, scale: Any) -> tuple[()]:
        row, used, column, scale = (m.scalar(a) for a in (row, used, column, scale))
        y = mgpu.utils.memref_ptr(y)
        w, g, c = m.lane()
        column = m.add(column, m.shift(w, 4), g)
        for n, i in itertools.product(range(acc.shape[1] // 8), (0, 1)):
            x_row, four = m.add(m.shift(c, 1), 8 * n + i), registers_of(acc)[n]
            with mgpu.utils.when(m.less(x_row, used)):
                index = arith.addi(arith.muli(m.wide(m.add(row, x_row)), m.wide(width)), m.wide(column))
                for h in (0, 1):
                    llvm.store(arith.mulf(four[2 * h + i], scale), m.at(y, arith.addi(index, m.wide(8 * h)), m.f32()))
        return ()

    return run


@plgpu.inline_mgpu(arg_types=(_REF, SCALAR), return_type=())
def announce(_: Any, counters: Value, index: Any) -> tuple[()]:
    """Add one to counters[index] once all that this warpgroup wrote can be seen by the whole GPU."""
    mgpu.utils.warpgroup_barrier()
    pointer = m.at(mgpu.utils.memref_ptr(counters), m.scalar(index), m.i32())
    mgpu.utils.SemaphoreRef(pointer).signal(1, memory_scope="gpu")
    return ()


@plgpu.inline_mgpu(arg_types=(_REF, SCALAR, SCALAR), return_type=())
def await_count(_: Any, counters: Value, index: Any, count: Any) -> tuple[()]:
    """Wait until counters[index] is at least `count`; what was announced before can then be read."""
    pointer = m.at(mgpu.utils.memref_ptr(counters), m.scalar(index), m.i32())
    mgpu.utils.SemaphoreRef(pointer).wait(m.scalar(count), decrement=False, memory_scope="gpu")
    return ()


def _arrive(pointer: Value, count: Value) -> Value:
    """Add one; whether that made `count`, for all threads alike. The last to arrive sees what all the others wrote."""
    mgpu.utils.warpgroup_barrier()
    i1 = ir.IntegerType.get_signless(1)
    branch = scf.IfOp(m.equal(m.thread(), 0), [i1], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        before = mgpu.utils.inline_ptx(
            "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;", pointer, result_types=m.i32(), has_side_effects=True
        )
        scf.yield_([m.equal(m.add(before, 1), count)])
    assert branch.else_block is not None  # has_else
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([arith.constant(i1, 0)])
    return mgpu.utils.inline_ptx(
        "bar.red.or.pred $0, $1, 128, $2;",
        mgpu.utils.warpgroup_barrier_idx(sync=False),
        branch.results[0],
        result_types=i1,
        has_side_effects=True,
    )


def combine(plan: Plan) -> Callable:
    """Count this warpgroup's arrival at 64 columns, and weigh and add their rows if it is the last of all slots.

    As f(counters, column, count of routed slots, y, place, weights, out): out[t, column + i] = sum_a weights[t, a] *
    y[place[t, a], column + i] in the order of a, whoever comes last, and then the row of the shared experts; a negative place
    contributes nothing.
    """
    slots = plan.slots + plan.shared_slots

    @plgpu.inline_mgpu(arg_types=(_REF, SCALAR, SCALAR, _REF, _REF, _REF, _REF), return_type=())
    def run(_: Any, counters: Value, column: Any, count: Any, y: Value, place: Value, weights: Value, out: Value) -> tuple[()]:
        counters, column = mgpu.utils.memref_ptr(counters), m.scalar(column)
        count = m.add(m.scalar(count), plan.shared_slots)
        with mgpu.utils.when(_arrive(m.at(counters, m.add(m.shift(column, -6), slots), m.i32()), count)):
            _weigh(plan, column, y, place, weights, out)
        return ()

    return run


def combine_nothing(plan: Plan) -> Callable:
    """`combine` where no row exists to wait for, as f(column, y, place, weights, out): zeros."""

    @plgpu.inline_mgpu(arg_types=(SCALAR, _REF, _REF, _REF, _REF), return_type=())
    def run(_: Any, column: Any, y: Value, place: Value, weights: Value, out: Value) -> tuple[()]:
        _weigh(plan, m.scalar(column), y, place, weights, out)
        return ()

    return run


def _weigh(plan: Plan, column: Value, *refs: Value) -> None:
    """Sixteen threads take four columns each of a token, eight tokens at a time."""
    y, place, weights, out = (mgpu.utils.memref_ptr(ref) for ref in refs)
    tokens, choices, width = plan.tokens, plan.choices, plan.width
    column = m.add(column, m.shift(m.both(m.thread(), 15), 2))
    bound = arith.constant(m.i32(), -(-tokens // 8))

    def four_of(row: Value) -> Any:
        # Other processors wrote these, so they are read past this one's own cache; all choices before the first is used.
        index = arith.addi(arith.muli(m.wide(row), m.wide(width)), m.wide(column))
        return mgpu.utils.inline_ptx(
            "ld.global.cg.v4.f32 {$0,$1,$2,$3}, [$4];",
            m.at(y, index, m.f32()),
            result_types=[m.f32()] * 4,
            has_side_effects=True,
        )

    @mgpu.utils.fori(bound, [])
    def _(step: Value, _carry: list) -> list:
        token = m.add(m.shift(step, 3), m.shift(m.thread(), -4))
        with mgpu.utils.when(m.less(token, tokens)):
            total = [m.as_float(0.0)] * 4
            rows = []
            for a in range(choices):
                at = m.add(m.multiply(token, choices), a)
                row, weight = m.load(place, at, m.i32()), m.load(weights, at, m.f32())
                there = arith.cmpi(arith.CmpIPredicate.sge, row, m.as_int(0))
                rows.append((there, weight, four_of(arith.maxsi(row, m.as_int(0)))))
            rest = four_of(m.add(token, plan.pairs)) if plan.shared else None
            for there, weight, values in rows:
                for i, value in enumerate(values):
                    # A select, not a product with zero: a row that is not there may hold anything.
                    total[i] = arith.addf(total[i], arith.select(there, arith.mulf(weight, value), m.as_float(0.0)))
            if rest is not None:
                total = [arith.addf(a, b) for a, b in zip(total, rest, strict=True)]
            bf16 = ir.BF16Type.get()
            stored = vector.from_elements(ir.VectorType.get((4,), bf16), [arith.truncf(bf16, t) for t in total])
            index = arith.addi(arith.muli(m.wide(token), m.wide(width)), m.wide(column))
            llvm.store(stored, m.at(out, index, bf16), alignment=8)
        return []
