"""The routed feed-forward in plain JAX: rows sorted by expert, cut into tiles of one expert each, a few tiles at a time.

Only experts that are hit are read (a tile exists where rows do), and at most DEQUANTIZED_ELEMENTS weights are unpacked at once.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from inkling_jax.kernels.expert_matmul.nvfp4 import Calibrated, Nvfp4, dequantize, quantize_activations
from inkling_jax.kernels.mapping import map_after

DEQUANTIZED_ELEMENTS = 1 << 27
MAX_TILE_ROWS = 128

Weight = Array | Nvfp4 | Calibrated


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Rows sorted by expert and cut into tiles of `rows`; `count` is a static upper bound."""

    rows: int
    token: Int[Array, "count rows"]  # which token each row of a tile is; out of range where none
    expert: Int[Array, " count"]  # whose weights a tile needs
    used: Int[Array, " count"]  # rows of a tile that exist
    place: Int[Array, "T A"]  # row of the tiles, laid end to end, that answers each token and choice; out of range where none


def expert_matmul(
    x: Float[Array, "T D"], experts: Int[Array, "T A"], weights: Float[Array, "T A"], w13: Weight, w2: Weight
) -> Float[Array, "T D"]:
    """sum_a weights[t, a] * W2_e(silu(gate_e x_t) * up_e x_t), e = experts[t, a], accumulated in float32 in the order of a.

    w13 is [E, 2, F, D] (gate, up) and w2 [E, D, F], each an array, Nvfp4 or Calibrated. An index outside 0..E-1 contributes
    nothing: so a rank skips experts that it does not hold, and padding tokens skip all.
    """
    tiles = _cut(experts, jax.tree.leaves(w13)[0].shape[0])
    elements = max(_elements(w) for w in (w13, w2))
    count = tiles.expert.shape[0]
    group = tiles_at_once(count, elements)
    steps = -(-count // group)
    pad = steps * group - count

    def work(item: tuple[Array, Array, Array]) -> Array:
        token, expert, used = item

        def multiply(_: None) -> Array:
            rows = jnp.take(x, token, axis=0, mode="clip")
            hidden = _product("brd,bgfd->brgf", rows, _of(w13, expert), jnp.float32)
            hidden = (jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1]).astype(x.dtype)
            return _product("brf,bdf->brd", hidden, _of(w2, expert), x.dtype)

        if steps == 1:
            return multiply(None)
        return jax.lax.cond((used > 0).any(), multiply, lambda _: jnp.zeros((*token.shape, x.shape[1]), x.dtype), None)

    def padded(a: Array) -> Array:
        return jnp.pad(a, ((0, pad),) + ((0, 0),) * (a.ndim - 1)).reshape(steps, group, *a.shape[1:])

    items = (padded(tiles.token), padded(tiles.expert), padded(tiles.used))
    out = work(jax.tree.map(lambda a: a[0], items)) if steps == 1 else map_after(x, work, items)
    out = out.reshape(-1, x.shape[1])
    chosen = jnp.take(out, tiles.place, axis=0, mode="fill", fill_value=0).astype(jnp.float32)
    return jnp.sum(chosen * weights[..., None], axis=1).astype(x.dtype)


def tile_sizes(total: int, num_experts: int) -> tuple[int, int]:
    """Rows of a tile, and the most tiles that there can be, for `total` rows of all experts together."""
    rows = min(MAX_TILE_ROWS, 1 << max(0, total // num_experts - 1).bit_length())
    return rows, min(total, total // rows + min(num_experts, total))


def tiles_at_once(count: int, elements: int) -> int:
    """How many of `count` tiles are worked on together where an expert's larger weight has so many elements."""
    return max(1, min(count, DEQUANTIZED_ELEMENTS // elements))


def _cut(experts: Int[Array, "T A"], num_experts: int) -> _Tiles:
    tokens, choices = experts.shape
    total = tokens * choices
    rows, count = tile_sizes(total, num_experts)
    flat = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    size = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    first = jnp.cumsum(size) - size  # of an expert, among sorted rows
    tile_end = jnp.cumsum(-(-size // rows))
    tile_first = tile_end - (-(-size // rows))
    tile = jnp.arange(count)
    expert = jnp.minimum(jnp.searchsorted(tile_end, tile, side="right", method="compare_all"), num_experts - 1)
    begin = (tile - tile_first[expert]) * rows  # of a tile, among its expert's rows
    used = jnp.clip(size[expert] - begin, 0, rows)
    sorted_row = first[expert][:, None] + begin[:, None] + jnp.arange(rows)
    token = jnp.where(jnp.arange(rows) < used[:, None], order[jnp.minimum(sorted_row, total - 1)] // choices, 0)
    rank = jnp.zeros(total, jnp.int32).at[order].set(jnp.arange(total, dtype=jnp.int32))
    owner = jnp.minimum(flat, num_experts - 1)
    place = tile_first[owner] * rows + rank - first[owner]  # an expert's tiles are consecutive, so its rows are too
    place = jnp.where(flat < num_experts, place, jnp.iinfo(jnp.int32).max)
    # Without a barrier XLA works these few numbers out anew for every weight that it gathers by them.
    return _Tiles(rows, *jax.lax.optimization_barrier((token, expert, used, place.reshape(tokens, choices))))


def _elements(weight: Weight) -> int:
    """Numbers that an expert's weight stands for."""
    packed = weight.weight if isinstance(weight, Calibrated) else weight
    return math.prod(packed.values.shape[1:]) * 2 if isinstance(packed, Nvfp4) else math.prod(packed.shape[1:])


def _of(weight: Weight, expert: Int[Array, " b"]) -> Weight:
    """The weights of each tile's expert."""
    return jax.tree.map(lambda a: jnp.take(a, expert, axis=0, mode="clip"), weight)


def _product(equation: str, x: Array, weight: Weight, dtype: jnp.dtype) -> Array:
    """einsum over the last axis of x and of the weight, accumulated in float32."""
    if isinstance(weight, Calibrated):
        amax = jnp.broadcast_to(weight.input_amax[:, None], x.shape[:2])  # a tile's rows are of one expert
        x, scale = quantize_activations(x, amax)
        y = _product(equation, x, weight.weight, jnp.float32)
        return (y * scale.reshape(*scale.shape, *(1,) * (y.ndim - 2))).astype(dtype)
    if not isinstance(weight, Nvfp4):
        return jnp.einsum(equation, x, weight, preferred_element_type=dtype)
    even, odd = dequantize(weight, x.dtype)
    y = jnp.einsum(equation, x[..., 0::2], even, preferred_element_type=jnp.float32)
    return (y + jnp.einsum(equation, x[..., 1::2], odd, preferred_element_type=jnp.float32)).astype(dtype)
