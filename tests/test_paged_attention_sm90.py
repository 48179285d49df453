"""The Hopper attention kernels without a GPU: the division of work, the bias tables, lowering, and runs in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.kernels.paged_attention import cases, paged_attention, plan_attention, reference, sm90
from inkling_jax.kernels.paged_attention.bias import EDGE_ROWS, prepare_bias, shear_offset
from inkling_jax.kernels.paged_attention.cases import Case
from inkling_jax.kernels.paged_attention.plan import plan_decode, tile_range

LOCAL = {"window": 128, "extent": 128}
INTERPRETED = {
    "split over programs, a tail": Case((200, 70), (1, 1), heads=8, kv_heads=2, extent=64),
    "an idle row, one key": Case((100, 0, 70, 1), (1, 0, 1, 1), heads=8, kv_heads=1, extent=128),
    "window on a ring": Case((300, 65), (1, 1), heads=8, kv_heads=2, **LOCAL),
    "tiles beyond the extent, pages of 128": Case((900,), (1,), heads=4, kv_heads=1, page=128, extent=512),
    "some queries a row": Case((200, 70), (3, 2), heads=4, kv_heads=1, extent=128),
    "nine queries of four heads, window": Case((150,), (9,), heads=4, kv_heads=1, **LOCAL),
    "nine queries of eight heads": Case((150,), (9,), heads=8, kv_heads=1, extent=64),
    "one query head a key head": Case((130,), (1,), heads=2, kv_heads=2, extent=64),
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


ROWS = [
    ((1,), (1,), None),
    ((700, 0, 64, 65, 5000), (1, 0, 1, 1, 1), None),
    ((700, 0, 64, 65, 5000, 0), (9, 0, 2, 1, 9, 0), 512),
    ((0, 0), (0, 0), None),
    ((300,) * 7, (1,) * 7, 128),
]


@pytest.mark.parametrize(("lengths", "counts", "window"), ROWS)
@pytest.mark.parametrize("programs", [1, 5, 132])
@pytest.mark.parametrize("shortest", [1, 4])
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
            token = 3
            sheared = tables.sheared[shear_offset(100) + token - distance]
            assert (sheared.reshape(16, 16)[token] == want).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page": 32}, "pages of 32 tokens: the kernels take"),
        ({"width": 32}, "heads of width 32: the kernels take"),
        ({"heads": 6, "kv_heads": 4}, "6 query heads do not divide over 4"),
        ({"counts": (64,), "lengths": (64,)}, "64 query tokens a row, 4 query heads a key head: the kernels take at most 9"),
    ],
)
def test_sizes_that_the_kernels_do_not_take_are_refused(change, message):
    case = Case(**{"lengths": (5,), "counts": (1,), "heads": 4, **change})
    given = cases.inputs(case)
    given["rel_bias"] = prepare_bias(given["rel_bias"])
    rows = [given[name] for name in ("start", "count", "length")]
    planned = sm90.decode_plan(*rows, tokens=given["q"].shape[0], kv_heads=case.kv_heads, window=None)
    with pytest.raises(ValueError, match=message):
        sm90.paged_attention(*given.values(), plan=planned, window=None, longest=case.longest)


@pytest.mark.parametrize(
    "case", [Case((150,), (9,), **LOCAL), Case((70, 0, 200), (3, 0, 1), 4, 2), Case((90,), (1,), read_out=64)]
)
def test_what_cases_expect_is_what_the_reference_computes(case):
    """The float64 of the benchmark's checks, held against the other formulation, which other tests hold against a third."""
    given = cases.inputs(case)
    floats = {k: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for k, a in given.items()}
    found = reference.paged_attention(**floats, window=case.window, longest=case.longest, context=case.context)
    np.testing.assert_allclose(found, cases.expected(case, given), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.decode_cases(), ids=lambda case: case.name)
def test_decode_lowers_for_a_gpu(case):
    short = tuple(min(length, 200) for length in case.lengths)  # nothing but the shapes of the pages depends on it
    given = cases.inputs(Case(short, case.counts, case.heads, case.kv_heads, case.window, case.extent, case.page, case.width))
    given["rel_bias"] = prepare_bias(given["rel_bias"])

    statics = {"window": case.window, "longest": case.longest}

    def attend(*arguments):
        tokens, heads, _ = arguments[0].shape
        plan = plan_attention(arguments[2], *arguments[6:], tokens=tokens, heads=heads, kv_heads=case.kv_heads, **statics)
        return paged_attention(*arguments, context=case.context, plan=plan, **statics)

    text = jax.jit(attend).trace(*given.values()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


def interpret(name: str) -> dict[str, float]:
    """Relative error against the definition, and the largest output of a token of no row, with few programs."""
    case = INTERPRETED[name]
    given = cases.inputs(case)
    want = cases.expected(case, given)
    given["rel_bias"] = prepare_bias(given["rel_bias"])
    rows = [given[k] for k in ("start", "count", "length")]
    options = {"tokens": given["q"].shape[0], "kv_heads": case.kv_heads, "window": case.window, "programs": 3, "shortest": 1}
    planned = plan_decode(*rows, **options)
    got = sm90.run_decode(*given.values(), planned, window=case.window, longest=case.longest, interpret=True)
    got = np.asarray(got.astype(jnp.float32))
    idle = np.asarray(planned.idle) > 0
    return {
        "error": float(np.linalg.norm(got - want) / np.linalg.norm(want)),
        "idle": float(np.abs(got[idle]).max(initial=0)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED)
def test_decode_in_the_interpreter(name):
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
