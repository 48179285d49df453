"""Check mode: what the host knows of every sequence, worked out anew after each step and compared with the device's state.

Nothing here uses what the engine counts on the device's behalf: tokens are those that the step's results show, positions follow
from them, pages are those of the allocator. It waits for every step, so it is for looking for faults and not for serving.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from inkling_jax.engine.sequence import Sequence
from inkling_jax.engine.state import EngineState
from inkling_jax.engine.steps import Sampled
from inkling_jax.errors import InklingError

if TYPE_CHECKING:
    from inkling_jax.engine.engine import Engine

KINDS = ("positions", "lengths", "pages", "conv")
POOLS = {"global": False, "local": True}  # and whether its layers are local
CONV_STATES = ("k_conv", "v_conv", "attn_conv", "mlp_conv")


@dataclasses.dataclass
class _Seen:
    """A sequence as far as the results of steps show it."""

    sequence: Sequence  # kept, so that its id stays its own
    made: list[int] = dataclasses.field(default_factory=list)  # what was sampled, a last token that is no answer included
    finite: int = 0  # of these
    ended: bool = False
    appended: int = 0  # positions in the cache

    @property
    def length(self) -> int:
        """Positions that are in the cache by now: the last token that was made is not."""
        return self.sequence.to_read + len(self.made) - 1 if self.made else self.sequence.prefilled

    def token(self, position: int) -> int:
        """What stands at a position."""
        read = self.sequence.ids
        return read[position] if position < len(read) else self.made[position - len(read)]


class StepCheck:
    """Compares after each step; `compared` counts pairs by kind. Raises InklingError naming the first that differs.

    - positions: a step writes keys at the places of its sequences' new positions and nowhere else;
    - lengths: tokens in the cache, tokens made, and whether a sequence goes on;
    - pages: the tables' entries for all pages that a sequence holds;
    - conv: a step writes the convolutions' inputs of its sequences' last positions, in their slots and nowhere else.
    """

    def __init__(self, local_layers: tuple[bool, ...]):
        self._layers = {name: local_layers.index(local) for name, local in POOLS.items() if local in local_layers}
        self._prints = jax.jit(self._fingerprints)
        self._seen: dict[int, _Seen] = {}
        self._before: dict[str, np.ndarray] = {}
        self.compared: dict[str, int] = dict.fromkeys(KINDS, 0)

    def report(self) -> dict[str, int]:
        """How many pairs were compared, by kind. Raises InklingError where a kind had none: nothing was checked then."""
        for kind, count in self.compared.items():
            if not count:
                raise InklingError(f"the check compared no {kind}: no step has run with it")
        return dict(self.compared)

    def forget(self) -> None:
        """Know of no sequence: all begin anew."""
        self._seen.clear()

    def before(self, engine: Engine) -> None:
        """To be called before a step is dispatched."""
        self._before = jax.device_get(self._prints(engine.state))

    def after(self, engine: Engine, rows: list[tuple[int, Sequence]], sampled: Sampled) -> None:
        """To be called when it is, with its rows and results."""
        self._read(rows, jax.device_get(sampled))
        after = jax.device_get(self._prints(engine.state))
        state = jax.device_get((engine.state.length, engine.state.live, engine.state.sampler.generated))
        tables = {"global": engine.state.cache.global_table, "local": engine.state.cache.local_table}
        running = [self._of(s) for s in engine.scheduler.running if s.id >= 0]  # others are being scored, outside of steps
        self._seen = {id(seen.sequence): seen for seen in running}
        new = [(seen, seen.appended, seen.length) for seen in running]
        for seen, _, end in new:
            self._check_length(seen, end, *state)
            seen.appended = end
        self._check_pages(running, jax.device_get(tables))
        self._check_positions(engine, new, after)
        self._check_conv(new, after["conv"])

    def _of(self, sequence: Sequence) -> _Seen:
        return self._seen.setdefault(id(sequence), _Seen(sequence, appended=sequence.began))

    def _read(self, rows: list[tuple[int, Sequence]], sampled: Sampled) -> None:
        result = sampled.result
        for row, sequence in rows:
            seen = self._of(sequence)
            for i in np.flatnonzero(sampled.emitted[:, row]):
                seen.made.append(int(result.tokens[i, row]))
                seen.finite += int(result.finite[i, row])
                seen.ended = bool(result.stopped[i, row] | result.exhausted[i, row] | ~result.finite[i, row])

    def _check_length(self, seen: _Seen, end: int, length: np.ndarray, live: np.ndarray, generated: np.ndarray) -> None:
        slot = seen.sequence.slot
        if not end:
            return  # nothing of it has run: the slot is as the one before left it
        goes_on = bool(seen.made) and not seen.ended
        for what, found, wanted in (
            ("tokens in the cache", int(length[slot]), end),
            ("tokens made", int(generated[slot]), seen.sequence.resumed + seen.finite),
            ("live", bool(live[slot]), goes_on),
        ):
            self._compare("lengths", found, wanted, f"slot {slot}, {what}")

    def _check_pages(self, running: list[_Seen], tables: dict[str, np.ndarray]) -> None:
        for seen in running:
            slot = seen.sequence.slot
            for name, pages in seen.sequence.pages.items():
                table = tables[name]
                for absolute, page in pages.held().items() if seen.appended else ():
                    column = absolute % table.shape[1]
                    self._compare("pages", int(table[slot, column]), page, f"slot {slot}, {name} page table, column {column}")

    def _check_positions(self, engine: Engine, new: list[tuple[_Seen, int, int]], after: dict[str, np.ndarray]) -> None:
        shape = engine.shape
        for name in self._layers:
            changed, allowed = after[name] != self._before[name], np.zeros(after[name].shape, bool)
            for seen, begin, end in new:
                slot, held = seen.sequence.slot, seen.sequence.pages[name].held()
                # replicas have their slots and pages one behind another
                first = slot // (shape.slots + 1) * (shape.local_pages if POOLS[name] else shape.global_pages)
                for position in range(begin, end):
                    page = held.get(position // shape.page_size)
                    if page is None:
                        raise InklingError(f"check, pages: slot {slot} has no {name} page for position {position}")
                    allowed[first + page, position % shape.page_size] = True
            self._only("positions", changed, allowed, f"{name} page", "place")

    def _check_conv(self, new: list[tuple[_Seen, int, int]], after: np.ndarray) -> None:
        changed, allowed = after != self._before["conv"], np.zeros(after.shape, bool)
        for seen, begin, end in new:
            for place, position, old in _overwritten(begin, end, after.shape[1]):
                allowed[seen.sequence.slot, place] = True
                # equal tokens may leave equal inputs
                if old >= 0 and seen.token(position) != seen.token(old):
                    what = f"slot {seen.sequence.slot}, convolution inputs of position {position}, written"
                    self._compare("conv", bool(changed[seen.sequence.slot, place]), True, what)
        self._only("conv", changed, allowed, "convolution slot", "place")

    def _only(self, kind: str, changed: np.ndarray, allowed: np.ndarray, row: str, column: str) -> None:
        """Nothing may have changed but what is allowed."""
        for i, j in np.argwhere(changed & ~allowed):
            raise InklingError(f"check, {kind}: {row} {i}, {column} {j} was written by a step that has no token there")
        self.compared[kind] += int(changed.sum())

    def _compare(self, kind: str, found: int, wanted: int, what: str) -> None:
        if found != wanted:
            raise InklingError(f"check, {kind}: {what}: the device has {found}, the host {wanted}")
        self.compared[kind] += 1

    def _fingerprints(self, state: EngineState) -> dict[str, UInt32[Array, "a b"]]:
        """A number for each place of each page, by pool, and for each slot and place of the convolutions' rings."""
        layers = state.cache.layers
        pools = {name: jax.tree.leaves(layers[i].k_pages) for name, i in self._layers.items()}
        found = {
            name: functools.reduce(jnp.add, [_hash(jnp.moveaxis(array, 2, 1)) for array in arrays])
            for name, arrays in pools.items()
        }
        rings = [_hash(getattr(layer, name)) for layer in layers for name in CONV_STATES]
        return found | {"conv": functools.reduce(jnp.add, rings)}


def _hash(array: Array) -> UInt32[Array, "a b"]:
    """Of the bits of all that lies behind each pair of first indices."""
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}")).astype(jnp.uint32)
    bits = bits.reshape(*array.shape[:2], -1)
    odd = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, 2) * jnp.uint32(2654435761) * 2 + 1
    return (bits * odd).sum(axis=-1, dtype=jnp.uint32)


def _overwritten(begin: int, end: int, kept: int) -> Iterator[tuple[int, int, int]]:
    """Place, position and the position that was there before (negative: none), for a ring after positions begin .. end."""
    for position in range(max(begin, end - kept), end):
        yield position % kept, position, begin - 1 - (begin - 1 - position) % kept
