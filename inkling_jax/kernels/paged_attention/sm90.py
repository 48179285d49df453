"""Paged attention with the learned relative bias on Hopper GPUs: the reference's semantics in bfloat16, at the speed of memory.

A model holds `prepare_bias(rel_bias)` of each layer in place of rel_bias: tables made of the weight alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from inkling_jax.kernels.paged_attention.bias import RelativeBias, halved_rows, padded_share
from inkling_jax.kernels.paged_attention.decode import decode
from inkling_jax.kernels.paged_attention.decode_shape import MOST_QUERIES, DecodeShape
from inkling_jax.kernels.paged_attention.merge import merge
from inkling_jax.kernels.paged_attention.plan import DecodePlan, plan_decode, plan_fixed
from inkling_jax.kernels.paged_attention.prefill import prefill
from inkling_jax.kernels.paged_attention.prefill_plan import PrefillPlan, plan_prefill
from inkling_jax.kernels.paged_attention.prefill_shape import MOST_SHARE, PrefillShape, tile_tokens
from inkling_jax.kernels.pages import Fp8Pages, Pages, parts

PAGE_SIZES = (64, 128)
HEAD_WIDTHS = (64, 128)
FP8_WIDTH = 128  # as kv_append makes them
REL_RANK = 16
PROCESSORS = 132  # of H100 and H200; another count only spreads the work less evenly
SHORTEST_RUN = 2  # key tiles that are worth a program and the merge of its part


def processors() -> int:
    """Streaming multiprocessors of the default device, or those of an H200 where it is no GPU."""
    device = jax.devices()[0]
    return getattr(device, "core_count", PROCESSORS) if device.platform == "gpu" else PROCESSORS


def is_decode(longest: int) -> bool:
    """Whether rows of at most `longest` query tokens go through the decode kernel; the prefill kernel takes any."""
    return longest <= MOST_QUERIES


def prefill_plan(
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    length: Int[Array, " B"],
    *,
    tokens: int,
    share: int,
    window: int | None,
) -> PrefillPlan:
    """The tiles of queries of a step, shared by all layers with this share of heads and window."""
    return plan_prefill(start, count, length, tokens=tokens, tile=tile_tokens(padded_share(share)), window=window)


def decode_plan(
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    length: Int[Array, " B"],
    *,
    tokens: int,
    kv_heads: int,
    window: int | None,
    fixed: int | None = None,
) -> DecodePlan:
    """The division of a decode step's keys over the processors, shared by all layers with these heads and window.

    `fixed`: a bound on the lengths, for a division in which no row's part depends on other rows; None: for equal shares.
    """
    if fixed is not None:
        return plan_fixed(start, count, length, tokens=tokens, kv_heads=kv_heads, window=window, context=fixed)
    return plan_decode(
        start,
        count,
        length,
        tokens=tokens,
        kv_heads=kv_heads,
        window=window,
        programs=processors(),
        shortest=SHORTEST_RUN,
    )


def paged_attention(
    q: Float[Array, "T N H"],
    rel: Float[Array, "T N r"],
    bias: RelativeBias,
    k_pages: Pages,
    v_pages: Pages,
    table: Int[Array, "B width"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    length: Int[Array, " B"],
    plan: DecodePlan | PrefillPlan,
    *,
    window: int | None,
    longest: int,
) -> Float[Array, "T N H"]:
    """As reference.paged_attention, with the bias in prepared form. Arrays are bfloat16, pages that or fp8, of 64 or 128 tokens.

    `plan`: decode_plan() or prefill_plan() of these rows, which layers share.
    """
    check(q, rel, k_pages, v_pages)
    arguments = (q, rel, bias, k_pages, v_pages, table, start, count, length)
    if isinstance(plan, PrefillPlan):
        return run_prefill(*arguments, plan, window=window, programs=processors())
    if not is_decode(longest):
        raise ValueError(
            f"{longest} query tokens a row: the decode kernel takes at most {MOST_QUERIES}; the prefill kernel takes any"
        )
    return run_decode(*arguments, plan, window=window, longest=longest)


def unsupported(page: int, width: int, rank: int, share: int, fp8: bool = False) -> str | None:
    """Why the kernels cannot take these pages and heads; None: they can.

    page: tokens of one. width, rank: channels and bias coefficients of a head. share: query heads of a key head. fp8: keys and
    values are.
    """
    if page not in PAGE_SIZES:
        return f"pages of {page} tokens: the kernels take {PAGE_SIZES}; the reference takes any power of two"
    if width not in HEAD_WIDTHS:
        return f"heads of width {width}: the kernels take {HEAD_WIDTHS}; the reference takes any"
    if fp8 and width != FP8_WIDTH:
        return f"heads of width {width} in fp8: the kernels take {FP8_WIDTH}; the reference takes any"
    if rank != REL_RANK:
        return f"{rank} bias coefficients a head: the kernels take {REL_RANK}; the reference takes any"
    if share > MOST_SHARE:
        return f"{share} query heads a key head: the kernels take at most {MOST_SHARE}; the reference takes any"
    return None


def check(q: Array, rel: Array, k_pages: Pages, v_pages: Pages) -> None:
    """Raise ValueError, naming the sizes that would do, for arrays that the kernels cannot take."""
    heads, width = q.shape[1:]
    kv_heads, page = k_pages.shape[1], k_pages.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide over {kv_heads} key heads")
    fp8 = isinstance(k_pages, Fp8Pages)
    reason = unsupported(page, width, rel.shape[-1], heads // kv_heads, fp8)
    if reason is not None:
        raise ValueError(reason)
    for name, array in {"q": q, "rel": rel, **({} if fp8 else parts(k_pages, v_pages))}.items():
        if array.dtype != jnp.bfloat16:
            raise ValueError(f"{name} is {array.dtype}: the kernels take bfloat16; the reference takes any")


@functools.partial(jax.jit, static_argnames=("window", "longest", "overlap_merge", "interpret"))
def run_decode(
    q: Array,
    rel: Array,
    bias: RelativeBias,
    k_pages: Pages,
    v_pages: Pages,
    table: Array,
    start: Array,
    count: Array,
    length: Array,
    plan: DecodePlan,
    *,
    window: int | None,
    longest: int,
    overlap_merge: bool = True,
    interpret: bool = False,
) -> Array:
    """The decode kernel and its merge, over as many programs as `plan` has. A jit of its own: layers of a step lower it once."""
    kv_heads = k_pages.shape[1]
    heads = q.shape[1]
    share = heads // kv_heads
    q, rel = (pad_share(array, kv_heads) for array in (q, rel))
    shape = DecodeShape(
        queries=min(longest, q.shape[0]),
        share=padded_share(share),
        kv_heads=kv_heads,
        width=q.shape[2],
        rank=rel.shape[2],
        extent=bias.weight.shape[0],
        page=k_pages.shape[2],
        window=window,
        programs=plan.row.shape[0],
        fp8=isinstance(k_pages, Fp8Pages),
        interpret=interpret,
        overlap_merge=overlap_merge and not interpret,
    )
    mode: Any = plgpu.InterpretGPUParams() if interpret else None
    parts = decode(q, rel, bias.reversed, k_pages, v_pages, table, start, count, length, plan, shape, mode)
    out = merge(*parts, start, count, plan, shape, mode)
    return drop_padding(out, kv_heads, share)


@functools.partial(jax.jit, static_argnames=("window", "programs", "interpret", "options"))
def run_prefill(
    q: Array,
    rel: Array,
    bias: RelativeBias,
    k_pages: Pages,
    v_pages: Pages,
    table: Array,
    start: Array,
    count: Array,
    length: Array,
    plan: PrefillPlan,
    *,
    window: int | None,
    programs: int,
    options: tuple[tuple[str, Any], ...] = (),
    interpret: bool = False,
) -> Array:
    """The prefill kernel. A jit of its own: layers of a step lower it once."""
    kv_heads, fp8 = k_pages.shape[1], isinstance(k_pages, Fp8Pages)
    share = q.shape[1] // kv_heads
    q, rel = (pad_share(array, kv_heads) for array in (q, rel))
    shape = PrefillShape(
        share=padded_share(share),
        kv_heads=kv_heads,
        width=q.shape[2],
        extent=bias.weight.shape[0],
        page=k_pages.shape[2],
        window=window,
        programs=programs,
        table_rows=halved_rows(bias.weight.shape[0]),
        interpret=interpret,
        fp8=fp8,
        **({"stages": 1} if fp8 else {}),
        **dict(options),
    )
    mode: Any = plgpu.InterpretGPUParams() if interpret else None
    out = prefill(q, rel, bias.halved, k_pages, v_pages, table, start, count, length, plan, shape, mode)
    return drop_padding(out, kv_heads, share)


def pad_share(array: Float[Array, "T N x"], kv_heads: int) -> Float[Array, "T M x"]:
    """`array` with zero heads added to each key head's, to the number that the kernels count in."""
    tokens, heads, width = array.shape
    share = heads // kv_heads
    if padded_share(share) == share:
        return array
    grouped = array.reshape(tokens, kv_heads, share, width)
    return jnp.pad(grouped, ((0, 0), (0, 0), (0, padded_share(share) - share), (0, 0))).reshape(tokens, -1, width)


def drop_padding(out: Float[Array, "T M H"], kv_heads: int, share: int) -> Float[Array, "T N H"]:
    """What pad_share added, taken away again."""
    tokens, heads, width = out.shape
    if heads == kv_heads * share:
        return out
    return out.reshape(tokens, kv_heads, -1, width)[:, :, :share].reshape(tokens, kv_heads * share, width)
