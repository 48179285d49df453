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
PREFILL_KEYS = 128  # keys of a tile of the prefill kernel, at most
PREFILL_TOKENS = 32  # and query tokens
TABLE_LANES = 64  # columns of the prefill kernel's table as it lies in memory: lines of 128 bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativeBias:
    """The weight [R, r] and two rearrangements of it. bias(query token, distance d) = rel . weight[d] for d < R, else zero.

    Both make the bias a matrix product that extends q.k, so that neither a gather by distance nor a bias array exists:
    the rows of keys j0, j0+1, ... as seen by one query are consecutive rows of a table.
    """

    weight: Float[Array, "R r"]
    reversed: Float[Array, "8 rows r"]  # [s, EDGE_ROWS + R-1 - d - s] = weight[d], zero around
    halved: Float[Array, "lines 64"]  # as [2, rows, 8]: [h, zero_row - d, c] = weight[d, 8h + c], zero around


def prepare_bias(rel_bias: Float[Array, "R r"]) -> RelativeBias:
    """The tables of one layer. R = 1024, r = 16: 0.3 MB and 43 kB beside 33 kB."""
    padded = jnp.pad(rel_bias[::-1], ((EDGE_ROWS, EDGE_ROWS + SHIFTS), (0, 0)))
    rows = rel_bias.shape[0] + 2 * EDGE_ROWS
    shifted = jnp.stack([padded[s : s + rows] for s in range(SHIFTS)])
    return RelativeBias(rel_bias, shifted, _halve(rel_bias))


def padded_share(share: int) -> int:
    """Query heads of a key head as the kernels count them: a power of two."""
    return max(LEAST_SHARE, 1 << (share - 1).bit_length())


def zero_row(extent: int) -> int:
    """Row of the halved table that holds distance 0: a tile that begins a tile before the extent finds rows for all its keys."""
    return extent + PREFILL_KEYS + PREFILL_TOKENS + 8


def halved_rows(extent: int) -> int:
    """Rows of the halved table: those of the keys of a tile after distance 0 too, which no query sees."""
    return -(-(zero_row(extent) + PREFILL_KEYS) // 64) * 64


def _halve(rel_bias: Float[Array, "R r"]) -> Float[Array, "lines 64"]:
    """Halves of a row apart, so that 8 rows of a half, whichever they are, lie in different banks of shared memory."""
    extent, width = rel_bias.shape
    first = zero_row(extent) - (extent - 1)
    table = jnp.pad(rel_bias[::-1], ((first, halved_rows(extent) - first - extent), (0, 0)))
    return table.reshape(-1, 2, width // 2).swapaxes(0, 1).reshape(-1, TABLE_LANES)
