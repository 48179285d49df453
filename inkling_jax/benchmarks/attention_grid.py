"""The cases of the attention benchmark, in groups of equal shapes, and what bounds their time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from inkling_jax.kernels.paged_attention.cases import Case

KINDS = (
    (64, 8, None),
    (64, 16, 512),
    (32, 8, None),
    (32, 8, 512),
    (8, 1, None),
    (8, 2, 512),
    (4, 1, None),
)  # heads, of keys, window
CONTEXTS = (1024, 8192, 65_536)
LONGEST = (131_072, 1_048_576)  # of one row
RAGGED = tuple(int(length) for length in np.geomspace(100, 65_536, 64))
PROMPTS = ((2048, 0), (2048, 32_768), (8192, 0), (32_768, 0))  # new tokens, and those before them


def decode_groups() -> Iterator[list[Case]]:
    """Batches and contexts, global and window layers, whole heads and one rank of eight, in bfloat16 and in fp8."""
    for fp8, (heads, kv_heads, window) in itertools.product((False, True), KINDS):
        for batch in (1, 16, 64):
            lengths = [(context,) * batch for context in (*CONTEXTS, *(LONGEST if batch == 1 else ()))]
            lengths += [RAGGED] if batch == 64 else []
            yield [Case(each, (1,) * batch, heads, kv_heads, window, window or 1024, fp8=fp8) for each in lengths]


def prefill_groups() -> Iterator[list[Case]]:
    """One prompt or chunk of one, in bfloat16 and in fp8."""
    for fp8, (heads, kv_heads, window) in itertools.product((False, True), KINDS):
        for new in dict.fromkeys(new for new, _ in PROMPTS):
            olds = [old for count, old in PROMPTS if count == new]
            yield [Case((old + new,), (new,), heads, kv_heads, window, window or 1024, fp8=fp8) for old in olds]


def pairs(case: Case) -> int:
    """Pairs of a query and a key that it sees."""
    total = 0
    for length, count in zip(case.lengths, case.counts, strict=True):
        seen = np.arange(length - count, length) + 1
        total += int((np.minimum(seen, case.window) if case.window else seen).sum())
    return total


def bound_seconds(case: Case, read: float, operations: float) -> float:
    """Reading keys and values at `read` bytes a second, or both products at `operations` a second (the bias not counted)."""
    return max(case.key_bytes / read, 4 * case.width * case.heads * pairs(case) / operations)
