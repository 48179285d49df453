"""The routed feed-forward of a layer: rows gathered by expert, two products with SwiGLU between, a weighted sum (spec 2.6)."""

from inkling_jax.kernels.expert_matmul.nvfp4 import Nvfp4, dequantize
from inkling_jax.kernels.expert_matmul.reference import expert_matmul

__all__ = ["Nvfp4", "dequantize", "expert_matmul"]
