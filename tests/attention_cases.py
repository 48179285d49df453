"""Attention as its definition says, densely in float64 numpy, and ragged batches laid out in pages for the real one."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np

from inkling_jax.kernels.paged_attention import paged_attention

Rows = list[tuple[int, int]]  # (query tokens, length) of each row
run = jax.jit(paged_attention, static_argnames=("window", "longest", "context"))


@dataclasses.dataclass
class Case:
    """A ragged batch: queries laid end to end, and the keys and values [length, K, H] of each row."""

    rows: Rows
    q: np.ndarray
    rel: np.ndarray
    rel_bias: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]

    @property
    def start(self) -> np.ndarray:
        counts = np.array([count for count, _ in self.rows])
        return np.cumsum(counts) - counts


def random_case(rows: Rows, *, heads=4, kv_heads=2, width=8, extent=16, rel_dim=3, tokens=None, seed=0) -> Case:
    """Standard normal everything; `tokens` more than the rows' are padding, and NaN."""
    rng = np.random.default_rng(seed)
    used = sum(count for count, _ in rows)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    q, rel = normal(tokens or used, heads, width) * 2, normal(tokens or used, heads, rel_dim)
    q[used:], rel[used:] = np.nan, np.nan
    keys = [normal(length, kv_heads, width) * 2 for _, length in rows]
    return Case(rows, q, rel, normal(extent, rel_dim), keys, [normal(length, kv_heads, width) for _, length in rows])


def dense(case: Case, window: int | None = None) -> np.ndarray:
    """softmax(q.k / H + bias) v of every query over the keys it sees, in float64; zero for a token of no row (spec 2.3)."""
    out = np.zeros(case.q.shape)
    q, rel, rel_bias = (a.astype(np.float64) for a in (case.q, case.rel, case.rel_bias))
    for (count, length), start, keys, values in zip(case.rows, case.start, case.keys, case.values, strict=True):
        share = q.shape[1] // keys.shape[1]
        mine = slice(start, start + count)
        distance = np.arange(length - count, length)[:, None] - np.arange(length)[None, :]
        biases = np.einsum("tnr,er->tne", rel[mine], rel_bias)
        near = (distance >= 0) & (distance < len(rel_bias))
        seen = (distance >= 0) & (distance < (window or length))
        for head in range(q.shape[1]):
            score = q[mine, head] @ keys[:, head // share].astype(np.float64).T / q.shape[2]
            bias = np.take_along_axis(biases[:, head], np.clip(distance, 0, len(rel_bias) - 1), axis=1)
            score = np.where(seen, score + np.where(near, bias, 0.0), -np.inf)
            weight = np.exp(score - score.max(axis=1, keepdims=True)) if count else score
            out[mine, head] = weight / weight.sum(axis=1, keepdims=True) @ values[:, head // share].astype(np.float64)
    return out


def paged(
    case: Case,
    *,
    window: int | None = None,
    page: int = 16,
    longest: int | None = None,
    context: int | None = None,
    seed: int = 1,
):
    """The arguments of paged_attention for a case: pages in random order, NaN wherever no row has a key, rings for a window."""
    rng = np.random.default_rng(seed)
    counts, lengths = (np.array(column, np.int32) for column in zip(*case.rows, strict=True))
    context = context or max(16, int(lengths.max()))
    longest = longest or max(1, int(counts.max()))
    pages_of = -(-lengths // page)
    everything = -(-context // page)
    width = everything if window is None else min(everything, (window - 1 + longest + page - 2) // page + 1)
    total = int(pages_of.sum()) + 3
    free = list(rng.permutation(total))
    _, kv_heads, head = case.keys[0].shape
    k_pages, v_pages = (np.full((total, kv_heads, page, head), np.nan, np.float32) for _ in range(2))
    table = np.full((len(case.rows), width), total, np.int32)
    for row, (count, length) in enumerate(case.rows):
        oldest = 0 if window is None else max(0, length - count - window + 1)
        for absolute in range(oldest // page if count else pages_of[row], pages_of[row]):
            table[row, absolute % width] = mine = free.pop()
            there = slice(absolute * page, min((absolute + 1) * page, length))
            size = there.stop - there.start
            k_pages[mine, :, :size] = case.keys[row][there].swapaxes(0, 1)
            v_pages[mine, :, :size] = case.values[row][there].swapaxes(0, 1)
    arrays = (case.q, case.rel, case.rel_bias, k_pages, v_pages, table, case.start.astype(np.int32), counts, lengths)
    return arrays, {"window": window, "longest": longest, "context": context}


def assert_matches_dense(case: Case, *, window: int | None = None, tolerance: float = 2e-5, **layout) -> None:
    """paged_attention equals the definition."""
    arrays, sizes = paged(case, window=window, **layout)
    np.testing.assert_allclose(run(*arrays, **sizes), dense(case, window), rtol=tolerance, atol=tolerance)


def compiled_anew(**sizes):
    """A fresh jit of paged_attention: the shared one would keep programs made before a test changed the block sizes."""
    return jax.jit(partial(paged_attention, **sizes))


def index_values(length: int, kv_heads: int, width: int) -> np.ndarray:
    """Values that say where they lie: every entry of key s is s."""
    return np.broadcast_to(np.arange(length, dtype=np.float32)[:, None, None], (length, kv_heads, width)).copy()
