"""Inputs shared by the tests and the benchmark of paged attention: shuffled pages, and NaN wherever nothing may be read."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_jax.kernels.pages import Fp8Pages

REL_RANK = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of lengths and query counts, and the heads of a layer."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 1
    window: int | None = None
    extent: int = 1024
    page: int = 64
    width: int = 128
    fp8: bool = False  # keys and values
    read_out: int | None = None  # all weight lies on the key at this distance, by the bias alone

    @property
    def longest(self) -> int:
        """Most query tokens of a row."""
        return max(self.counts)

    @property
    def context(self) -> int:
        """Longest row."""
        return max(self.lengths)

    @property
    def name(self) -> str:
        """A stable string of the parameters."""

        def runs(values: tuple[int, ...]) -> str:
            if len(set(values)) == 1:
                return f"{values[0]}x{len(values)}"
            return "+".join(map(str, values)) if len(values) < 6 else f"{min(values)}..{max(values)}x{len(values)}"

        kind = f"window{self.window}" if self.window else "global"
        return (
            f"{kind}-{self.heads}q{self.kv_heads}kv-len{runs(self.lengths)}-q{runs(self.counts)}-page{self.page}"
            + (f"-width{self.width}" if self.width != 128 else "")
            + ("-fp8" if self.fp8 else "")
            + (f"-bias{self.read_out}" if self.read_out is not None else "")
        )

    @property
    def key_bytes(self) -> int:
        """Bytes of keys and values that the case must read, in bfloat16 or as codes and scales."""
        vector = self.width + 4 if self.fp8 else 2 * self.width
        return sum(2 * self.kv_heads * vector * visible for visible in self.visible())

    def visible(self) -> list[int]:
        """Keys that each row's queries see together."""
        seen = []
        for length, count in zip(self.lengths, self.counts, strict=True):
            oldest = max(length - count - self.window + 1, 0) if self.window else 0
            seen.append(length - oldest if count else 0)
        return seen


