"""Shorthand for the compiler's integer arithmetic, for what kernels do thread by thread; an operand may be a Python int."""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

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


def differ(a: Operand, b: Operand) -> Value:
    """The bits in which a and b differ."""
    return arith.xori(as_int(a), as_int(b))


def greater(a: Operand, b: Operand) -> Value:
    """The larger of two signed numbers."""
    return arith.maxsi(as_int(a), as_int(b))


def permute(word: Value, selector: int) -> Value:
    """A word of these bytes of `word`, the lowest in the lowest four bits of `selector`; 4: zero."""
    return mgpu.utils.inline_ptx(f"prmt.b32 $0, $1, $2, {selector:#x};", word, as_int(0), result_types=i32())


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


def block_thread() -> Value:
    """This thread among all of its block."""
    return mgpu.utils.thread_idx()


def divide(a: Operand, b: int) -> Value:
    """The unsigned quotient."""
    return arith.divui(as_int(a), as_int(b))


def remainder(a: Operand, b: int) -> Value:
    """The unsigned remainder."""
    return arith.remui(as_int(a), as_int(b))


def row_start(row: Operand, size: int, offset: Operand) -> Value:
    """row * size + offset in 64 bits, for arrays of any size."""
    long = ir.IntegerType.get_signless(64)
    return arith.addi(arith.muli(wide(row), arith.constant(long, size)), wide(offset))


def plus(a: Value, b: Value) -> Value:
    """a + b of floats."""
    return arith.addf(a, b)


def times(a: Value, b: Value) -> Value:
    """a * b of floats."""
    return arith.mulf(a, b)


def quotient(a: Value, b: Value) -> Value:
    """a / b of floats, rounded to the nearest."""
    return mgpu.utils.inline_ptx("div.rn.f32 $0, $1, $2;", a, b, result_types=f32())


def times_pairs(a: Operand, b: Operand) -> Value:
    """The products of two pairs of bfloat16."""
    return mgpu.utils.inline_ptx("mul.rn.bf16x2 $0, $1, $2;", as_int(a), as_int(b), result_types=i32())


def bits(value: Value) -> Value:
    """Of a float."""
    return arith.bitcast(i32(), value)


def from_bits(word: Operand) -> Value:
    """The float of these bits."""
    return arith.bitcast(f32(), as_int(word))


def pack_codes(values: list[Value]) -> Value:
    """Four floats rounded to e4m3 in a word, the first in the lowest byte; what is beyond the largest becomes it."""
    convert = "cvt.rn.satfinite.e4m3x2.f32"
    return mgpu.utils.inline_ptx(
        f"{{ .reg .b16 low, high; {convert} low, $2, $1; {convert} high, $4, $3; mov.b32 $0, {{low, high}}; }}",
        *values,
        result_types=i32(),
    )


def load_float(pointer: Value, index: Operand) -> Value:
    """An element of float32."""
    return load(pointer, index, f32())


def words_at(pointer: Value, index: Operand, count: int) -> list[Value]:
    """Neighbouring words of 32 bits, four of a load."""
    if count <= 4:
        return vector_at(pointer, index, i32(), count)
    return [word for i in range(0, count, 4) for word in vector_at(pointer, add(index, i), i32(), 4)]


def store_words(pointer: Value, index: Operand, words: list[Value]) -> None:
    """Write neighbouring words of 32 bits at once."""
    store_vector(pointer, index, words, i32())


def unpack(word: Value) -> tuple[Value, Value]:
    """The two bfloat16 of a word, the lower half first, as float32."""
    return arith.bitcast(f32(), shift(word, 16)), arith.bitcast(f32(), both(word, 0xFFFF_0000))


def pack(lower: Value, upper: Value) -> Value:
    """Two float32 rounded to bfloat16 in a word."""
    return mgpu.utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", upper, lower, result_types=i32())


def rsqrt(value: Value) -> Value:
    """1 / sqrt(value), to 2^-22."""
    return mgpu.utils.inline_ptx("rsqrt.approx.ftz.f32 $0, $1;", value, result_types=f32())


def warp_sum(value: Value) -> Value:
    """The sum of a float of every thread of the warp, the same bits for all."""
    for distance in (16, 8, 4, 2, 1):
        value = arith.addf(value, mgpu.utils.shfl_bfly(value, distance))
    return value


def warp_greatest(value: Value) -> Value:
    """The largest signed number of every thread of the warp."""
    for distance in (16, 8, 4, 2, 1):
        value = arith.maxsi(value, mgpu.utils.shfl_bfly(value, distance))
    return value


def block_barrier() -> None:
    """Wait for all threads of the block, and see what they wrote."""
    gpu.barrier()


when = mgpu.utils.when  # a context in which code runs for the threads whose condition holds
