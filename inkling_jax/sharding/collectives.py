"""Every collective that a step performs. Layers call these and know nothing of the mesh; on one device each is the identity.

A step has one reduction for the embedding, two a layer (after attention, after the feed-forward) and one gather for the head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MODEL_AXES = ("tensor", "expert")  # the axes of one replica


def sum_over_model(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Sum of the partial results of all ranks of a replica."""
    return jax.lax.psum(x, MODEL_AXES)


def largest_over_model(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The largest of what all ranks of a replica found."""
    return jax.lax.pmax(x, MODEL_AXES)


def first_local_row(rows: int) -> Int[Array, ""]:
    """Index of this rank's first row of an axis that is split over the model axes into shards of `rows`."""
    return jax.lax.axis_index(MODEL_AXES) * rows


def first_local_expert(experts: int) -> Int[Array, ""]:
    """Global index of this rank's first expert, when each rank of the expert axis holds `experts`."""
    return jax.lax.axis_index("expert") * experts


def gather_vocabulary(logits: Float[Array, "B local"]) -> Float[Array, "B V"]:
    """The logits of all ranks side by side, in vocabulary order."""
    return jax.lax.all_gather(logits, MODEL_AXES, axis=1, tiled=True)


def gather_columns(x: Float[Array, "T local"]) -> Float[Array, "T D"]:
    """The columns of all ranks side by side."""
    return jax.lax.all_gather(x, MODEL_AXES, axis=1, tiled=True)


def embedding_rows(table: Float[Array, "local D"], ids: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Rows of a table split by rows over the model axes: each rank looks up its own and the sum restores all."""
    local = ids - first_local_row(table.shape[0])
    mine = (local >= 0) & (local < table.shape[0])
    rows = _take(table, jnp.where(mine, local, 0))
    return sum_over_model(jnp.where(mine[:, None], rows, 0))


@jax.custom_vjp
def _take(table: Float[Array, "V D"], rows: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Rows of a table. The gradient is a product: a scatter would add a row's many uses one by one, each rounded to bfloat16."""
    return jnp.take(table, rows, axis=0, mode="clip")


def _take_forward(table: Float[Array, "V D"], rows: Int[Array, " T"]) -> tuple[Array, tuple[Array, Array]]:
    return _take(table, rows), (rows, table)


def _take_backward(kept: tuple[Array, Array], out: Float[Array, "T D"]) -> tuple[Array, None]:
    rows, table = kept
    chosen = jax.nn.one_hot(rows, table.shape[0], dtype=out.dtype)
    return jnp.einsum("tv,td->vd", chosen, out, preferred_element_type=jnp.float32).astype(table.dtype), None


_take.defvjp(_take_forward, _take_backward)
