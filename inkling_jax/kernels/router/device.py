"""What a warpgroup does in the router's kernel, thread by thread. Values are the compiler's; pointers are to the GPU's memory
unless they are said to be shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, nvvm

from inkling_jax.kernels import mlir as m
from inkling_jax.kernels.mlir import Value

TILE = 16  # rows of weights that a warpgroup multiplies
WARPS = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """`splits`: how many parts the width is cut into, each with a program for every TILE rows; 0 where logits are given."""

    tokens: int
    width: int
    experts: int
    shared: int
    chosen: int
    splits: int
    route_scale: float

    @property
    def rows(self) -> int:
        return self.experts + self.shared

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE)

    @property
    def programs(self) -> int:
        """Of the launch. Those that make logits wait for one another, so all must be on the GPU at once; others need not."""
        return self.tiles * self.splits if self.splits else -(-self.tokens // WARPS)

    @property
    def workers(self) -> int:
        """Programs that choose."""
        return min(self.tokens, self.programs)


def multiply(shape: Shape, program: Value, x: Value, weight: Value, partial: Value, sums: Value) -> None:
    """This program's rows times its part of the columns: partial[split, token, row]; `sums` is shared.

    Lanes 4g + c take eight neighbouring columns each, the same of weights and x, so that every load is of 16 bytes: the order in
    which columns are summed is free.
    """
    split, tile = (f(program, m.as_int(shape.tiles)) for f in (arith.divui, arith.remui))
    warp, g, c = m.lane()
    columns = shape.width // (shape.splits * WARPS)
    words = shape.width // 2
    start = m.add(m.multiply(m.add(m.multiply(split, WARPS), warp), columns // 2), m.shift(c, 2))
    row = [m.add(m.multiply(tile, TILE), g, 8 * h) for h in (0, 1)]
    source = [m.add(m.multiply(arith.minsi(r, m.as_int(shape.rows - 1)), words), start) for r in row]
    steps = columns // 32
    weights = [[m.vector_at(weight, m.add(s, 16 * k), m.i32(), 4) for s in source] for k in range(steps)]
    groups = -(-shape.tokens // 8)
    for n in range(groups):
        token = arith.minsi(m.add(g, 8 * n), m.as_int(shape.tokens - 1))
        base = m.add(m.multiply(token, words), start)
        rows = [m.vector_at(x, m.add(base, 16 * k), m.i32(), 4) for k in range(steps)]
        acc = [m.as_float(0.0)] * 4
        for (upper, lower), eight in zip(weights, rows, strict=True):
            for i in (0, 2):
                acc = m.multiply_add([upper[i], lower[i], upper[i + 1], lower[i + 1]], eight[i : i + 2], acc)
        place = m.add(m.multiply(warp, groups * 128), m.shift(m.both(m.thread(), 31), 2), n * 128)
        m.store_vector(sums, place, acc, m.f32())
    mgpu.utils.warpgroup_barrier()
    for first in range(0, groups * 8 * TILE, 128):
        item = m.add(m.thread(), first)
        token, r = m.shift(item, -4), m.both(item, TILE - 1)
        within = m.add(m.shift(m.both(r, 7), 4), m.shift(m.shift(m.both(token, 7), -1), 2))
        within = m.add(within, m.shift(m.shift(r, -3), 1), m.both(token, 1), m.multiply(m.shift(token, -3), 128))
        total = m.load(sums, within, m.f32())
        for other in range(1, WARPS):
            total = arith.addf(total, m.load(sums, m.add(within, other * groups * 128), m.f32()))
        target = m.add(m.multiply(tile, TILE), r)
        with mgpu.utils.when(arith.andi(m.less(token, shape.tokens), m.less(target, shape.rows))):
            at = m.add(m.multiply(m.add(m.multiply(split, shape.tokens), token), shape.rows), target)
            m.store(partial, at, total)


def arrive(counter: Value, amount: int, mailbox: Value) -> Value:
    """Add to a counter of the whole GPU for this warpgroup; what it held before, for all threads. `mailbox` is a shared word.

    What this warpgroup wrote before is seen by whoever sees its arrival, and what others wrote before theirs by this one.
    """
    mgpu.utils.warpgroup_barrier()
    with mgpu.utils.when(m.equal(m.thread(), 0)):
        before = mgpu.utils.inline_ptx(
            "atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;",
            counter,
            m.as_int(amount),
            result_types=m.i32(),
            has_side_effects=True,
        )
        m.store(mailbox, 0, before)
    mgpu.utils.warpgroup_barrier()
    return m.load(mailbox, 0, m.i32())


def choose(
    shape: Shape, worker: Value, logits: Value, bias: Value, scale: Value, store: Callable[[Value, list, list], None]
) -> None:
    """Route the tokens of one of the workers, a warp each: store(token, experts, weights) by one lane of it.

    `logits` are [token, row], or [split, token, row] to be added in the order of splits.
    """
    stride = shape.workers * WARPS
    bound = arith.constant(m.i32(), -(-shape.tokens // stride))

    @mgpu.utils.fori(bound, [])
    def _(step: Value, _carry: list) -> list:
        warp = m.shift(m.thread(), -5)
        token = m.add(m.multiply(m.add(m.multiply(step, WARPS), warp), shape.workers), worker)
        with mgpu.utils.when(m.less(token, shape.tokens)):
            _route_token(shape, token, logits, bias, scale, store)
        return []


def _route_token(shape: Shape, token: Value, logits: Value, bias: Value, scale: Value, store: Callable) -> None:
    lane = m.both(m.thread(), 31)
    rows = [m.add(lane, 32 * i) for i in range(-(-shape.rows // 32))]
    values = []
    for row in rows:
        total = None
        for split in range(max(1, shape.splits)):
            at = m.multiply(m.add(token, split * shape.tokens), shape.rows)
            part = _load_new(logits, m.add(at, arith.minsi(row, m.as_int(shape.rows - 1))))
            total = part if total is None else arith.addf(total, part)
        values.append(total)
    keys = []
    for row, value in zip(rows, values, strict=True):
        offset = m.load(bias, arith.minsi(row, m.as_int(shape.experts - 1)), m.f32())
        key = _ordered(arith.addf(_sigmoid(value), offset))
        keys.append(arith.select(m.less(row, shape.experts), key, m.as_int(0)))
    experts, joint = [], []
    for _ in range(shape.chosen):
        best, where = keys[0], rows[0]
        for key, row in zip(keys[1:], rows[1:], strict=True):
            better = arith.cmpi(arith.CmpIPredicate.ugt, key, best)
            best, where = arith.select(better, key, best), arith.select(better, row, where)
        top = _reduce(best, nvvm.ReductionKind.UMAX)
        candidate = arith.select(m.equal(best, top), where, m.as_int(0x7FFFFFFF))
        winner = _reduce(candidate, nvvm.ReductionKind.UMIN)
        experts.append(winner)
        joint.append(_value_of(winner, rows, values))
        keys = [arith.select(m.equal(row, winner), m.as_int(0), key) for row, key in zip(rows, keys, strict=True)]
    for j in range(shape.shared):
        joint.append(_value_of(m.as_int(shape.experts + j), rows, values))
    weights = _joint_weights(joint, arith.mulf(m.load(scale, 0, m.f32()), m.as_float(shape.route_scale)))
    with mgpu.utils.when(m.equal(lane, 0)):
        store(token, experts, weights)


def _joint_weights(logits: list[Value], scale: Value) -> list[Value]:
    """sigmoid / sum of sigmoids * scale. sigmoid(a) is exp(min(a, 0)) / (1 + exp(-|a|)), and the largest exponent cancels."""
    zero = m.as_float(0.0)
    lows = [arith.minimumf(a, zero) for a in logits]
    top = lows[0]
    for low in lows[1:]:
        top = arith.maximumf(top, low)
    parts = []
    for a, low in zip(logits, lows, strict=True):
        distance = arith.subf(low, arith.maximumf(a, zero))  # -|a|
        parts.append(arith.divf(_exp(arith.subf(low, top)), arith.addf(m.as_float(1.0), _exp(distance))))
    total = parts[0]
    for part in parts[1:]:
        total = arith.addf(total, part)
    return [arith.mulf(arith.divf(part, total), scale) for part in parts]


def _exp(value: Value) -> Value:
    power = arith.mulf(value, m.as_float(1.4426950408889634))
    return mgpu.utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", power, result_types=m.f32())


def _sigmoid(value: Value) -> Value:
    one = m.as_float(1.0)
    return arith.divf(one, arith.addf(one, _exp(arith.negf(value))))


def _ordered(value: Value) -> Value:
    """Unsigned integers in the order of floats; zero is below every number."""
    bits = arith.bitcast(m.i32(), value)
    sign = arith.shrsi(bits, m.as_int(31))
    return arith.xori(bits, m.either(sign, 0x80000000))


def _reduce(value: Value, kind: nvvm.ReductionKind) -> Value:
    return mgpu.utils.redux(value, m.as_int(0xFFFFFFFF), kind)


def _value_of(row: Value, rows: list[Value], values: list[Value]) -> Value:
    """The value that some lane holds for a row that all lanes name."""
    mine = values[0]
    for r, value in zip(rows[1:], values[1:], strict=True):
        mine = arith.select(m.equal(r, row), value, mine)
    # The other lanes' picks are not read: a row belongs to the lane of its last five bits.
    found = mgpu.utils.inline_ptx(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
        arith.bitcast(m.i32(), mine),
        m.both(row, 31),
        result_types=m.i32(),
        has_side_effects=True,
        convergent=True,
    )
    return arith.bitcast(m.f32(), found)


def _load_new(pointer: Value, index: Value) -> Value:
    """A float that another processor may have written during this launch: read past this one's own cache."""
    return mgpu.utils.inline_ptx(
        "ld.global.cg.f32 $0, [$1];", m.at(pointer, m.wide(index), m.f32()), result_types=m.f32(), has_side_effects=True
    )
