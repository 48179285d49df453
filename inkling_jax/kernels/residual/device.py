"""What a block does in the kernel of the residual stream: one token, each thread eight neighbouring channels at a time.

Values are the compiler's; pointers are to the GPU's memory unless they are said to be shared.
"""

from __future__ import annotations

import dataclasses

from inkling_jax.kernels import mlir as m
from inkling_jax.kernels import ring_device as ring
from inkling_jax.kernels.mlir import Value

CHANNELS = 8  # of a thread: 16 bytes, the most that a load takes
WORDS = CHANNELS // 2
MOST_WARPGROUPS = 6  # so that a thread has 80 registers, which hold all that it loads


@dataclasses.dataclass(frozen=True)
class Shape:
    """`width` is a multiple of CHANNELS."""

    tokens: int
    width: int
    eps: float

    @property
    def warpgroups(self) -> int:
        """Of a block: enough for all channels at once, where that many can be."""
        return min(MOST_WARPGROUPS, -(-self.width // (128 * CHANNELS)))

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def chunks(self) -> int:
        """How often a thread takes channels."""
        return -(-self.width // (self.threads * CHANNELS))


def add_conv_norm(shape: Shape, token: Value, p: dict[str, Value]) -> None:
    """See `reference.add_conv_norm`, of one token; p["sums"] is shared.

    A thread reads and writes its own channels of the state, so that no one waits before the ring's oldest input is replaced.
    """
    me, size, pieces = m.block_thread(), shape.width // 2, shape.width // CHANNELS
    # All loads that do not depend on where the row is come first: one wait on memory covers them.
    chunks = []
    for i in range(shape.chunks):
        piece = m.add(me, i * shape.threads)
        inside = m.less(piece, pieces)
        word = m.multiply(m.choose(inside, piece, 0), WORDS)
        here = m.add(m.multiply(token, size), word)
        h, y = (m.words_at(p[name], here, WORDS) for name in ("h", "y"))
        taps = m.words_at(p["taps"], m.multiply(word, 4), 4 * WORDS)
        chunks.append((inside, word, here, h, y, taps, m.words_at(p["weight"], word, WORDS)))
    row = ring.Row.of(token, p)
    total, streams = m.as_float(0.0), []
    for inside, word, here, h, y, taps, _ in chunks:
        convolved = ring.convolve(y, taps, ring.past(row, p["state"], size, word, WORDS))
        with m.when(m.both(inside, row.live)):
            m.store_words(p["state"], m.row_start(row.state_row(0), size, word), y)
        stream = [_sum(a, b) for a, b in zip(h, convolved, strict=True)]
        with m.when(inside):
            m.store_words(p["next_h"], here, stream)
        squares = m.as_float(0.0)
        for pair in map(m.unpack, stream):
            for value in pair:
                squares = m.plus(squares, m.times(value, value))
        total = m.plus(total, m.choose(inside, squares, m.as_float(0.0)))
        streams.append(stream)
    scale = _scale(shape, _block_sum(shape, me, total, p["sums"]))
    for (inside, _, here, *_, weight), stream in zip(chunks, streams, strict=True):
        normed = [normalize(a, scale, w) for a, w in zip(stream, weight, strict=True)]
        with m.when(inside):
            m.store_words(p["normed"], here, normed)


def normalize(word: Value, scale: Value, weight: Value) -> Value:
    """Two channels times `scale`, rounded, times their weights."""
    rounded = m.unpack(m.pack(*(m.times(value, scale) for value in m.unpack(word))))
    return m.pack(*(m.times(value, w) for value, w in zip(rounded, m.unpack(weight), strict=True)))


def _sum(a: Value, b: Value) -> Value:
    return m.pack(*(m.plus(x, y) for x, y in zip(m.unpack(a), m.unpack(b), strict=True)))


def _scale(shape: Shape, squares: Value) -> Value:
    return m.rsqrt(m.plus(m.times(squares, m.as_float(1 / shape.width)), m.as_float(shape.eps)))


def _block_sum(shape: Shape, me: Value, value: Value, sums: Value) -> Value:
    """The sum of every thread's value, the same bits for all."""
    value = m.warp_sum(value)
    with m.when(m.equal(m.both(me, 31), 0)):
        m.store(sums, m.shift(me, -5), value)
    m.block_barrier()
    total = m.as_float(0.0)
    for warp in range(shape.warps):
        total = m.plus(total, m.load_float(sums, warp))
    return total