def table_of(case: Case, pool: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A page table [B, width] of pages drawn from a pool without repetition, and how many tokens of each page are live."""
    firsts, lasts = [], []
    for length, seen in zip(case.lengths, case.visible(), strict=True):
        firsts.append((length - seen) // case.page)
        lasts.append(-(-length // case.page) if seen else firsts[-1])
    held = max(1, *(last - first for first, last in zip(firsts, lasts, strict=True)), 1)
    width = held if case.window else max(1, *lasts)
    table = np.full((len(case.lengths), width), pool, np.int32)  # an unset entry is the number of pages
    live = np.zeros(pool, np.int32)
    free = iter(rng.permutation(pool))
    for row, (first, last, length) in enumerate(zip(firsts, lasts, case.lengths, strict=True)):
        for page in range(first, last):
            chosen = next(free)
            table[row, page % width] = chosen
            live[chosen] = min(case.page, length - page * case.page)
    return table, live


def inputs(case: Case, seed: int = 0, spare: int = 3) -> dict[str, Any]:
    """Arguments of paged_attention in its order, bfloat16. Pages are shuffled; free ones and tails past a length hold NaN.

    In fp8 vectors are of very different size, so that a scale of another token or head is seen.

    In a batch of more than one query a row, two tokens at the end belong to no row.
    """
    rng = np.random.default_rng(seed)
    pages = sum(-(-length // case.page) for length in case.lengths) + spare
    table, live = table_of(case, pages, rng)
    counts = np.asarray(case.counts, np.int32)
    decode = case.longest == 1
    start = np.arange(counts.size) if decode else np.concatenate([[0], np.cumsum(counts)[:-1]])
    tokens = counts.size if decode else int(counts.sum()) + 2

    def normal(shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:  # by numpy: jax would compile for every shape
        return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(jnp.bfloat16)

    present = np.arange(case.page)[None, None, :, None] < live[:, None, None, None]
    pool = (pages, case.kv_heads, case.page, case.width)
    q, rel, rel_bias = (
        normal(shape, scale)
        for shape, scale in (
            ((tokens, case.heads, case.width), 3.0),
            ((tokens, case.heads, REL_RANK), 1.0),
            ((case.extent, REL_RANK), 0.5),
        )
    )
    if case.read_out is not None:
        q[:], rel[:], rel_bias[:] = 0, 0, 0
        rel[..., 3], rel_bias[case.read_out, 3] = 30, 1

    def pages_of_numbers() -> Any:
        numbers = normal(pool)
        if not case.fp8:
            return np.where(present, numbers, np.asarray(np.nan, jnp.bfloat16))
        wide = numbers.astype(np.float32) * np.exp2(rng.integers(-3, 2, (*pool[:-1], 1))).astype(np.float32)
        scale = np.abs(wide).max(axis=-1, keepdims=True) * np.float32(1 / 448)
        codes = (wide / scale).astype(jnp.float8_e4m3fn).view(np.uint8)
        return Fp8Pages(np.where(present, codes, np.uint8(0x7F)), np.where(present, scale, np.float32(np.nan))[..., 0])  # pyright: ignore[reportArgumentType]

    made = {
        "q": q,
        "rel": rel,
        "rel_bias": rel_bias,
        "k_pages": pages_of_numbers(),
        "v_pages": pages_of_numbers(),
        "table": table,
        "start": start.astype(np.int32),
        "count": counts,
        "length": np.asarray(case.lengths, np.int32),
    }
    return {name: jax.tree.map(jnp.asarray, array) for name, array in made.items()}


def expected(case: Case, given: dict[str, Any]) -> np.ndarray:
    """What the definition (spec 2.3) makes of inputs(case), in float64 on the host: [T, N, H], zero for a token of no row."""
    q, rel, rel_bias = (np.asarray(given[name], np.float64) for name in ("q", "rel", "rel_bias"))
    table, start = (np.asarray(given[name]) for name in ("table", "start"))
    k_pages, v_pages = (_numbers(given[name]) for name in ("k_pages", "v_pages"))
    share, out = case.heads // case.kv_heads, np.zeros(q.shape)
    for row, (length, count, seen) in enumerate(zip(case.lengths, case.counts, case.visible(), strict=True)):
        if not count:
            continue
        first = (length - seen) // case.page
        ids = table[row, np.arange(first, -(-length // case.page)) % table.shape[1]]
        tokens = slice(start[row], start[row] + count)
        distance = np.arange(length - count, length)[:, None] - np.arange(first * case.page, length)
        in_sight = (distance >= 0) & (distance < (case.window or length))
        biases = np.einsum("tnr,er->nte", rel[tokens], rel_bias)
        for head in range(case.kv_heads):
            keys = [pages[ids, head].astype(np.float64).reshape(-1, case.width) for pages in (k_pages, v_pages)]
            k, v = (a[: distance.shape[1]] for a in keys)
            for n in range(head * share, (head + 1) * share):
                bias = np.take_along_axis(biases[n], np.clip(distance, 0, case.extent - 1), axis=1)
                score = q[tokens, n] @ k.T / case.width + np.where(distance < case.extent, bias, 0)
                score = np.where(in_sight, score, -np.inf)
                weight = np.exp(score - score.max(axis=1, keepdims=True))
                out[tokens, n] = weight / weight.sum(axis=1, keepdims=True) @ v
    return out


def _numbers(pages: Any) -> np.ndarray:
    if not isinstance(pages, Fp8Pages):
        return np.asarray(pages)
    return np.asarray(pages.codes).view(jnp.float8_e4m3fn).astype(np.float32) * np.asarray(pages.scale)[..., None]


def decode_cases() -> list[Case]:
    """Decode in every regime: contexts around tile and extent edges, ratios, query counts, windows, pages, idle rows."""
    contexts = (1, 2, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 4097)
    ones = (1,) * len(contexts)
    local: dict[str, Any] = {"window": 512, "extent": 512}
    return [
        Case(contexts, ones, heads=16, kv_heads=2),
        Case(contexts, ones, heads=16, kv_heads=2, fp8=True),
        Case(contexts, ones, heads=8, kv_heads=2, fp8=True, **local),
        Case((700, 0, 64, 900), (1, 0, 1, 1), heads=8, kv_heads=1, page=128, fp8=True, **local),
        Case((131_072, 3), (1, 1), heads=8, kv_heads=1, fp8=True),
        Case((4097, 1025, 513, 2), (2, 2, 1, 2), heads=16, kv_heads=2, fp8=True),
        Case((4097, 1025, 513, 9), (9, 5, 0, 9), heads=16, kv_heads=2, fp8=True),
        Case(contexts, ones, heads=8, kv_heads=2, **local),
        Case(contexts, ones, heads=2, kv_heads=2),
        Case(contexts, ones, heads=8, kv_heads=1, page=128),
        Case((700, 0, 64, 900), (1, 0, 1, 1), heads=8, kv_heads=1, page=128, **local),
        Case((131_072, 3), (1, 1), heads=8, kv_heads=1),
        Case((4097, 1025, 513, 2), (2, 2, 1, 2), heads=16, kv_heads=2),
        Case((4097, 1025, 513, 9), (9, 5, 0, 9), heads=16, kv_heads=2),
        Case((4097, 1025, 513, 9), (9, 5, 0, 9), heads=8, kv_heads=2, **local),
        Case((4097, 600, 513, 9), (8, 5, 0, 8), heads=16, kv_heads=2, page=128, **local),
        Case((1100, 70), (1, 1), heads=8, kv_heads=1, width=64),
        Case((1_048_575, 70), (1, 1), heads=4, kv_heads=1),
        Case((1_048_575, 1_048_570), (9, 1), heads=4, kv_heads=1, **local),
        *(Case((1, 512, 700, 4097), (1, 2, 1, 2), heads=8, kv_heads=2, read_out=d) for d in (0, 1, 127, 128, 1023)),
        *(Case((1, 512, 700, 4097), (1, 2, 1, 2), heads=8, kv_heads=2, read_out=d, page=128, **local) for d in (0, 127, 511)),
    ]


def prefill_cases() -> list[Case]:
    """Chunks around tile edges, with and without history, ragged, among idle and short rows; windows, ratios, pages, widths."""
    chunks, history = (16, 64, 200, 512), (1000, 37, 513, 4097)
    longer = tuple(a + b for a, b in zip(chunks, history, strict=True))
    local: dict[str, Any] = {"window": 512, "extent": 512}
    mixed, mixed_counts = (4097, 9, 1200, 600, 0, 1025), (1, 9, 300, 1, 0, 65)
    found = []
    kind: dict[str, Any]
    for kind in ({"heads": 16, "kv_heads": 2}, {"heads": 8, "kv_heads": 2, **local}):
        found += [Case((count,), (count,), **kind) for count in chunks]
        found += [
            Case(chunks, chunks, **kind),
            Case(longer, chunks, **kind),
            Case(longer, chunks, page=128, **kind),
            Case((2048,), (2048,), page=128, **kind),
            Case((6149,), (2048,), **kind),
            Case(mixed, mixed_counts, **kind),
            Case((16,), (16,), fp8=True, **kind),
            Case(longer, chunks, fp8=True, **kind),
            Case(mixed, mixed_counts, page=128, fp8=True, **kind),
            Case((6149,), (2048,), fp8=True, **kind),
        ]
    return [
        *found,
        Case((2048, 300), (2048, 200), heads=8, kv_heads=1, **local),
        Case((2048, 300), (2048, 200), heads=8, kv_heads=2),
        Case((300, 90), (200, 90), heads=2, kv_heads=2),
        Case((300, 90), (200, 90), heads=8, kv_heads=1, width=64),
        Case((1_048_575, 1_048_000), (100, 64), heads=4, kv_heads=1, **local),
        *(Case((200, 1400), (200, 300), heads=heads, kv_heads=1, read_out=d) for d in (0, 1, 127, 128, 1023) for heads in (4, 8)),
        *(Case((200, 1400), (200, 300), heads=4, kv_heads=1, read_out=d, page=128, **local) for d in (0, 127, 511)),
    ]
