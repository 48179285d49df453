"""The learned relative bias in the forms that the kernels read: functions of the weight alone, computed once at load."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

KEY_TILE = 64  # keys of one product of the decode kernel
EDGE_ROWS = 80  # zero rows around the reversed table: a key tile and the most query tokens of a decode row, in eights
SHIFTS = 8  # a copy into tiled shared memory starts at a multiple of 8 rows, so other starts need a shifted copy of the table
LEAST_SHARE = 4  # query heads of a key head as the kernels count them, at least: rows of a 128-byte aligned copy
PREFILL_ROWS = 64  # query rows (tokens x heads that share a key head) of one warpgroup
SHEARED_TOKENS = PREFILL_ROWS // LEAST_SHARE  # most tokens of such rows; those of fewer are the table's first columns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativeBias:
    """The weight [R, r] and two rearrangements of it. bias(query token, distance d) = rel . weight[d] for d < R, else zero.

    Both make the bias a matrix product that extends q.k, so that neither a gather by distance nor a bias array exists:
    the rows of keys j0, j0+1, ... as seen by one query are consecutive rows of a table.
    """

    weight: Float[Array, "R r"]
    reversed: Float[Array, "8 rows r"]  # [s, EDGE_ROWS + R-1 - d - s] = weight[d], zero around
    sheared: Float[Array, "tall wide"]  # [shear_offset + i - d, i*r + c] = weight[d, c] for the i-th query token of a tile


def prepare_bias(rel_bias: Float[Array, "R r"]) -> RelativeBias:
    """The tables of one layer. R = 1024, r = 16: 0.3 + 0.6 MB beside 33 kB."""
    padded = jnp.pad(rel_bias[::-1], ((EDGE_ROWS, EDGE_ROWS + SHIFTS), (0, 0)))
    rows = rel_bias.shape[0] + 2 * EDGE_ROWS
    shifted = jnp.stack([padded[s : s + rows] for s in range(SHIFTS)])
    return RelativeBias(rel_bias, shifted, _shear(rel_bias))


def padded_share(share: int) -> int:
    """Query heads of a key head as the kernels count them: a power of two."""
    return max(LEAST_SHARE, 1 << (share - 1).bit_length())


def shear_offset(extent: int) -> int:
    """Row of the sheared table where token 0 of a query tile finds distance 0."""
    return -(-(extent + 2 * PREFILL_ROWS + SHEARED_TOKENS) // 8) * 8


def _shear(rel_bias: Float[Array, "R r"]) -> Float[Array, "tall wide"]:
    extent, width = rel_bias.shape
    offset = shear_offset(extent)
    tall = offset + 2 * PREFILL_ROWS + 2 * SHEARED_TOKENS
    distance = jnp.arange(SHEARED_TOKENS)[None, :] + offset - jnp.arange(tall)[:, None]
    inside = (distance >= 0) & (distance < extent)
    table = jnp.where(inside[..., None], rel_bias[jnp.clip(distance, 0, extent - 1)], 0)
    return table.reshape(tall, SHEARED_TOKENS * width).astype(rel_bias.dtype)
