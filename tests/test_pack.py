"""The host's inputs of a step: what lies where, and how few shapes there are."""

from __future__ import annotations

import numpy as np

from inkling_jax.cache.paged import CacheShape
from inkling_jax.engine.pack import context_bucket, pack_chunk, pack_slots, pack_updates

SHAPE = CacheShape(slots=6, page_size=16, global_pages=9, local_pages=9, max_context=5000, max_query=64)
NOTHING = {"global": [], "local": []}
OUT_OF_RANGE = 2**31 - 1


def test_parts_lie_end_to_end():
    """Two parts in their slots; unused rows have the reserved slot and no tokens."""
    chunk = pack_chunk([(3, (7, 8, 9), 0, False), (0, (5,), 20, True)], {"global": [(3, 0, 4)], "local": []}, SHAPE)
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


def test_few_shapes():
    """Tokens of a chunk by powers of two from 16, rows one or all, decode rows by powers of two."""
    chunks = [pack_chunk([(0, (1,) * n, 0, True)], NOTHING, SHAPE) for n in range(1, 65)]
    assert {len(chunk.token_ids) for chunk in chunks} == {16, 32, 64}
    assert all(len(chunk.token_ids) < 2 * max(n, 8) + 1 for n, chunk in enumerate(chunks, 1))
    several = [pack_chunk([(i, (1,) * 5, 0, True) for i in range(rows)], NOTHING, SHAPE) for rows in range(2, 7)]
    assert {len(chunk.slot) for chunk in chunks} == {1} and {len(chunk.slot) for chunk in several} == {8}
    for same in ([c for c in chunks if len(c.token_ids) == 32], [c for c in several if len(c.token_ids) == 16]):
        assert len({c.updates.global_entries.shape for c in same} | {c.updates.local_entries.shape for c in same}) == 1
    assert {len(pack_slots(list(range(n)), SHAPE)) for n in range(1, 7)} == {1, 2, 4, 8}
    assert pack_slots([4, 2, 5], SHAPE).tolist() == [4, 2, 5, 6]


def test_every_step_has_room_for_its_pages():
    """A chunk can begin a page for every sixteenth token and two more a row; the entries keep their order."""
    parts = [(i, (1,) * 10, 15, False) for i in range(6)]  # positions 15 to 24: two pages each
    entries = [(i, column, 2 * i + column) for i in range(6) for column in (0, 1)]
    chunk = pack_chunk(parts, {"global": entries, "local": entries}, SHAPE)
    assert chunk.updates.local_entries[:12].tolist() == [list(entry) for entry in entries]
    assert pack_updates(NOTHING, 3).global_entries.shape == (3, 3)


def test_contexts_grow_fourfold_to_the_whole():
    """1024, 4096, then the whole context in pages: each bounds the length."""
    assert [context_bucket(n, SHAPE) for n in (1, 1024, 1025, 4096, 4097, 5000)] == [1024, 1024, 4096, 4096, 5008, 5008]
    assert np.all([context_bucket(n, SHAPE) >= n for n in range(1, 5001)])
