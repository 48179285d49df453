"""The Hopper attention kernels without a GPU: the division of work, the bias tables, lowering, and runs in the interpreter."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import threads

from inkling_jax.kernels.paged_attention import cases, paged_attention, plan_attention, reference, sm90, widen
from inkling_jax.kernels.paged_attention import plan as plans
from inkling_jax.kernels.paged_attention.bias import EDGE_ROWS, prepare_bias, zero_row
from inkling_jax.kernels.paged_attention.cases import Case
from inkling_jax.kernels.paged_attention.plan import plan_decode, tile_range
from inkling_jax.kernels.paged_attention.prefill_plan import plan_prefill
from inkling_jax.kernels.paged_attention.prefill_shape import PrefillShape

LOCAL: dict[str, Any] = {"window": 128, "extent": 128}
INTERPRETED = {
    "split over programs, a tail": Case((200, 70), (1, 1), heads=8, kv_heads=2, extent=64),
    "an idle row, one key": Case((100, 0, 70, 1), (1, 0, 1, 1), heads=8, kv_heads=1, extent=128),
    "window on a ring": Case((300, 65), (1, 1), heads=8, kv_heads=2, **LOCAL),
    "tiles beyond the extent, pages of 128": Case((900,), (1,), heads=4, kv_heads=1, page=128, extent=512),
    "some queries a row": Case((200, 70), (3, 2), heads=4, kv_heads=1, extent=128),
    "nine queries of four heads, window": Case((150,), (9,), heads=4, kv_heads=1, **LOCAL),
    "nine queries of eight heads": Case((150,), (9,), heads=8, kv_heads=1, extent=64),
    "one query head a key head": Case((130,), (1,), heads=2, kv_heads=2, extent=64),
    "fp8: split over programs, a tail": Case((200, 70), (1, 1), heads=8, kv_heads=2, extent=64, fp8=True),
    "fp8: an idle row, one key, pages of 128": Case((200, 0, 1), (1, 0, 1), heads=8, kv_heads=1, page=128, extent=128, fp8=True),
    "fp8: window on a ring": Case((300, 65), (1, 1), heads=8, kv_heads=2, fp8=True, **LOCAL),
    "fp8: nine queries of eight heads": Case((150,), (9,), heads=8, kv_heads=1, extent=64, fp8=True),
    "heads of width 64": Case((130,), (1,), heads=8, kv_heads=1, width=64, extent=64),
}


def plan(lengths, counts, *, kv_heads=2, window=None, programs=5, shortest=1):
    start = np.concatenate([[0], np.cumsum(counts)[:-1]])
    arrays = [jnp.asarray(a, jnp.int32) for a in (start, counts, lengths)]
    options = {"tokens": sum(counts) + 1, "kv_heads": kv_heads, "window": window, "programs": programs, "shortest": shortest}
    return plan_decode(*arrays, **options), [np.asarray(t) for t in tile_range(arrays[1], arrays[2], window)]


def walk(planned, tiles, kv_heads):
    """What each program does, as the kernel walks it: lists of (row, head, first tile, end)."""
    done = []
    for row, head, skip, left in zip(*map(np.asarray, (planned.row, planned.head, planned.skip, planned.tiles)), strict=True):
        pieces = []
        while left > 0:
            end = min(tiles[row], skip + left)
            pieces.append((int(row), int(head), int(skip), int(end)))
            left -= end - skip
            skip, head = 0, head + 1
            if head == kv_heads:
                row, head = np.asarray(planned.next_row)[row], 0
        done.append(pieces)
    return done


PREFILL = {
    "a chunk with a history that is no multiple of a tile, ragged": Case((200, 70), (33, 20), heads=8, kv_heads=2, extent=64),
    "a window on a ring, pages of 128": Case((300, 20), (40, 20), heads=8, kv_heads=2, page=128, **LOCAL),
    "short and idle rows ride along": Case((300, 90, 65), (1, 0, 65), heads=8, kv_heads=1, extent=128),
    "fp8: a chunk with a history, ragged": Case((200, 70), (33, 20), heads=8, kv_heads=2, extent=64, fp8=True),
    "fp8: a window on a ring, pages of 128": Case((300, 20), (40, 20), heads=8, kv_heads=2, page=128, fp8=True, **LOCAL),
    "one query head a key head, width 64": Case((100,), (40,), heads=1, kv_heads=1, width=64, extent=64),
}
ROWS = [
    ((1,), (1,), None),
    ((700, 0, 64, 65, 5000), (1, 0, 1, 1, 1), None),
    ((700, 0, 64, 65, 5000, 0), (9, 0, 2, 1, 9, 0), 512),
    ((0, 0), (0, 0), None),
    ((300,) * 7, (1,) * 7, 128),
]


@pytest.mark.parametrize(("lengths", "counts", "window"), ROWS)
@pytest.mark.parametrize(("programs", "shortest"), [(1, 1), (5, 1), (5, 4), (132, 1), (132, 4)])
def test_every_key_tile_is_done_once_and_runs_are_equal(lengths, counts, window, programs, shortest):
    planned, (_, tiles) = plan(lengths, counts, window=window, programs=programs, shortest=shortest)
    pieces = walk(planned, tiles, 2)
    covered = sorted((row, head, t) for piece in pieces for row, head, begin, end in piece for t in range(begin, end))
    assert covered == [(row, head, t) for row in range(len(lengths)) for head in range(2) for t in range(tiles[row])]
    runs = [sum(end - begin for *_, begin, end in piece) for piece in pieces]
    assert max(runs) == runs[0] <= max(shortest, -(-len(covered) // programs))


@pytest.mark.parametrize(("lengths", "counts", "window"), ROWS)
@pytest.mark.parametrize("programs", [1, 5, 132])
def test_merges_name_exactly_the_parts_of_split_items(lengths, counts, window, programs):
    planned, (_, tiles) = plan(lengths, counts, window=window, programs=programs)
    parts: dict[tuple[int, int], list[int]] = {}
    for program, piece in enumerate(walk(planned, tiles, 2)):
        for row, head, begin, end in piece:
            if end - begin < tiles[row]:
                parts.setdefault((row, head), []).append(program)
    named = {}
    for program, followers in enumerate(np.asarray(planned.followers)):
        if followers:
            item = (int(planned.row[program]), int(planned.head[program]))
            named[item] = list(range(program - 1, program + followers))
    assert named == parts


def test_tokens_of_no_row_are_idle():
    planned, _ = plan((70, 0, 9), (2, 0, 3))
    assert np.asarray(planned.idle).tolist() == [0] * 5 + [1]


@pytest.mark.parametrize(
    ("lengths", "counts"), [((200, 0, 70, 5), (33, 0, 20, 5)), ((64,), (64,)), ((1, 1000), (1, 1)), ((0,), (0,))]
)
@pytest.mark.parametrize("tile", [16, 32])
def test_every_query_is_in_one_tile_and_the_longest_come_first(lengths, counts, tile):
    start = np.concatenate([[0], np.cumsum(counts)[:-1]])
    arrays = [jnp.asarray(a, jnp.int32) for a in (start, counts, lengths)]
    planned = plan_prefill(*arrays, tokens=sum(counts) + 3, tile=tile, window=None)
    live = int(planned.live[0])
    tiles = list(zip(np.asarray(planned.row)[:live], np.asarray(planned.first)[:live], strict=True))
    found = sorted((row, p) for row, at in tiles for p in range(at, at + tile) if lengths[row] - counts[row] <= p < lengths[row])
    assert found == [(row, p) for row, (n, c) in enumerate(zip(lengths, counts, strict=True)) for p in range(n - c, n)]
    assert all(at % tile == 0 for _, at in tiles)
    assert [at for _, at in tiles] == sorted((at for _, at in tiles), reverse=True)
    assert np.asarray(planned.idle)[: sum(counts) + 3].tolist() == [0] * sum(counts) + [1] * 3
    assert np.asarray(planned.idle_block).tolist() == np.asarray(planned.idle).reshape(-1, 32).any(1).astype(int).tolist()


@pytest.mark.parametrize("share", [4, 8])
def test_rows_of_a_prefill_tile_are_every_head_of_every_token_once(share):
    shape = PrefillShape(share, 1, 128, 64, 64, None, 1, 384)
    tokens = [
        shape.token(group, warp, half) + t
        for group in range(2)
        for warp in range(4)
        for half in range(2)
        for t in range(shape.group_tokens)
    ]
    assert sorted(tokens) == list(range(shape.tokens))
    assert all(shape.token(g, w, 1) - shape.token(g, w, 0) == 8 for g in range(2) for w in range(4))


@pytest.mark.parametrize("keys", [64, 128])
def test_codes_are_widened_by_numpy(keys, monkeypatch):
    """Every code to where the swizzle of 128 bytes has it, and scales of absent keys to zero: what the threads of a GPU do."""
    rng = np.random.default_rng(0)
    codes = rng.permutation(np.resize(np.arange(256, dtype=np.uint8), keys * 128)).reshape(keys, 128)
    scale = rng.random(keys).astype(np.float32)
    first, end = 3, keys - 5
    scale[:first], scale[end:] = np.nan, np.nan
    monkeypatch.setattr(widen, "m", threads.Threads(128))
    memories = [
        threads.memory(a) for a in (codes, scale, np.full((keys, 128), np.nan, jnp.bfloat16), np.full(keys, np.nan, np.float32))
    ]
    widen.widen_tile(keys, 128, *memories, first, end)
    row, column = np.indices((keys, 128))
    line = (row // 8 * 2 + column // 64) * 8 + row % 8
    place = (column // 8 % 8 ^ row % 8) * 8 + column % 8
    found = memories[2].view(jnp.bfloat16)[line * 64 + place].astype(np.float32)
    want = codes.view(jnp.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(found, np.where(np.isnan(want), np.where(codes & 128, -480, 480), want))
    inside = (np.arange(keys) >= first) & (np.arange(keys) < end)
    np.testing.assert_array_equal(memories[3].view(np.float32), np.where(inside, scale, 0))


@pytest.mark.parametrize(
    ("lengths", "count", "expected"), [(512, 1, (0, 8)), (513, 1, (0, 9)), (576, 1, (1, 8)), (577, 2, (1, 9))]
)
def test_window_tiles_reach_from_the_first_query_back(lengths, count, expected):
    first, tiles = tile_range(jnp.array([count]), jnp.array([lengths]), 512)
    assert (int(first[0]), int(tiles[0])) == expected


def test_bias_tables_hold_the_weight_by_distance():
    rel_bias = jnp.asarray(np.random.default_rng(0).normal(size=(100, 16)), jnp.bfloat16)
    tables = prepare_bias(rel_bias)
    for shift in (0, 5):
        for distance in (-1, 0, 37, 99, 100):
            want = rel_bias[distance] if 0 <= distance < 100 else jnp.zeros(16)
            got = tables.reversed[shift, EDGE_ROWS + 99 - distance - shift]
            assert (got == want).all()
            halved = tables.halved.reshape(2, -1, 8)[:, zero_row(100) - distance]
            assert (halved.reshape(16) == want).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page": 32}, "pages of 32 tokens: the kernels take"),
        ({"width": 32}, "heads of width 32: the kernels take"),
        ({"heads": 6, "kv_heads": 4}, "6 query heads do not divide over 4"),
        ({"heads": 12}, "12 query heads a key head: the kernels take at most 8"),
        ({"counts": (64,), "lengths": (64,)}, "64 query tokens a row: the decode kernel takes at most 9"),
    ],
)
def test_sizes_that_the_kernels_do_not_take_are_refused(change, message):
    case = Case(**{"lengths": (5,), "counts": (1,), "heads": 4, **change})

    def attend():
        given = cases.inputs(case)
        given["rel_bias"] = prepare_bias(given["rel_bias"])
        rows = [given[name] for name in ("start", "count", "length")]
        planned = sm90.decode_plan(*rows, tokens=given["q"].shape[0], kv_heads=case.kv_heads, window=None)
        return sm90.paged_attention(*given.values(), plan=planned, window=None, longest=case.longest)

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(attend)


@pytest.mark.parametrize(
    "case",
    [
        Case((70, 0, 200), (3, 0, 1), 4, 2),
        *(pytest.param(case, marks=pytest.mark.slow) for case in (Case((150,), (9,), **LOCAL), Case((90,), (1,), read_out=64))),
    ],
)
def test_what_cases_expect_is_what_the_reference_computes(case):
    """The float64 of the benchmark's checks, held against the other formulation, which other tests hold against a third."""
    given = cases.inputs(case)
    floats = {k: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for k, a in given.items()}
    statics = {"window": case.window, "longest": case.longest, "context": case.context}
    found = jax.jit(functools.partial(reference.paged_attention, **statics))(**floats)
    np.testing.assert_allclose(found, cases.expected(case, given), rtol=1e-4, atol=1e-5)


