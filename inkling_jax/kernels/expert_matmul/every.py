"""The routed feed-forward with every token through every expert, those not chosen weighted zero: for training few experts.

It multiplies E / A times as much as needed, but nothing is sorted, gathered or scattered, in either direction.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def every_expert(
    x: Float[Array, "T D"],
    experts: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    w13: Float[Array, "E 2 F D"],
    w2: Float[Array, "E D F"],
) -> Float[Array, "T D"]:
    """See `reference.expert_matmul`, of plain arrays. The sum over experts is one product, accumulated in float32."""
    count, _, width, model = w13.shape
    each = jnp.sum(jnp.where(experts[..., None] == jnp.arange(count), weights[..., None], 0), axis=1)
    hidden = jnp.einsum("td,fd->tf", x, w13.reshape(-1, model), preferred_element_type=jnp.float32)
    hidden = hidden.reshape(-1, count, 2, width)
    hidden = jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1] * each[..., None]
    return jnp.einsum("tef,edf->td", hidden.astype(x.dtype), w2, preferred_element_type=jnp.float32).astype(x.dtype)
