"""The host's inputs of a step: what lies where, and how few shapes there are."""

from __future__ import annotations

import dataclasses

import jax

from inkling_jax.cache.paged import CacheShape
from inkling_jax.engine.pack import pack_chunk, pack_slots, pack_updates
from inkling_jax.engine.shapes import Shapes, smallest

SHAPE = CacheShape(slots=6, page_size=16, global_pages=9, local_pages=9, max_context=5000, max_query=64)
NOTHING = {"global": [], "local": []}
OUT_OF_RANGE = 2**31 - 1


def test_parts_lie_end_to_end():
    """Two parts in their slots; unused rows have the reserved slot and no tokens."""
    chunk = pack_chunk([(3, (7, 8, 9), 0, False), (0, (5,), 20, True)], {"global": [(3, 0, 4)], "local": []}, SHAPE, 16)
    assert chunk.token_ids.tolist() == [7, 8, 9, 5] + [0] * 12
    assert chunk.slot.tolist() == [3, 0] + [6] * 6
    assert chunk.count.tolist() == [3, 1] + [0] * 6
    assert chunk.length.tolist() == [3, 21] + [0] * 6
    assert chunk.last.tolist() == [False, True] + [False] * 6
    entries = chunk.updates.global_entries.tolist()
    assert entries[0] == [3, 0, 4] and all(entry == [OUT_OF_RANGE] * 3 for entry in entries[1:])
    ragged = chunk.ragged()
    assert ragged.start.tolist() == [0, 3] + [4] * 6
    assert ragged.row.tolist()[:4] == [0, 0, 0, 1] and ragged.offset.tolist()[:4] == [0, 1, 2, 0]
    assert ragged.position.tolist()[:4] == [0, 1, 2, 20]
    assert ragged.valid.tolist() == [True] * 4 + [False] * 12


def test_chunks_of_equal_places_have_one_shape():
    """However many tokens and rows there are in them; the rows of a decode call are filled up with the reserved slot."""
    one = [pack_chunk([(0, (1,) * n, 0, True)], NOTHING, SHAPE, 64) for n in (1, 33, 64)]
    several = [pack_chunk([(i, (1,) * 5, 0, True) for i in range(rows)], NOTHING, SHAPE, 64) for rows in range(2, 7)]
    assert len({tuple(a.shape for a in jax.tree.leaves(chunk)) for chunk in one + several}) == 1
    assert one[0].token_ids.shape == (64,) and one[0].slot.shape == (8,)
    assert pack_slots([4, 2, 5], SHAPE, 8).tolist() == [4, 2, 5, *[6] * 5]


def test_every_step_has_room_for_its_pages():
    """A chunk can begin a page for every sixteenth token and two more a row; the entries keep their order."""
    parts = [(i, (1,) * 10, 15, False) for i in range(6)]  # positions 15 to 24: two pages each
    entries = [(i, column, 2 * i + column) for i in range(6) for column in (0, 1)]
    chunk = pack_chunk(parts, {"global": entries, "local": entries}, SHAPE, 64)
    assert chunk.updates.local_entries[:12].tolist() == [list(entry) for entry in entries]
    assert pack_updates(NOTHING, 3).global_entries.shape == (3, 3)


def test_few_shapes_hold_everything():
    """Chunks in strides of eight, rows of four and one, contexts of four; whatever is asked for, the smallest that holds it."""
    assert Shapes.of(SHAPE, 500) == Shapes((64, 512), (1, 8), (1024, 4096, 5008))
    assert Shapes.of(SHAPE, 16, bounded=False) == Shapes((16,), (1, 8), (5008,))
    of_slots = {slots: Shapes.of(dataclasses.replace(SHAPE, slots=slots), 2048).rows for slots in (1, 2, 32, 200)}
    assert of_slots == {1: (1,), 2: (1, 2), 32: (1, 8, 32), 200: (1, 4, 16, 64, 256)}
    assert [smallest((1024, 4096, 5008), n) for n in (1, 1024, 1025, 4097, 5000)] == [1024, 1024, 4096, 5008, 5008]
    short = dataclasses.replace(SHAPE, max_context=40)
    assert Shapes.of(short, 512).contexts == (48,)
