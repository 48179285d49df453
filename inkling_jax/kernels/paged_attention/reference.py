"""Paged attention in plain JAX: blocks of queries against blocks of keys with a running softmax.

No array spans tokens x heads x extent or tokens x keys: memory is bounded by SCORE_ELEMENTS whatever the prompt. Every loop has a
static trip count, so that the function is reverse-differentiable.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from inkling_jax.kernels.mapping import map_after
from inkling_jax.kernels.pages import Fp8Pages, Pages, decode

QUERY_BLOCK = 64  # query tokens of one row that share a gather of keys
KEY_BLOCK = 512  # keys a step of the running softmax where queries come in blocks
SCORE_ELEMENTS = 1 << 24  # scores held at once, over all rows worked on together


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Static sizes of the loops."""

    queries: int  # query tokens a work item
    items: int  # upper bound on work items
    group: int  # items worked on together
    pages: int  # pages a key block
    steps: int  # key blocks


def paged_attention(
    q: Float[Array, "T N H"],
    rel: Float[Array, "T N r"],
    rel_bias: Float[Array, "R r"],
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
) -> Float[Array, "T N H"]:
    """softmax(q.k/H + bias) v for every query token, zero for tokens that no row owns.

    Row b owns tokens start[b] .. start[b]+count[b], the last count[b] of its length[b] positions; their keys are in the pages
    already. Absolute page a of row b is table[b, a % width]. The bias of a pair at distance d is rel . rel_bias[d] if d < R,
    else zero.
    `window` keys are visible (itself included), None: all. `longest` bounds count, `context` bounds length (statically).
    Keys and values in fp8 are multiplied as their e4m3 numbers; the scales multiply scores and weights, in float32.
    What lies past a row's length, or in pages that it does not own, may be anything, NaN included.
    """
    tokens, heads, width = q.shape
    kv_heads, page = k_pages.shape[1], k_pages.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide over {kv_heads} key heads")
    blocks = block_sizes(tokens, heads, start.shape[0], page, window, longest, context)
    item_row, item_first = _work_items(count, blocks, longest)
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, width)
    rel = rel.reshape(tokens, kv_heads, heads // kv_heads, -1)

    def group(item: tuple[Array, Array]) -> Array:
        row, first = item
        offset = first[:, None] + jnp.arange(blocks.queries)
        live = offset < count[row][:, None]
        token = jnp.where(live, start[row][:, None] + offset, 0)
        position = (length - count)[row][:, None] + offset
        queries = (grouped[token], rel[token], jnp.where(live, position, -1))

        def attend(_: None) -> Array:
            return _attend(queries, rel_bias, k_pages, v_pages, table[row], length[row], window, blocks).astype(q.dtype)

        if blocks.items == blocks.group:
            return attend(None)
        idle = jnp.zeros((*token.shape, kv_heads, heads // kv_heads, width), q.dtype)
        return jax.lax.cond(live.any(), attend, lambda _: idle, None)

    split = (item_row.reshape(-1, blocks.group), item_first.reshape(-1, blocks.group))
    out = map_after(q, group, split) if split[0].shape[0] > 1 else group((split[0][0], split[1][0]))
    out = out.reshape(-1, blocks.queries, heads, width)
    if longest == 1:
        return out[:tokens, 0]
    offset = item_first[:, None] + jnp.arange(blocks.queries)
    target = jnp.where(offset < count[item_row][:, None], start[item_row][:, None] + offset, tokens)
    return jnp.zeros_like(q).at[target].set(out, mode="drop")


def block_sizes(tokens: int, heads: int, rows: int, page: int, window: int | None, longest: int, context: int) -> Blocks:
    """The loops over `tokens` query tokens in `rows` rows: a function of static sizes alone, as is the memory that they take."""
    queries = min(QUERY_BLOCK, longest)
    items = rows if longest == 1 else -(-tokens // queries) + rows
    keys = context if window is None else min(context, window + queries + page)
    pages = max(1, -(-keys // page))
    step = max(KEY_BLOCK, SCORE_ELEMENTS // (heads * items)) if longest == 1 else KEY_BLOCK
    block = min(pages, max(1, step // page))
    group = max(1, min(items, SCORE_ELEMENTS // (heads * queries * block * page)))
    return Blocks(queries, -(-items // group) * group, group, block, -(-pages // block))


def _work_items(count: Int[Array, " B"], blocks: Blocks, longest: int) -> tuple[Int[Array, " I"], Int[Array, " I"]]:
    """Row and first query offset of each block of queries; surplus items start past their row's end."""
    item = jnp.arange(blocks.items)
    if longest == 1:
        row = jnp.minimum(item, count.shape[0] - 1)
        return row, item - row
    ends = jnp.cumsum(-(-count // blocks.queries))
    row = jnp.minimum(jnp.searchsorted(ends, item, side="right", method="compare_all"), count.shape[0] - 1)
    before = jnp.where(row > 0, ends[row - 1], 0)
    return row, (item - before) * blocks.queries


def _attend(queries, rel_bias, k_pages, v_pages, table, length, window, blocks: Blocks) -> Float[Array, "g q K n H"]:
    """Running softmax of one group of items over all their key blocks."""
    q, rel, position = queries
    page, extent = k_pages.shape[2], rel_bias.shape[0]
    oldest = jnp.maximum(position[:, 0] - window + 1, 0) if window else jnp.zeros_like(position[:, 0])
    scale = 1.0 / q.shape[-1]

    def keys_of(step: Array) -> tuple[_Block, _Block, Array]:
        absolute = (oldest // page)[:, None] + step * blocks.pages + jnp.arange(blocks.pages)
        ids = jnp.take_along_axis(table, absolute % table.shape[1], axis=1)
        key_position = (absolute[:, :, None] * page + jnp.arange(page)).reshape(absolute.shape[0], -1)
        present = key_position < length[:, None]
        # Without a barrier XLA works these few numbers out anew for every element that it gathers by them.
        ids, present, key_position = jax.lax.optimization_barrier((ids, present, key_position))
        return (
            _gather(k_pages, ids, present, q.dtype),
            _gather(v_pages, ids, present, q.dtype),
            jnp.where(present, key_position, jnp.iinfo(jnp.int32).max),
        )

    def update(carry, step):
        top, total, out = carry
        (k, k_scale), (v, v_scale), key_position = keys_of(step)
        distance = position[:, :, None] - key_position[:, None, :]
        bias_rows = jnp.where(((distance >= 0) & (distance < extent))[..., None], rel_bias[jnp.clip(distance, 0, extent - 1)], 0)
        score = jnp.einsum("gqKnh,gKsh->gKnqs", q, k, preferred_element_type=jnp.float32) * scale
        score = _times(score, k_scale)
        score = score + jnp.einsum("gqKnr,gqsr->gKnqs", rel, bias_rows, preferred_element_type=jnp.float32)
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        score = jnp.where(visible[:, None, None], score, -jnp.inf)
        new_top = jnp.maximum(top, score.max(-1))
        base = jnp.where(jnp.isfinite(new_top), new_top, 0.0)  # a row that sees no key yet: exp(-inf) = 0, never NaN
        weight = jnp.exp(score - base[..., None])
        shrink = jnp.exp(top - base)
        out = out * shrink[..., None] + jnp.einsum(
            "gKnqs,gKsh->gKnqh", _times(weight, v_scale).astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return new_top, total * shrink + weight.sum(-1), out

    def visit(carry, step):
        first = (oldest // page + step * blocks.pages) * page
        return jax.lax.cond((first <= position.max(-1)).any(), update, lambda carry, _: carry, carry, step), None

    g, n_q, kv_heads, share, width = q.shape
    carry = (
        jnp.full((g, kv_heads, share, n_q), -jnp.inf),
        jnp.zeros((g, kv_heads, share, n_q)),
        jnp.zeros((g, kv_heads, share, n_q, width)),
    )
    if blocks.steps == 1:
        carry = update(carry, 0)
    else:
        carry, _ = jax.lax.scan(visit, carry, jnp.arange(blocks.steps))
    _, total, out = carry
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return jnp.transpose(out, (0, 3, 1, 2, 4))


_Block = tuple[Array, Array | None]  # numbers [g, K, s, H], and in fp8 their scales [g, K, s]


def _gather(pages: Pages, ids: Int[Array, "g p"], present: Bool[Array, "g s"], dtype: jnp.dtype) -> _Block:
    """The keys or values of a block, zero where absent (0 x NaN is NaN, so what is absent must not be multiplied)."""

    def block(pool: Array) -> Array:
        taken = jnp.swapaxes(jnp.take(pool, ids, axis=0, mode="clip"), 1, 2)
        taken = taken.reshape(*taken.shape[:2], -1, *taken.shape[4:])
        return jnp.where(present.reshape(-1, 1, present.shape[1], *(1,) * (taken.ndim - 3)), taken, 0)

    if isinstance(pages, Fp8Pages):
        return decode(block(pages.codes), dtype), block(pages.scale)
    return block(pages), None


def _times(score: Float[Array, "g K n q s"], scale: Float[Array, "g K s"] | None) -> Float[Array, "g K n q s"]:
    return score if scale is None else score * scale[:, :, None, None, :]
