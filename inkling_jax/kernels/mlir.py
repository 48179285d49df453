"""Shorthand for the compiler's integer arithmetic, for what kernels do thread by thread; an operand may be a Python int."""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

Value = Any  # an MLIR value
Operand = Any  # an MLIR i32 value or a Python int


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def f32() -> ir.Type:
    return ir.F32Type.get()


def as_int(value: Operand) -> Value:
    if not isinstance(value, int):
        return value
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), value - (1 << 32) if value >= 1 << 31 else value))


def as_float(value: float) -> Value:
    return arith.constant(f32(), ir.FloatAttr.get(f32(), value))


def add(*terms: Operand) -> Value:
    total = as_int(terms[0])
    for term in terms[1:]:
        total = arith.addi(total, as_int(term))
    return total


def subtract(a: Operand, b: Operand) -> Value:
    return arith.subi(as_int(a), as_int(b))


def choose(condition: Value, a: Operand, b: Operand) -> Value:
    return arith.select(condition, as_int(a), as_int(b))


def multiply(a: Operand, b: Operand) -> Value:
    return arith.muli(as_int(a), as_int(b))


def both(a: Operand, b: Operand) -> Value:
    return arith.andi(as_int(a), as_int(b))


def either(a: Operand, b: Operand) -> Value:
    return arith.ori(as_int(a), as_int(b))


def shift(a: Operand, left: int) -> Value:
    """a << left, or the unsigned a >> -left."""
    if left == 0:
        return as_int(a)
    return arith.shli(as_int(a), as_int(left)) if left > 0 else arith.shrui(as_int(a), as_int(-left))


def less(a: Operand, b: Operand) -> Value:
    """Whether a < b, both signed."""
    return arith.cmpi(arith.CmpIPredicate.slt, as_int(a), as_int(b))


def equal(a: Operand, b: Operand) -> Value:
    return arith.cmpi(arith.CmpIPredicate.eq, as_int(a), as_int(b))


def thread() -> Value:
    """This thread among the 128 of its warpgroup."""
    return both(mgpu.utils.thread_idx(), 127)


def lane() -> tuple[Value, Value, Value]:
    """w, g and c of this thread."""
    me = thread()
    return shift(me, -5), both(shift(me, -2), 7), both(me, 3)


def at(pointer: Value, index: Operand, dtype: ir.Type) -> Value:
    """Address of an element; an index that may pass 2**31 must be of 64 bits."""
    return mgpu.utils.getelementptr(pointer, [index if isinstance(index, int) else as_int(index)], dtype)


def wide(index: Operand) -> Value:
    """A non-negative index in 64 bits."""
    return arith.extui(ir.IntegerType.get_signless(64), as_int(index))


def vector_at(pointer: Value, index: Operand, dtype: ir.Type, length: int) -> list[Value]:
    """Elements index .. index + length - 1, read at once."""
    loaded = llvm.load(ir.VectorType.get((length,), dtype), at(pointer, index, dtype), alignment=4 * length)
    return [vector.extract(loaded, [], [i]) for i in range(length)]


def load(pointer: Value, index: Operand, dtype: ir.Type) -> Value:
    """An element of 4 bytes."""
    return llvm.load(dtype, at(pointer, index, dtype), alignment=4)


def store(pointer: Value, index: Operand, value: Value) -> None:
    """Write an element of 4 bytes."""
    llvm.store(value, at(pointer, index, value.type), alignment=4)


def store_vector(pointer: Value, index: Operand, values: list[Value], dtype: ir.Type) -> None:
    """Write elements of 4 bytes at once."""
    vector_type = ir.VectorType.get((len(values),), dtype)
    llvm.store(vector.from_elements(vector_type, values), at(pointer, index, dtype), alignment=4 * len(values))


def scalar(array: mgpu.FragmentedArray) -> Value:
    """The one register of a number that all threads share."""
    return array.registers.item()


def multiply_add(weights: list[Value], x: list[Value], acc: list[Value]) -> list[Value]:
    """mma.m16n8k16: four registers of bfloat16 pairs by two, added to four of float32."""
    return list(
        mgpu.utils.inline_ptx(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            *weights,
            *x,
            *acc,
            result_types=[f32()] * 4,
        )
    )
