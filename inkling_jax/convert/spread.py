"""The parameters of a checkpoint as the ranks of a mesh hold them: key heads that several ranks share, padded vocabularies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from inkling_jax.convert.accounting import Content
from inkling_jax.convert.view import Box
from inkling_jax.convert.weight_map import WeightPlan

_BY_KEY_HEAD = ("attn.qkvr_proj", "attn.k_conv.weight", "attn.v_conv.weight")


def spread_plan(plan: WeightPlan, declared: Mapping[str, tuple[int, ...]]) -> WeightPlan:
    """`plan` for a model of the same checkpoint that config_ranks.spread made; `declared` are the shapes of its parameters."""
    changed = {
        path: dataclasses.replace(source, content=_spread(plan, path, source.content, shape))
        for path, shape in declared.items()
        if (source := plan.parameters.get(path)) is not None and source.shape != shape
    }
    return dataclasses.replace(plan, parameters=plan.parameters | changed)


def _spread(plan: WeightPlan, path: str, content: Content, shape: tuple[int, ...]) -> Content:
    if not path.endswith(_BY_KEY_HEAD):
        assert content.shape[1:] == shape[1:], (path, content.shape, shape)
        return Padded(content, shape)
    pieces: tuple[tuple[int, bool], ...] = ()
    if path.endswith("qkvr_proj"):
        stem = path.removesuffix("qkvr_proj")
        (width,), kv_heads = plan.parameters[stem + "q_norm.weight"].shape, content.shape[0]
        queries = plan.parameters[stem + "o_proj"].shape[1] // kv_heads
        pieces = (queries, True), (width, False), (width, False), (content.shape[1] - queries - 2 * width, True)
    return SharedHeads(content, shape, pieces)


@dataclasses.dataclass(frozen=True)
class Padded:
    """A parameter with rows of zeros after its last."""

    inner: Content
    shape: tuple[int, ...]

    @property
    def stored(self) -> np.dtype:
        """As of what is inside."""
        return self.inner.stored

    @property
    def order(self) -> tuple[int, ...]:
        """As of what is inside."""
        return self.inner.order

    @property
    def grain(self) -> tuple[int, ...]:
        """As of what is inside."""
        return self.inner.grain

    def read(self, box: Box, out: np.ndarray) -> None:
        """Fill `out` with the part `box`."""
        first, *rest = box
        stop = max(first.start, min(first.stop, self.inner.shape[0]))
        count = stop - first.start
        if count:
            self.inner.read((slice(first.start, stop), *rest), out[:count])
        out[count:] = 0


@dataclasses.dataclass(frozen=True)
class SharedHeads:
    """A parameter by key head, each head as often as ranks hold it, in their order.

    `pieces` are those of the second axis: the size of each, and whether the ranks of a head divide it between them (queries and
    their biases) or each has all of it (keys and values). Without pieces each has everything.
    """

    inner: Content
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, bool], ...] = ()

    @property
    def stored(self) -> np.dtype:
        """As of what is inside."""
        return self.inner.stored

    @property
    def order(self) -> tuple[int, ...]:
        """As of what is inside."""
        return self.inner.order

    @property
    def grain(self) -> tuple[int, ...]:
        """Heads and rows can be read alone; columns as of what is inside."""
        return 1, 1, *self.inner.grain[2:]

    def read(self, box: Box, out: np.ndarray) -> None:
        """Fill `out` with the part `box`. What all ranks of a head have is read once for those among them."""
        ranks, rows, *rest = box
        copies = self.shape[0] // self.inner.shape[0]
        for head in range(ranks.start // copies, -(-ranks.stop // copies)):
            first, last = max(ranks.start, head * copies), min(ranks.stop, (head + 1) * copies)
            for at, source, divided in self._rows(rows, copies):
                to = slice(at, at + source.stop - source.start)
                for rank in range(first, last):
                    i = rank - ranks.start
                    if rank > first and not divided:
                        out[i, to] = out[first - ranks.start, to]
                        continue
                    shift = divided * (rank - head * copies)
                    inside = slice(source.start + shift, source.stop + shift)
                    self.inner.read((slice(head, head + 1), inside, *rest), out[i : i + 1, to])

    def _rows(self, rows: slice, copies: int) -> Iterator[tuple[int, slice, int]]:
        """Pieces of the second axis: where in the part, the rows inside for a head's first rank, and how far apart ranks lie."""
        begin = inner = 0
        for size, divided in self.pieces or ((self.inner.shape[1], False),):
            own = size // copies if divided else size
            first, last = max(rows.start, begin), min(rows.stop, begin + own)
            if first < last:
                yield first - rows.start, slice(inner + first - begin, inner + last - begin), own if divided else 0
            begin, inner = begin + own, inner + size
