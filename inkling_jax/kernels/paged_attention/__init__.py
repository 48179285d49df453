"""Attention over a paged cache with a learned relative bias (spec 2.3).

The form of the bias chooses the implementation: the weight as it is runs anywhere, its tables (`bias.prepare_bias`) on Hopper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxtyping import Array, Float, Int

from inkling_jax.kernels.paged_attention import reference
from inkling_jax.kernels.paged_attention.bias import RelativeBias, prepare_bias
from inkling_jax.kernels.pages import Pages

if TYPE_CHECKING:
    from inkling_jax.kernels.paged_attention.plan import DecodePlan
    from inkling_jax.kernels.paged_attention.prefill_plan import PrefillPlan

__all__ = ["RelativeBias", "paged_attention", "plan_attention", "prepare_bias"]


def plan_attention(
    rel_bias: Float[Array, "R r"] | RelativeBias,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    length: Int[Array, " B"],
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    window: int | None,
    longest: int,
    fixed: int | None = None,
) -> DecodePlan | PrefillPlan | None:
    """How a step's work is divided, the same for all layers with these heads and this window. None: the reference runs.

    `fixed`, in decode: a bound on the lengths, so that no row's results depend on which other rows there are.
    """
    if not isinstance(rel_bias, RelativeBias):
        return None
    from inkling_jax.kernels.paged_attention import sm90  # Pallas' GPU half takes a while to import, and few need it

    if sm90.is_decode(longest):
        return sm90.decode_plan(start, count, length, tokens=tokens, kv_heads=kv_heads, window=window, fixed=fixed)
    return sm90.prefill_plan(start, count, length, tokens=tokens, share=heads // kv_heads, window=window)


def paged_attention(
    q: Float[Array, "T N H"],
    rel: Float[Array, "T N r"],
    rel_bias: Float[Array, "R r"] | RelativeBias,
    k_pages: Pages,
    v_pages: Pages,
    table: Int[Array, "B width"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    length: Int[Array, " B"],
    *,
    window: int | None,
    longest: int,
    context: int,
    plan: DecodePlan | PrefillPlan | None = None,
) -> Float[Array, "T N H"]:
    """See `reference.paged_attention`. `plan`: plan_attention() of these rows."""
    rows = (k_pages, v_pages, table, start, count, length)
    if isinstance(rel_bias, RelativeBias):
        assert plan is not None  # of the same form
        from inkling_jax.kernels.paged_attention import sm90

        return sm90.paged_attention(q, rel, rel_bias, *rows, plan, window=window, longest=longest)
    return reference.paged_attention(q, rel, rel_bias, *rows, window=window, longest=longest, context=context)
