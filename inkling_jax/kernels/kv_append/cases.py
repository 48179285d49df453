"""Inputs of the append of keys and values that its tests on the CPU and on the GPU share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from inkling_jax.kernels.kv_append.reference import Kept, Weights
from inkling_jax.kernels.residual.cases import BEGINNING, EPS, rows_of

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

    @property
    def name(self) -> str:
        """Stable, without spaces."""
        heads = f"{self.kv_heads * self.share}q{self.kv_heads}kv-width{self.width}"
        return f"T{len(self.positions)}-{heads}-page{self.page}" + ("-scaled" if self.scaled else "")


CASES = (
    Case(BEGINNING),
    Case(BEGINNING, kv_heads=1, share=8, scaled=True),
    Case((127,), kv_heads=1, share=8, page=128, scaled=True),
    Case((63, 64, None), kv_heads=3, share=1, width=64),
    Case((700, None), kv_heads=16, share=4),
    Case(tuple(range(120, 138)), kv_heads=4, share=2, page=128, columns=2),
)


def inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments of `append` by name, bfloat16. Pages are shuffled, the last row's is not there; see residual.cases for states."""
    rng = np.random.default_rng(seed)
    rows, slots = rows_of(case.positions, rng)
    tokens, heads = len(case.positions), (case.kv_heads, case.width)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)

    states = [normal(slots, 3, *heads) for _ in "kv"]
    for slot, position in zip(np.asarray(rows.slot), case.positions, strict=True):
        for state in states:
            if position is not None and position < 3:
                state[slot, position:] = np.nan
    pages = tokens * case.columns
    table = rng.permutation(pages).reshape(tokens, case.columns)
    if tokens > 1:
        table[-1] = pages
    pools = [normal(pages, case.kv_heads, case.page, case.width) for _ in "kv"]
    group = (case.share + 2) * case.width + case.share * RANK
    weights = (normal(*heads, 4), normal(*heads, 4), normal(case.width), normal(case.width))
    tau = jnp.asarray(1 + rng.random(tokens), jnp.float32) if case.scaled else None
    return {
        "projected": jnp.asarray(normal(tokens, case.kv_heads, group)),
        "weights": Weights(*map(jnp.asarray, weights)),
        "tau": tau,
        "kept": Kept(*map(jnp.asarray, (*pools, *states))),
        "table": jnp.asarray(table, jnp.int32),
        "rows": rows,
        "rank": RANK,
        "eps": EPS,
    }
