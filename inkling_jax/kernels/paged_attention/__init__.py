"""Attention over a paged cache with a learned relative bias (spec 2.3)."""

from inkling_jax.kernels.paged_attention.reference import paged_attention

__all__ = ["paged_attention"]
