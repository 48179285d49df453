"""The short convolution as a thread of a kernel does it: a few neighbouring channels of one row, two of a word of bfloat16.

Values are the compiler's; see ring.py for what is computed.
"""

from __future__ import annotations

import dataclasses

from inkling_jax.kernels import mlir as m
from inkling_jax.kernels.mlir import Value

KEPT = 3  # inputs in the ring; one tap more


@dataclasses.dataclass(frozen=True)
class Row:
    """A row's place, the same for all threads that ask."""

    slot: Value
    position: Value
    live: Value

    @classmethod
    def of(cls, token: Value, p: dict[str, Value]) -> Row:
        """That of a token, from pointers to the fields of `ring.Rows`."""
        slot, position, count = (m.load(p[name], token, m.i32()) for name in ("slot", "position", "count"))
        return cls(slot, position, m.less(0, count))

    def state_row(self, back: int) -> Value:
        """Where in [slots * KEPT] the input `back` positions ago lies; 0: where that of now goes, in place of the oldest."""
        place = m.remainder(m.add(self.position, (KEPT - back) % KEPT), KEPT)
        return m.add(m.multiply(self.slot, KEPT), place)


def past(row: Row, state: Value, size: int, offset: Value, count: int) -> list[list[Value]]:
    """`count` words of the inputs 1, 2 and 3 positions back from word `offset` on, zero before the first position.

    size: words of one input.
    """
    found = []
    for back in range(1, KEPT + 1):
        words = m.words_at(state, m.row_start(row.state_row(back), size, offset), count)
        there = m.less(back - 1, row.position)
        found.append([m.choose(there, word, 0) for word in words])
    return found


def convolve(x: list[Value], taps: list[Value], earlier: list[list[Value]]) -> list[Value]:
    """The words of x after the convolution. taps: two words for each channel, that of the oldest input first."""
    result = []
    for i, word in enumerate(x):
        inputs = [m.unpack(w) for w in (word, *(words[i] for words in earlier))]
        sums = []
        for half in (0, 1):
            channel = 2 * i + half
            weights = [w for pair in taps[2 * channel : 2 * channel + 2] for w in m.unpack(pair)]
            total = m.plus(inputs[0][half], m.times(weights[KEPT], inputs[0][half]))
            for back in range(1, KEPT + 1):
                total = m.plus(total, m.times(weights[KEPT - back], inputs[back][half]))
            sums.append(total)
        result.append(m.pack(*sums))
    return result
