"""The routed feed-forward of a layer: rows gathered by expert, two products with SwiGLU between, a weighted sum (spec 2.6).

The form of the weights chooses the implementation: plain arrays and Nvfp4 run anywhere, Packed ones (`pack.pack`) on Hopper.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from inkling_jax.kernels.expert_matmul import reference
from inkling_jax.kernels.expert_matmul.nvfp4 import Calibrated, Nvfp4, dequantize
from inkling_jax.kernels.expert_matmul.pack import Packed, Shared
from inkling_jax.kernels.expert_matmul.reference import Weight

__all__ = ["Calibrated", "Nvfp4", "Packed", "Shared", "dequantize", "expert_matmul"]


def expert_matmul(
    x: Float[Array, "T D"],
    experts: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    w13: Weight | Packed,
    w2: Weight | Packed,
    routed: int | None = None,
) -> Float[Array, "T D"]:
    """See `reference.expert_matmul`. `routed`: of how many experts tokens choose, where more than those held here."""
    if isinstance(w13, Packed) and isinstance(w2, Packed):
        from inkling_jax.kernels.expert_matmul import sm90  # Pallas' GPU half takes a while to import, and few need it

        return sm90.expert_matmul(x, experts, weights, w13, w2, routed)
    assert not isinstance(w13, Packed) and not isinstance(w2, Packed)  # a layer's weights are in one form
    return reference.expert_matmul(x, experts, weights, w13, w2)
