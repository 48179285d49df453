"""Kernels that are written thread by thread (`kernels.mlir`), run by numpy: all threads of a block in step, block after block.

It finds wrong indices, masks and arithmetic, not a missing barrier. Memory is words of 32 bits; reading or writing outside of it
is an error, and so are two threads that write one word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

Value = Any  # an array of a value a thread, or a number that all threads share


def memory(array: Any) -> np.ndarray:
    """A copy of an array as the words that a kernel sees."""
    return np.array(array).view(np.int32).reshape(-1)


def run(kernel: Callable[[Any, dict[str, np.ndarray]], None], memories: dict[str, np.ndarray], blocks: int) -> None:
    """Call kernel(block's index, memories), which uses a `Threads` in place of `kernels.mlir`, for every block."""
    for block in range(blocks):
        with np.errstate(invalid="ignore", over="ignore"):
            kernel(np.int32(block), memories)


class Threads:
    """What `kernels.mlir` offers, for the threads of a block."""

    def __init__(self, count: int):
        self.threads = np.arange(count, dtype=np.int32)
        self.active = np.ones(count, bool)

    def block_thread(self) -> Value:
        return self.threads

    def thread(self) -> Value:
        return self.threads & 127

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        before = self.active
        self.active = before & condition
        yield
        self.active = before

    def i32(self) -> type:
        return np.int32

    def as_float(self, value: float) -> Value:
        return np.float32(value)

    def add(self, *terms: Value) -> Value:
        return sum(terms[1:], np.asarray(terms[0], np.int32)).astype(np.int32)

    def subtract(self, a: Value, b: Value) -> Value:
        return np.int32(a) - np.int32(b)

    def multiply(self, a: Value, b: Value) -> Value:
        return np.int32(a) * np.int32(b)

    def divide(self, a: Value, b: int) -> Value:
        return (np.uint32(a) // np.uint32(b)).astype(np.int32)

    def remainder(self, a: Value, b: int) -> Value:
        return (np.uint32(a) % np.uint32(b)).astype(np.int32)

    def shift(self, a: Value, left: int) -> Value:
        words = np.asarray(a, np.int32).view(np.uint32)
        return (words << left if left >= 0 else words >> -left).view(np.int32)

    def as_int(self, value: Value) -> Value:
        return np.uint32(value).view(np.int32) if isinstance(value, int) else value

    def both(self, a: Value, b: Value) -> Value:
        return self.as_int(a) & self.as_int(b)

    def either(self, a: Value, b: Value) -> Value:
        return self.as_int(a) | self.as_int(b)

    def differ(self, a: Value, b: Value) -> Value:
        return self.as_int(a) ^ self.as_int(b)

    def greater(self, a: Value, b: Value) -> Value:
        return np.maximum(self.as_int(a), self.as_int(b))

    def permute(self, word: Value, selector: int) -> Value:
        found = np.zeros(np.shape(word), np.uint32)
        for i, byte in enumerate(selector >> 4 * i & 0xF for i in range(4)):
            found |= (0 if byte == 4 else np.asarray(word).view(np.uint32) >> 8 * byte & 0xFF) << np.uint32(8 * i)
        return found.view(np.int32)

    def less(self, a: Value, b: Value) -> Value:
        return np.less(a, b)

    def equal(self, a: Value, b: Value) -> Value:
        return np.equal(a, b)

    def choose(self, condition: Value, a: Value, b: Value) -> Value:
        return np.where(condition, a, b).astype(np.asarray(a).dtype)

    def row_start(self, row: Value, size: int, offset: Value) -> Value:
        return np.int64(row) * size + offset

    def plus(self, a: Value, b: Value) -> Value:
        return a + b

    def times(self, a: Value, b: Value) -> Value:
        return a * b

    def quotient(self, a: Value, b: Value) -> Value:
        return a / b

    def times_pairs(self, a: Value, b: Value) -> Value:
        factors = zip(self.unpack(self.as_int(a)), self.unpack(self.as_int(b)), strict=True)
        return self.pack(*(x * y for x, y in factors))

    def bits(self, value: Value) -> Value:
        return np.asarray(value).view(np.int32)

    def from_bits(self, word: Value) -> Value:
        return np.asarray(word).view(np.float32)

    def pack_codes(self, values: list[Value]) -> Value:
        codes = [np.clip(a, -448, 448).astype(jnp.float8_e4m3fn).view(np.uint8).astype(np.uint32) for a in values]
        return (codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24).view(np.int32)

    def rsqrt(self, value: Value) -> Value:
        return 1 / np.sqrt(value)

    def unpack(self, word: Value) -> tuple[Value, Value]:
        words = np.asarray(word, np.int32).view(np.uint32)
        return (words << 16).view(np.float32), (words & np.uint32(0xFFFF_0000)).view(np.float32)

    def pack(self, lower: Value, upper: Value) -> Value:
        low, high = (np.asarray(a, jnp.bfloat16).view(np.uint16).astype(np.uint32) for a in (lower, upper))
        return (high << 16 | low).view(np.int32)

    def warp_sum(self, value: Value) -> Value:
        warps = self.active.reshape(-1, 32)
        assert (warps.all(axis=1) | ~warps.any(axis=1)).all(), "a warp must come whole"
        return np.repeat(value.reshape(-1, 32).sum(axis=1), 32)

    def warp_greatest(self, value: Value) -> Value:
        warps = self.active.reshape(-1, 32)
        assert (warps.all(axis=1) | ~warps.any(axis=1)).all(), "a warp must come whole"
        return np.repeat(np.broadcast_to(value, self.active.shape).reshape(-1, 32).max(axis=1), 32)

    def block_barrier(self) -> None:
        assert self.active.all(), "all threads must come"

    def words_at(self, pointer: np.ndarray, index: Value, count: int) -> list[Value]:
        first = self._inside(pointer, index, count)
        return [pointer[first + i] for i in range(count)]

    def load(self, pointer: np.ndarray, index: Value, dtype: type) -> Value:
        return self.words_at(pointer, index, 1)[0].view(dtype)

    def load_float(self, pointer: np.ndarray, index: Value) -> Value:
        return self.load(pointer, index, np.float32)

    def store_words(self, pointer: np.ndarray, index: Value, words: list[Value]) -> None:
        first = self._inside(pointer, index, len(words))[self.active]
        assert len(np.unique(first)) == len(first), "threads write the same words"
        for i, word in enumerate(words):
            pointer[first + i] = np.broadcast_to(word, self.active.shape)[self.active]

    def store(self, pointer: np.ndarray, index: Value, value: Value) -> None:
        self.store_words(pointer, index, [value.view(np.int32)])

    def _inside(self, pointer: np.ndarray, index: Value, count: int) -> np.ndarray:
        """The index of each thread; of those that do nothing, any that is inside."""
        first = np.where(self.active, index, 0)
        assert ((first >= 0) & (first + count <= pointer.size)).all(), (first.min(), first.max(), pointer.size)
        assert not (first % count if count < 4 else first % 4).any(), "not aligned"
        return first
