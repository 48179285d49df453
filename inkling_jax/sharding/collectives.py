"""Every collective that a step performs. Layers call these and know nothing of the mesh; on one device each is the identity.

A step has one reduction for the embedding, two a layer (after attention, after the feed-forward) and one exchange for the head:
of what each rank's part of the vocabulary has to offer. Filters of the sampler, and scores, gather whole rows besides. Where
experts are spread over replicas these exchange tokens and answers, twice a sparse layer.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

MODEL_AXES = ("tensor", "expert")  # the axes of one replica


def sum_over_model(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Sum of the partial results of all ranks of a replica."""
    return jax.lax.psum(x, MODEL_AXES) if _ranks() > 1 else x


def largest_over_model(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The largest of what all ranks of a replica found."""
    return jax.lax.pmax(x, MODEL_AXES)


def first_local_row(rows: int) -> Int[Array, ""]:
    """Index of this rank's first row of an axis that is split over the model axes into shards of `rows`."""
    return jax.lax.axis_index(MODEL_AXES) * rows


def first_local_expert(experts: int, over_replicas: bool = False) -> Int[Array, ""]:
    """Global index of this rank's first expert, when each rank of the expert axis, or of all replicas', holds `experts`."""
    return jax.lax.axis_index(("data", "expert") if over_replicas else "expert") * experts


def gather_replicas(x: Float[Array, "T D"], valid: Bool[Array, " T"]) -> tuple[Float[Array, "all D"], Bool[Array, " all"]]:
    """The tokens of all replicas, one after the other, and which are no padding: in one exchange."""
    joined = jnp.concatenate([x, valid[:, None].astype(x.dtype)], axis=1)
    found = jax.lax.all_gather(joined, "data", axis=0, tiled=True)
    return found[:, :-1], found[:, -1] > 0


def sum_to_replicas(y: Float[Array, "all D"]) -> Float[Array, "T D"]:
    """The sum of what all replicas have for each token, to each replica for its own."""
    return jax.lax.psum_scatter(y, "data", scatter_dimension=0, tiled=True)


def own_rows(x: Float[Array, "all *n"], rows: int) -> Float[Array, "rows *n"]:
    """Of the rows of all replicas, each with so many, this one's."""
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("data") * rows, rows)


def gather_vocabulary(logits: Float[Array, "B local"]) -> Float[Array, "B V"]:
    """The logits of all ranks side by side, in vocabulary order."""
    return gather_columns(logits)


def local_columns(rows: Float[Array, "B V"], width: int) -> Float[Array, "B width"]:
    """Of whole rows the columns that this rank's shard of `width` holds."""
    return jax.lax.dynamic_slice_in_dim(rows, first_local_row(width), width, axis=1)


def gather_ranks(values: Any) -> Any:
    """Each leaf [B, ...], of 32-bit numbers, of all ranks in the order of their columns, [ranks, B, ...]: in one exchange."""
    leaves, form = jax.tree.flatten(values)
    flat = [jax.lax.bitcast_convert_type(leaf, jnp.int32).reshape(leaf.shape[0], math.prod(leaf.shape[1:])) for leaf in leaves]
    joined = jnp.concatenate(flat, axis=1)
    found = jax.lax.all_gather(joined, MODEL_AXES) if _ranks() > 1 else joined[None]
    parts = jnp.split(found, np.cumsum([part.shape[1] for part in flat])[:-1], axis=2)
    shaped = [part.reshape(found.shape[0], *leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    return form.unflatten(jax.lax.bitcast_convert_type(part, leaf.dtype) for part, leaf in zip(shaped, leaves, strict=True))


def gather_columns(x: Float[Array, "T local"]) -> Float[Array, "T D"]:
    """The columns of all ranks side by side."""
    return jax.lax.all_gather(x, MODEL_AXES, axis=1, tiled=True) if _ranks() > 1 else x


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


def _ranks() -> int:
    """Devices of a replica. XLA leaves in a program what a single one would exchange with itself."""
    return jax.lax.axis_size(MODEL_AXES)
