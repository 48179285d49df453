"""What the host knows, as the fixed-shape numpy inputs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from inkling_jax.cache.paged import CacheShape
from inkling_jax.engine.shapes import SMALLEST_CONTEXT, bucket
from inkling_jax.engine.state import PageUpdates
from inkling_jax.engine.steps import Chunk

SCORE_CHUNK = 512  # most tokens of a step that returns logits of them all: a float32 row of the vocabulary each
DROPPED = np.iinfo(np.int32).max  # a slot out of range: the device drops what is written there

Entries = dict[str, list[tuple[int, int, int]]]  # by pool: (slot, column, page) to set in the page tables


def context_bucket(length: int, shape: CacheShape) -> int:
    """The static bound on lengths of a step: a power of four times the smallest bucket, or the whole context in pages."""
    bound = SMALLEST_CONTEXT
    while bound < length:
        bound *= 4
    return min(bound, -(-shape.max_context // shape.page_size) * shape.page_size)


def side_by_side[T](inputs: Sequence[T]) -> T:
    """The inputs of all replicas as those of a step: replica after replica along the first axis of every array."""
    return inputs[0] if len(inputs) == 1 else jax.tree.map(lambda *parts: np.concatenate(parts), *inputs)


def pack_slots(slots: list[int], shape: CacheShape, rows: int) -> np.ndarray:
    """Slots of a decode step's sequences, padded to so many rows with the reserved slot."""
    packed = np.full(rows, shape.slots, np.int32)
    packed[: len(slots)] = slots
    return packed


def pack_decode(slots: list[int], entries: Entries, shape: CacheShape, rows: int, steps: int) -> tuple[np.ndarray, PageUpdates]:
    """Inputs of a decode call of `steps` steps for the sequences in these slots."""
    return pack_slots(slots, shape, rows), pack_updates(entries, rows * (steps // shape.page_size + 2))


def pack_updates(entries: Entries, capacity: int) -> PageUpdates:
    """Page table entries to set, padded to `capacity` a table."""

    def table(new: list[tuple[int, int, int]]) -> Any:  # jit takes numpy arrays as they are
        packed = np.full((capacity, 3), DROPPED, np.int32)
        packed[: len(new)] = np.asarray(new, np.int32).reshape(-1, 3)
        return packed

    return PageUpdates(table(entries["global"]), table(entries["local"]))


def pack_chunk(
    parts: list[tuple[int, tuple[int, ...], int, bool]],
    entries: Entries,
    shape: CacheShape,
    places: int,
    decoding: Sequence[int] = (),
) -> Chunk:
    """Prompt parts (slot, token ids, position of the first, whether the prompt ends here) laid end to end in so many places.

    Behind them a place for each slot of `decoding`.
    """
    rows = bucket(shape.slots)
    token_ids: Any = np.zeros(places, np.int32)
    slot: Any = np.full(rows, shape.slots, np.int32)
    count: Any = np.zeros(rows, np.int32)
    length: Any = np.zeros(rows, np.int32)
    decode: Any = np.zeros(rows, bool)
    last: Any = np.zeros(rows, bool)
    at = 0
    for row, (where, ids, begin, ends) in enumerate(parts):
        token_ids[at : at + len(ids)] = ids
        slot[row], count[row], length[row], last[row] = where, len(ids), begin + len(ids), ends
        at += len(ids)
    those = slice(len(parts), len(parts) + len(decoding))
    slot[those], count[those], decode[those] = decoding, 1, True
    return Chunk(token_ids, slot, count, length, decode, last, pack_updates(entries, places // shape.page_size + 2 * rows))
