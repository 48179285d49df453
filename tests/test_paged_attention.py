"""The reference attention against its definition in float64, and against answers that arithmetic gives."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, assert_matches_dense, compiled_anew, dense, index_values, paged, random_case, run

from inkling_jax.kernels.paged_attention import paged_attention, reference


def slow(*parameters):
    return pytest.param(*parameters, marks=pytest.mark.slow)


def one_row(q, keys, values, *, rel=None, rel_bias=None, count=1):
    """A single row of one head; q [T, H], keys and values [S, H]."""
    f = lambda a: np.asarray(a, np.float32)[:, None]  # noqa: E731
    q, keys, values = f(q), f(keys), f(values)
    rel = np.zeros((len(q), 1, 1), np.float32) if rel is None else rel
    rel_bias = np.zeros((4, 1), np.float32) if rel_bias is None else np.asarray(rel_bias, np.float32)[:, None]
    return Case([(count, len(keys))], q, rel, rel_bias, [keys], [values])


def answer(case, **layout):
    arrays, sizes = paged(case, **layout)
    return np.asarray(run(*arrays, **sizes))


def test_scale_is_one_over_head_width():
    """q = k = [2, 2, 2, 2] has logit 16 / 4, not 16 / 2."""
    case = one_row([[2.0] * 4], [[0.0] * 4, [2.0] * 4], [[1.0] * 4, [0.0] * 4])
    np.testing.assert_allclose(answer(case), 1 / (1 + math.exp(4)), rtol=1e-6)


def test_beyond_the_extent_keys_count_without_bias():
    """Bias [0, ln 3] by distance, equal contents: (1 + 2 + 3*4 + 8) / 6. A clamped bias gives 2.9, masked keys 5."""
    case = one_row(
        [[0.0]], [[0.0]] * 4, [[1.0], [2.0], [4.0], [8.0]], rel=np.ones((1, 1, 1), np.float32), rel_bias=[0, math.log(3)]
    )
    np.testing.assert_allclose(answer(case), 23 / 6, rtol=1e-6)


@pytest.mark.parametrize(("window", "extent"), [(8, 8), (None, 8)])
def test_edges_of_window_and_extent(window, extent):
    """A key that would take all weight, at distance extent-1, extent, extent+1: a window hides it from the extent on."""
    for distance in (extent - 1, extent, extent + 1):
        keys = np.zeros((22, 2))
        keys[21 - distance] = 100
        case = one_row([[1.0, 1.0]], keys, index_values(22, 1, 2)[:, 0])
        seen = window is None or distance < window
        np.testing.assert_allclose(answer(case, window=window, page=4), 21 - distance if seen else 17.5, rtol=1e-5)


BIAS_ROWS = [(1, 1000), (200, 1200), (25, 1025), (300, 300), (16, 1016), (129, 129), (1, 1023)]


@pytest.mark.parametrize("window", [None, 512])
def test_bias_reads_out_the_distance(window):
    """A bias of 30 at one distance reads out the index of the key that lies so far back, whatever the cache held before."""
    case = random_case(BIAS_ROWS, heads=2, kv_heads=1, width=4, extent=512, rel_dim=2)
    case.q[:], case.rel[:] = 0, [30, 0]
    case.values = [index_values(length, 1, 4) for _, length in BIAS_ROWS]
    positions = np.concatenate([np.arange(length - count, length) for count, length in BIAS_ROWS])
    for distance in (0, 1, 127, 128, 200, 511):
        case.rel_bias = np.zeros((512, 2), np.float32)
        case.rel_bias[distance, 0] = 1
        far = positions >= distance
        out = answer(case, window=window, page=64)
        np.testing.assert_allclose(out[far], np.broadcast_to((positions - distance)[far, None, None], out[far].shape), atol=1e-3)
        np.testing.assert_allclose(out[~far], np.broadcast_to(positions[~far, None, None] / 2, out[~far].shape), rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(4, 2), (8, 1), slow(1, 1), slow(4, 1), slow(64, 16), slow(64, 8)],
)
def test_head_grouping(heads, kv_heads):
    """Each group of query heads reads its own key head, for prompts, continued prompts and single tokens."""
    rows = [(count, before + count) for before in (0, 128, 129, 1000) for count in (1, 24, 25, 200)]
    assert_matches_dense(random_case(rows, heads=heads, kv_heads=kv_heads, extent=64), page=64)
    tokens = [(1, length) for length in (1, 129, 130, 1001)]
    assert_matches_dense(random_case(tokens, heads=heads, kv_heads=kv_heads, extent=64), page=64)


def test_heads_that_do_not_divide_are_refused():
    arrays, sizes = paged(random_case([(1, 1)], heads=6, kv_heads=4))
    with pytest.raises(ValueError, match="6 query heads do not divide over 4 key heads"):
        paged_attention(*arrays, **sizes)


@pytest.mark.parametrize(("page", "window"), [(4, 40), (64, None), slow(4, None), slow(64, 40)])
def test_packed_batches(page, window):
    """Sequences of a step do not see each other, whatever their number, lengths and pages."""
    batches = ([512], [256, 256], [128, 128], [256, 137, 64], [1, 1, 1], [1, 300, 1])
    for i, batch in enumerate(batches):
        rows = [(n, n) for n in batch] + [(0, 0)] * (3 - len(batch))
        case = random_case(rows, tokens=512, extent=32, seed=i)
        assert_matches_dense(case, window=window, page=page, context=512, longest=512, seed=i)


@pytest.mark.parametrize("window", [slow(None), 100])
def test_last_chunks_of_prompts(window):
    """The queries of a chunk at the end of a longer prompt, for chunks of 512 and of 256."""
    prompts = (253, 361, 505, 541, 721, 1009, 1441)
    for chunk in (512, 256):
        rows = [((n - 1) % chunk + 1, n) for n in prompts]
        assert_matches_dense(random_case(rows, extent=100, heads=2, kv_heads=1), window=window, page=64, tolerance=5e-5)


def test_a_token_sees_itself():
    """With a bias of 30 at distance 0 each token returns its own value: what a step appends is there when it attends."""
    case = random_case([(1, 70), (5, 5), (1, 1)], rel_dim=1)
    case.q[:], case.rel[:], case.rel_bias = 0, 30, np.eye(16, 1, dtype=np.float32)
    own = np.concatenate([values[length - count :] for (count, length), values in zip(case.rows, case.values, strict=True)])
    np.testing.assert_allclose(answer(case), np.repeat(own, 2, axis=1), rtol=1e-5, atol=1e-5)


def test_bfloat16():
    """Scores, softmax and sums are float32: the error is that of rounding weights and output to 8 bits."""
    case = random_case([(40, 130), (1, 7)], extent=32)
    arrays, sizes = paged(case)
    arrays = [jnp.asarray(a, jnp.bfloat16) if a.dtype == np.float32 else a for a in arrays]
    q, rel, rel_bias = (np.asarray(a, np.float32) for a in arrays[:3])
    keys, values = ([np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32) for a in side] for side in (case.keys, case.values))
    out = run(*arrays, **sizes)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(np.float32), dense(Case(case.rows, q, rel, rel_bias, keys, values)), rtol=8e-3, atol=8e-3
    )


@pytest.mark.parametrize("window", [None, slow(24)])
def test_keys_in_many_blocks(window, monkeypatch):
    """Lengths 1 to 130 with keys in one block and in five, most of which most rows do not reach."""
    case = random_case([(1, length) for length in range(1, 131)])
    expected = dense(case, window)
    arrays, sizes = paged(case, window=window, page=4)
    whole = run(*arrays, **sizes)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(reference, "KEY_BLOCK", 8 if window else 32)
    monkeypatch.setattr(reference, "SCORE_ELEMENTS", 1 << 13)
    np.testing.assert_allclose(compiled_anew(**sizes)(*arrays), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [slow(None), 24])
def test_queries_in_many_groups(window, monkeypatch):
    """Prompts whose blocks of queries are worked on one after the other, idle rows among them."""
    monkeypatch.setattr(reference, "QUERY_BLOCK", 16)
    monkeypatch.setattr(reference, "KEY_BLOCK", 32)
    monkeypatch.setattr(reference, "SCORE_ELEMENTS", 1 << 12)
    case = random_case([(70, 130), (0, 0), (1, 1), (33, 33), (16, 100), (0, 0)], tokens=128)
    arrays, sizes = paged(case, window=window, page=4)
    np.testing.assert_allclose(compiled_anew(**sizes)(*arrays), dense(case, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 16])
def test_idle_rows_are_zero(window):
    """Rows without tokens and tokens without rows give zero, not NaN and not a mean, though their queries and pages are NaN."""
    case = random_case([(1, 9), (0, 0), (1, 40), (0, 0)], tokens=4)
    arrays, sizes = paged(case, window=window)
    arrays = list(arrays)
    tokens = np.array([0, 2])
    for i, a in enumerate((case.q, case.rel)):
        arrays[i] = np.full_like(a, np.nan)
        arrays[i][tokens] = a[:2]
    arrays[6] = np.arange(4, dtype=np.int32)
    out = np.asarray(run(*arrays, **sizes))
    np.testing.assert_allclose(out[tokens], dense(case, window)[:2], rtol=1e-5, atol=1e-5)
    assert (out[[1, 3]] == 0).all()
    prompts, sizes = paged(random_case([(3, 9), (0, 0)], tokens=8), window=window)
    assert (np.asarray(run(*prompts, **sizes))[3:] == 0).all()


@pytest.mark.parametrize(("window", "block"), [(12, 8), slow(None, 8), slow(12, None), slow(None, None)])
def test_gradients(window, block, monkeypatch):
    """The derivative along a random direction, of pages too, equals the definition's central difference; in blocks, and whole."""
    case = random_case([(9, 30), (1, 1), (20, 20)], extent=10)
    rng = np.random.default_rng(5)
    move = dataclasses.replace(case)
    for name in ("q", "rel", "rel_bias"):
        setattr(move, name, rng.standard_normal(getattr(case, name).shape))
    move.keys, move.values = ([rng.standard_normal(a.shape) for a in side] for side in (case.keys, case.values))
    out_weight = rng.standard_normal(case.q.shape)

    def moved(by):
        sides = (
            [a + by * m for a, m in zip(*both, strict=True)] for both in ((case.keys, move.keys), (case.values, move.values))
        )
        return Case(case.rows, *(getattr(case, n) + by * getattr(move, n) for n in ("q", "rel", "rel_bias")), *sides)

    wanted = ((dense(moved(1e-5), window) - dense(moved(-1e-5), window)) * out_weight).sum() / 2e-5
    if block:
        monkeypatch.setattr(reference, "QUERY_BLOCK", block)
        monkeypatch.setattr(reference, "KEY_BLOCK", block)
        monkeypatch.setattr(reference, "SCORE_ELEMENTS", 1 << 10)
    (arrays, sizes), (direction, _) = (paged(each, window=window, page=4) for each in (case, move))
    arrays, direction = ([np.nan_to_num(a) for a in each] for each in (arrays, direction))
    attend = compiled_anew(**sizes)
    grads = jax.grad(lambda *given: (attend(*given, *arrays[5:]) * out_weight).sum(), range(5))(*arrays[:5])
    assert all(np.isfinite(g).all() for g in grads)
    found = sum((np.asarray(g, np.float64) * d).sum() for g, d in zip(grads, direction[:5], strict=True))
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 512])
def test_memory_of_a_long_prompt(window):
    """32K tokens at once: nothing as large as tokens x heads x extent or tokens x keys, and temporaries that fit a laptop."""
    tokens, heads, kv_heads, width, extent, page = 32768, 32, 8, 128, 1024, 64
    columns = tokens // page if window is None else (window + tokens) // page
    shapes = [(tokens, heads, width), (tokens, heads, 16), (extent, 16), *[(tokens // page, kv_heads, page, width)] * 2]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    args += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, columns), (1,), (1,), (1,))]
    compiled = (
        jax.jit(paged_attention, static_argnames=("window", "longest", "context"))
        .lower(*args, window=window, longest=tokens, context=tokens)
        .compile()
    )
    largest = max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", compiled.as_text()))
    assert largest < 1.1 * tokens * heads * width  # the output in blocks
    assert compiled.memory_analysis().temp_size_in_bytes < 768 << 20
