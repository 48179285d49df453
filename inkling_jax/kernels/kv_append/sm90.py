"""The append of keys and values on Hopper: one launch, a warp a head and token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from inkling_jax.kernels.kv_append import device
from inkling_jax.kernels.kv_append.reference import Appended, Kept, Weights
from inkling_jax.kernels.launch import launch
from inkling_jax.kernels.pages import Fp8Pages, parts
from inkling_jax.kernels.ring import Rows


@functools.partial(jax.jit, static_argnames=("rank", "eps"))
def append(
    projected: BFloat16[Array, "T K group"],
    weights: Weights,
    tau: Float[Array, " T"] | None,
    kept: Kept,
    table: Int[Array, "T width"],
    rows: Rows,
    *,
    rank: int,
    eps: float,
) -> Appended:
    """See `reference.append`; heads of width 64 or 128, in fp8 of 128. A jit of its own: layers of a kind lower it once."""
    pages, kv_heads, page, width = kept.k_pages.shape
    tokens, _, group = projected.shape
    share = (group - 2 * width) // (width + rank)
    fp8 = isinstance(kept.k_pages, Fp8Pages)
    shape = device.Shape(tokens, kv_heads, share, width, rank, pages, page, table.shape[1], tau is not None, eps, fp8)
    pools = parts(kept.k_pages, kept.v_pages)
    operands = {"projected": projected, "table": table} | weights._asdict() | rows._asdict()
    made = launch(
        "kv_append",
        functools.partial(device.append, shape),
        operands=operands if tau is None else operands | {"tau": tau},
        changed=pools | {"k_state": kept.k_state, "v_state": kept.v_state},
        results={
            "q": jax.ShapeDtypeStruct((tokens, kv_heads * share, width), jnp.bfloat16),
            "rel": jax.ShapeDtypeStruct((tokens, kv_heads * share, rank), jnp.bfloat16),
        },
        shared={},
        programs=shape.programs,
    )
    k_pages, v_pages = (Fp8Pages(made[f"{w}_pages"], made[f"{w}_scale"]) if fp8 else made[f"{w}_pages"] for w in "kv")
    return Appended(made["q"], made["rel"], Kept(k_pages, v_pages, made["k_state"], made["v_state"]))
