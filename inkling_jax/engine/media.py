"""Runs the towers for prompts that hold media, keeps their rows by content, and lays rows out for the chunks of a prompt.

A tower computes PIECE_ROWS rows at a time, so that it has one shape and bounded memory whatever an item's size. Its rows stay on
the device, in pieces as they were made; a chunk gets its own by one small program for each piece that it touches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from inkling_jax.errors import InputError
from inkling_jax.media import MediaItem
from inkling_jax.model import MediaRows
from inkling_jax.towers import Towers

PIECE_ROWS = 256
KEEP_BYTES = 256 << 20  # rows of past requests that stay on the device, for the next turn of a conversation


@dataclasses.dataclass(eq=False)
class _Run:
    """What one run of a tower left: pieces of PIECE_ROWS rows, the last one padded, and the content that they hold."""

    pieces: list[jax.Array]
    digests: list[bytes]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class _Placed(NamedTuple):
    """Rows first .. first + count of a run, for the tokens from `begin` on."""

    run: _Run
    first: int
    count: int
    begin: int


class MediaRunner:
    """The towers of a model and the rows that they made. Owners are whatever the engine tells prompts apart by."""

    def __init__(self, towers: Towers, leaves: list[jax.Array], mesh: Mesh, dtype: jnp.dtype, keep_bytes: int = KEEP_BYTES):
        graph, abstract = nnx.split(towers)
        self._towers = towers
        self._leaves, self._tree, self._graph = leaves, jax.tree.structure(abstract), graph
        self._dtype, self._keep_bytes = dtype, keep_bytes
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._programs = {
            name: jax.jit(functools.partial(self._compute, name), out_shardings=self._everywhere) for name in sorted(towers.names)
        }
        self._lay = jax.jit(_lay, donate_argnums=0, out_shardings=self._everywhere)
        self._kept: OrderedDict[_Run, None] = OrderedDict()  # the least recently used first
        self._known: dict[bytes, tuple[_Run, int]] = {}  # content: its run and first row there
        self._placed: dict[Hashable, list[_Placed]] = {}

    def check(self, items: Iterable[MediaItem]) -> None:
        """Raise InputError for an item whose tower this model has not."""
        for item in items:
            if item.tower not in self._programs:
                raise InputError(f"the prompt holds an item for the {item.tower} tower, which this model has not")

    def admit(self, owner: Hashable, items: Sequence[MediaItem]) -> None:
        """Have the rows of a prompt's items made, unless they are: each tower runs once over all that is not known yet."""
        if owner in self._placed:
            return
        for tower in self._programs:
            new = {item.digest: item for item in items if item.tower == tower and item.digest not in self._known}
            if new:
                self._known |= self._run(tower, list(new.values()))
        placed = [_Placed(*self._known[item.digest], len(item.values), item.begin) for item in items]
        self._placed[owner] = placed
        self._use(dict.fromkeys(rows.run for rows in placed))

    def release(self, owner: Hashable) -> None:
        """Forget where the rows of a prompt go; what was kept by content stays."""
        self._placed.pop(owner, None)

    def rows(
        self, places: int, parts: Sequence[tuple[Hashable, int, int]], firsts: Sequence[int] | None = None
    ) -> MediaRows | None:
        """Rows for prompt parts (owner, begin, end) that begin at these of `places` tokens; None where no token wants one.

        firsts: by default they lie end to end.
        """
        wanted: dict[int, tuple[jax.Array, np.ndarray]] = {}
        firsts = np.cumsum([0, *(end - begin for _, begin, end in parts)]).tolist() if firsts is None else firsts
        for at, (owner, begin, end) in zip(firsts, parts, strict=False):
            for run, first, count, place in self._placed[owner]:
                tokens = np.arange(max(begin, place), min(end, place + count))
                number, row = np.divmod(first + tokens - place, PIECE_ROWS)
                for n in np.unique(number):
                    piece = run.pieces[n]
                    _, index = wanted.setdefault(id(piece), (piece, np.full(places, PIECE_ROWS, np.int32)))
                    index[(at + tokens - begin)[number == n]] = row[number == n]
        if not wanted:
            return None
        pieces = list(wanted.values())
        rows = self._no_rows(places, pieces[0][0].shape[1])
        for piece, index in pieces:
            rows = self._lay(rows, piece, index)
        return MediaRows(rows, np.any([index < PIECE_ROWS for _, index in pieces], axis=0))  # pyright: ignore[reportArgumentType]

    def wants(self, parts: Sequence[tuple[Hashable, int, int]]) -> bool:
        """Whether a token of prompt parts (owner, begin, end) wants a row."""
        return any(
            begin < place + count and place < end for owner, begin, end in parts for _, _, count, place in self._placed[owner]
        )

    def idle_rows(self, places: int) -> MediaRows | None:
        """What `rows` gives for so many tokens, though none of them wants a row; None without a tower."""
        if not self._programs:
            return None
        name, program = next(iter(self._programs.items()))
        width = jax.eval_shape(program, self._leaves, self._towers.nothing(name, PIECE_ROWS)).shape[1]
        return MediaRows(self._no_rows(places, width), np.zeros(places, bool))  # pyright: ignore[reportArgumentType]

    def programs(self, places: int) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
        """What makes the rows of a chunk of so many tokens, each program with arguments that no prompt has."""
        for name, program in self._programs.items():
            yield program, (self._leaves, self._towers.nothing(name, PIECE_ROWS))
        idle = self.idle_rows(places)
        if idle is not None:
            piece = self._no_rows(PIECE_ROWS, idle.rows.shape[1])
            yield self._lay, (idle.rows, piece, np.full(places, PIECE_ROWS, np.int32))

    def close(self) -> None:
        """Free the towers and all rows."""
        for leaf in self._leaves:
            leaf.delete()
        self._leaves = []
        self.forget()

    def forget(self) -> None:
        """Forget all rows, and where they go."""
        self._kept.clear()
        self._known.clear()
        self._placed.clear()

    def _no_rows(self, places: int, width: int) -> Float[jax.Array, "places width"]:
        return jnp.zeros((places, width), self._dtype, device=self._everywhere)

    def _run(self, tower: str, items: Sequence[MediaItem]) -> dict[bytes, tuple[_Run, int]]:
        """One pass over items end to end; where the rows of each begin."""
        firsts = np.cumsum([0, *(len(item.values) for item in items)])
        run = _Run([], [item.digest for item in items])
        for begin in range(0, int(firsts[-1]), PIECE_ROWS):
            values = np.zeros((PIECE_ROWS, *items[0].values.shape[1:]), items[0].values.dtype)
            for first, item in zip(firsts, items, strict=False):
                low, high = max(begin, first), min(begin + PIECE_ROWS, first + len(item.values))
                if low < high:
                    values[low - begin : high - begin] = item.values[low - first : high - first]
            if len(run.pieces) > 1:
                run.pieces[-2].block_until_ready()  # so that the inputs of two pieces at most lie on the device
            run.pieces.append(self._programs[tower](self._leaves, values))
        return {item.digest: (run, int(first)) for first, item in zip(firsts, items, strict=False)}

    def _use(self, runs: Iterable[_Run]) -> None:
        """Note which runs are in use, and forget those used least recently beyond the bytes that may be kept."""
        for run in runs:
            self._kept[run] = None
            self._kept.move_to_end(run)
        while self._kept and sum(run.nbytes for run in self._kept) > self._keep_bytes:
            forgotten, _ = self._kept.popitem(last=False)
            for digest in forgotten.digests:
                del self._known[digest]

    def _compute(self, tower: str, leaves: list[Array], values: Shaped[Array, "N ..."]) -> Float[Array, "N D"]:
        towers = nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))
        with jax.default_matmul_precision("highest" if self._dtype == jnp.float32 else "default"):
            return getattr(towers, tower)(values)


def _lay(rows: Float[Array, "T D"], piece: Float[Array, "N D"], index: Int[Array, " T"]) -> Float[Array, "T D"]:
    """`rows` with those that `index` finds in a piece; an index past its end leaves a row alone."""
    found = jnp.take(piece, index, axis=0, mode="clip")
    return jnp.where((index < piece.shape[0])[:, None], found, rows)
