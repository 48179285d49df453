"""Matrix products with weights in the checkpoint's [out, in] order."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def linear(x: Float[Array, "*B I"], weight: Float[Array, "O I"], out_dtype: jnp.dtype | None = None) -> Float[Array, "*B O"]:
    """x @ weight.T, accumulated in float32, in `out_dtype` (default: that of x).

    Contracting both last axes keeps a weight's rows contiguous, which is what XLA reads fastest at small batches.
    """
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=out_dtype or x.dtype)
