"""Inputs of the append of keys and values that its tests on the CPU and on the GPU share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_jax.kernels.kv_append.reference import Kept, Weights
from inkling_jax.kernels.pages import Fp8Pages
from inkling_jax.kernels.residual.cases import BEGINNING, EPS, Answer, Rounding, convolved_rows, normed, rows_of
from inkling_jax.kernels.ring import Rows

RANK = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows at these positions (None: idle) and the heads of a layer; a table of fewer columns than pages is a ring."""

    positions: tuple[int | None, ...]
    kv_heads: int = 2
    share: int = 4
    width: int = 128
    page: int = 64
    columns: int = 9
    scaled: bool = False
    fp8: bool = False  # pages are

    @property
    def name(self) -> str:
        """Stable, without spaces."""
        heads = f"{self.kv_heads * self.share}q{self.kv_heads}kv-width{self.width}"
        return (
            f"T{len(self.positions)}-{heads}-page{self.page}" + ("-scaled" if self.scaled else "") + ("-fp8" if self.fp8 else "")
        )


CASES = (
    Case(BEGINNING),
    Case(BEGINNING, kv_heads=1, share=8, scaled=True),
    Case((127,), kv_heads=1, share=8, page=128, scaled=True),
    Case((63, 64, None), kv_heads=3, share=1, width=64),
    Case((700, None), kv_heads=16, share=4),
    Case(tuple(range(120, 138)), kv_heads=4, share=2, page=128, columns=2),
    Case(BEGINNING, fp8=True),
    Case((127, None, 64), kv_heads=3, share=1, page=128, fp8=True),
)


def inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments of `append` by name, bfloat16. Pages are shuffled, the last row's is not there; see residual.cases for states."""
    rng = np.random.default_rng(seed)
    rows = rows_of(case.positions, rng)
    tokens, heads = len(case.positions), (case.kv_heads, case.width)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)

    states = [normal(tokens + 1, 3, *heads) for _ in "kv"]
    for slot, position in zip(rows[0], case.positions, strict=True):
        for state in states:
            if position is not None and position < 3:
                state[slot, position:] = np.nan
    pages = tokens * case.columns
    table = rng.permutation(pages).reshape(tokens, case.columns)
    if tokens > 1:
        table[-1] = pages
    pools: list[Any] = [normal(pages, case.kv_heads, case.page, case.width) for _ in "kv"]
    if case.fp8:
        codes = [rng.integers(0, 0x7F, pool.shape, np.uint8) for pool in pools]
        pools = [Fp8Pages(jnp.asarray(each), jnp.ones(each.shape[:-1], jnp.float32)) for each in codes]
    group = (case.share + 2) * case.width + case.share * RANK
    weights = (normal(*heads, 4), normal(*heads, 4), normal(case.width), normal(case.width))
    tau = jnp.asarray(1 + rng.random(tokens), jnp.float32) if case.scaled else None
    return {
        "projected": jnp.asarray(normal(tokens, case.kv_heads, group)),
        "weights": Weights(*map(jnp.asarray, weights)),
        "tau": tau,
        "kept": jax.tree.map(jnp.asarray, Kept(*pools, *states)),
        "table": jnp.asarray(table, jnp.int32),
        "rows": Rows(*map(jnp.asarray, rows)),
        "rank": RANK,
        "eps": EPS,
    }


def floats(array: Any) -> np.ndarray:
    """Also of pages in fp8."""
    if not isinstance(array, Fp8Pages):
        return np.asarray(array, np.float64)
    return np.asarray(array.codes).view(jnp.float8_e4m3fn).astype(np.float64) * np.asarray(array.scale)[..., None]


def expected(case: Case, given: Mapping[str, Any], rounded: Rounding = lambda x: x) -> dict[str, Answer]:
    """What the definition (spec 2.3, 2.4) makes of inputs(case), in float64 but for `rounded`: q, rel, and what is kept.

    Pages in fp8 are the numbers that they stand for, before the new ones are rounded to them.
    """
    weights, kept = ({n: floats(a) for n, a in given[name]._asdict().items()} for name in ("weights", "kept"))
    rows, tokens = given["rows"], len(case.positions)
    q, k, v, rel = np.split(
        np.asarray(given["projected"], np.float64), case.width * np.arange(case.share, case.share + 3), axis=-1
    )
    q, rel = q.reshape(tokens, -1, case.width), rel.reshape(tokens, -1, RANK)
    q = normed(q, weights["q_norm"], rounded)
    if given["tau"] is not None:
        tau = np.asarray(given["tau"], np.float64)[:, None, None]
        q, rel = rounded(q * tau), rounded(rel * tau)
    for name, x in (("k", k), ("v", v)):
        new, kept[f"{name}_state"] = convolved_rows(x, weights[f"{name}_taps"], kept[f"{name}_state"], rows)
        new, pool = rounded(new), kept[f"{name}_pages"]
        if name == "k":
            new = normed(new, weights["k_norm"], rounded)
        for token, position in enumerate(case.positions):
            if position is not None:
                page = np.asarray(given["table"])[token, position // case.page % case.columns]
                pool[page : page + 1, :, position % case.page] = new[token]  # nowhere, if there is no such page
    return {"q": q, "rel": rel} | kept