def lowered(case, given):
    """The text for a GPU of what a layer calls."""
    statics = {"window": case.window, "longest": case.longest}

    def attend(*arguments):
        tokens, heads, _ = arguments[0].shape
        plan = plan_attention(arguments[2], *arguments[6:], tokens=tokens, heads=heads, kv_heads=case.kv_heads, **statics)
        return paged_attention(*arguments, context=case.context, plan=plan, **statics)

    given = given | {"rel_bias": prepare_bias(given["rel_bias"])}
    return jax.jit(attend).trace(*given.values()).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.decode_cases(), ids=lambda case: case.name)
def test_decode_lowers_for_a_gpu(case):
    short = tuple(min(length, 200) for length in case.lengths)  # nothing but the shapes of the pages depends on it
    given = cases.inputs(Case(short, case.counts, case.heads, case.kv_heads, case.window, case.extent, case.page, case.width))
    text = lowered(case, given)
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.slow
@pytest.mark.parametrize("case", PREFILL.values(), ids=lambda case: case.name)
def test_prefill_lowers_for_a_gpu(case):
    text = lowered(case, cases.inputs(case))
    assert text.count("custom_call @mosaic_gpu") == 1


def interpret(name: str) -> dict[str, float]:
    """Relative error against the definition, and the largest output of a token of no row, with few programs.

    A name that begins with "fixed: " is of a plan whose parts do not depend on other rows.
    """
    fixed, name = name.startswith(FIXED), name.removeprefix(FIXED)
    case = (INTERPRETED | PREFILL)[name]
    given = cases.inputs(case)
    want = cases.expected(case, given)
    given["rel_bias"] = prepare_bias(given["rel_bias"])
    rows = [given[k] for k in ("start", "count", "length")]
    tokens = given["q"].shape[0]
    if name in PREFILL:
        planned = sm90.prefill_plan(*rows, tokens=tokens, share=case.heads // case.kv_heads, window=case.window)
        got = sm90.run_prefill(*given.values(), planned, window=case.window, programs=2, interpret=True)
    else:
        options = {"tokens": tokens, "kv_heads": case.kv_heads, "window": case.window}
        if fixed:
            plans.FIXED_RUN = 1  # tiles, so that short rows have parts
            planned = plans.plan_fixed(*rows, **options, context=max(case.lengths))
        else:
            planned = plan_decode(*rows, **options, programs=3, shortest=1)
        got = sm90.run_decode(*given.values(), planned, window=case.window, longest=case.longest, interpret=True)
    got = np.asarray(got.astype(jnp.float32))
    idle = np.asarray(planned.idle)[:tokens] > 0
    return {
        "error": float(np.linalg.norm(got - want) / np.linalg.norm(want)),
        "idle": float(np.abs(got[idle]).max(initial=0)),
    }


FIXED = "fixed: "
QUICK = ("an idle row, one key", "short and idle rows ride along", "fp8: a chunk with a history, ragged")  # of each kernel
NAMES = (*INTERPRETED, *PREFILL, *(FIXED + name for name in list(INTERPRETED)[:5]))


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_in_the_interpreter(name):
    # A process of its own: three warpgroups wait on one another in threads of XLA's pool, which NPROC makes large enough.
    root = Path(__file__).parent.parent
    env = os.environ | {"NPROC": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    run = subprocess.run([sys.executable, __file__, name], env=env, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["error"] <= 3e-3
    assert found["idle"] == 0


if __name__ == "__main__":
    print(json.dumps(interpret(sys.argv[1])))
