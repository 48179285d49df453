"""What a warp does in the kernel that appends keys and values: one head's vector of one token.

Values are the compiler's; pointers are to the GPU's memory.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from inkling_jax.kernels import mlir as m
from inkling_jax.kernels import ring_device as ring
from inkling_jax.kernels.mlir import Value
from inkling_jax.kernels.pages import LEAST_AMAX, PER_AMAX
from inkling_jax.kernels.residual.device import normalize

WARPS = 4  # of a program
FP8_WIDTH = 128  # of a head, where pages are fp8: a lane makes a word of codes
LEAST_BITS = int(np.float32(LEAST_AMAX).view(np.int32))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of `share` queries of `width` channels and their `rank` coefficients a key head; `pages` of `page` tokens."""

    tokens: int
    kv_heads: int
    share: int
    width: int
    rank: int
    pages: int
    page: int
    columns: int  # of the page table
    scaled: bool
    eps: float
    fp8: bool = False  # pages are

    @property
    def lines(self) -> int:
        """Work of a key head: its queries, key, value, and all coefficients, in the order in which they lie."""
        return self.share + 3

    @property
    def warps(self) -> int:
        return self.tokens * self.kv_heads * self.lines

    @property
    def programs(self) -> int:
        return -(-self.warps // WARPS)

    @property
    def group(self) -> int:
        """Words of a key head's projections."""
        return ((self.share + 2) * self.width + self.share * self.rank) // 2


@dataclasses.dataclass(frozen=True)
class Line:
    """The work of one warp, and of one of its lanes: `count` words of a head's vector, from `first` on."""

    token: Value
    head: Value  # of the keys
    index: Value  # of token and head
    number: Value  # among the lines of the head
    lane: Value
    first: Value
    count: int
    source: Value  # where the lane's words are projected


def append(shape: Shape, program: Value, p: dict[str, Value]) -> None:
    """See `reference.append`: the lines of one program."""
    me = m.thread()
    item = m.add(m.multiply(program, WARPS), m.shift(me, -5))
    index, number, lane = m.divide(item, shape.lines), m.remainder(item, shape.lines), m.both(me, 31)
    count = shape.width // 64
    first = m.multiply(lane, count)
    source = m.add(m.multiply(index, shape.group), m.multiply(number, shape.width // 2), first)
    token, head = m.divide(index, shape.kv_heads), m.remainder(index, shape.kv_heads)
    line = Line(token, head, index, number, lane, first, count, source)
    with m.when(m.less(item, shape.warps)):
        with m.when(m.less(number, shape.share)):
            _query(shape, line, p)
        with m.when(m.equal(number, shape.share)):
            _remember(shape, line, p, "k")
        with m.when(m.equal(number, shape.share + 1)):
            _remember(shape, line, p, "v")
        with m.when(m.equal(number, shape.share + 2)):
            _coefficients(shape, line, p)


def _query(shape: Shape, line: Line, p: dict[str, Value]) -> None:
    words, weight = (m.words_at(p[name], at, line.count) for name, at in (("projected", line.source), ("q_norm", line.first)))
    words = _scaled(shape, line, _norm(shape, words, weight), p)
    row = m.add(m.multiply(line.index, shape.share), line.number)
    m.store_words(p["q"], m.add(m.multiply(row, shape.width // 2), line.first), words)


def _coefficients(shape: Shape, line: Line, p: dict[str, Value]) -> None:
    """A word a lane and turn; lanes of `Line` are not those of a vector here."""
    size = shape.share * shape.rank // 2
    source = m.subtract(line.source, line.first)
    for begin in range(0, size, 32):
        word = m.add(line.lane, begin)
        with m.when(m.less(word, size)):
            words = _scaled(shape, line, m.words_at(p["projected"], m.add(source, word), 1), p)
            m.store_words(p["rel"], m.add(m.multiply(line.index, size), word), words)


def _remember(shape: Shape, line: Line, p: dict[str, Value], which: str) -> None:
    """Keys or values: convolved, keys normed, and written into their page."""
    words = m.words_at(p["projected"], line.source, line.count)
    channel = m.add(m.multiply(line.head, shape.width), m.multiply(line.first, 2))
    taps = m.words_at(p[f"{which}_taps"], m.multiply(channel, 2), 4 * line.count)
    weight = m.words_at(p["k_norm"], line.first, line.count) if which == "k" else None
    row = ring.Row.of(line.token, p)
    size = shape.kv_heads * shape.width // 2
    offset = m.add(m.multiply(line.head, shape.width // 2), line.first)
    state = p[f"{which}_state"]
    new = ring.convolve(words, taps, ring.past(row, state, size, offset, line.count))
    if weight is not None:
        new = _norm(shape, new, weight)
    codes, scale = _quantized(new) if shape.fp8 else (None, None)  # here, where the warp is whole
    column = m.remainder(m.divide(row.position, shape.page), shape.columns)
    page = m.load(p["table"], m.add(m.multiply(line.token, shape.columns), column), m.i32())
    with m.when(row.live):
        m.store_words(state, m.row_start(row.state_row(0), size, offset), words)
        with m.when(m.less(page, shape.pages)):
            place = m.add(
                m.multiply(m.add(m.multiply(page, shape.kv_heads), line.head), shape.page), m.remainder(row.position, shape.page)
            )
            if shape.fp8:
                m.store_words(p[f"{which}_pages"], m.row_start(place, shape.width // 4, line.lane), [codes])
                with m.when(m.equal(line.lane, 0)):
                    m.store_words(p[f"{which}_scale"], place, [m.bits(scale)])
            else:
                m.store_words(p[f"{which}_pages"], m.row_start(place, shape.width // 2, line.first), new)


def _quantized(words: list[Value]) -> tuple[Value, Value]:
    """A lane's four numbers as a word of e4m3 codes, and the scale of the warp's vector: see `pages.quantize`."""
    amax = m.as_int(LEAST_BITS)  # numbers without their sign are in the order of their bits, what is not finite last
    for word in words:
        amax = m.greater(amax, m.greater(m.both(m.shift(word, 16), 0x7FFF_0000), m.both(word, 0x7FFF_0000)))
    amax = m.warp_greatest(amax)
    scale = m.times(m.from_bits(amax), m.as_float(PER_AMAX))
    scale = m.from_bits(m.choose(m.less(amax, 0x7F80_0000), m.bits(scale), 0x7FC0_0000))
    return m.pack_codes([m.quotient(value, scale) for word in words for value in m.unpack(word)]), scale


def _norm(shape: Shape, words: list[Value], weights: list[Value]) -> list[Value]:
    squares = m.as_float(0.0)
    for pair in map(m.unpack, words):
        for value in pair:
            squares = m.plus(squares, m.times(value, value))
    mean = m.times(m.warp_sum(squares), m.as_float(1 / shape.width))
    scale = m.rsqrt(m.plus(mean, m.as_float(shape.eps)))
    return [normalize(word, scale, weight) for word, weight in zip(words, weights, strict=True)]


def _scaled(shape: Shape, line: Line, words: list[Value], p: dict[str, Value]) -> list[Value]:
    """The words times the token's tau, where there is one."""
    if not shape.scaled:
        return words
    tau = m.load_float(p["tau"], line.token)
    return [m.pack(*(m.times(value, tau) for value in m.unpack(word))) for word in words]
