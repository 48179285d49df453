"""From the projections of decode's tokens to queries, and to keys and values in pages (spec 2.3, 2.4).

`reference.append` runs anywhere; `sm90.append` is one launch on Hopper, with pages and convolution states in place.
"""

from __future__ import annotations

from inkling_jax.kernels.kv_append.reference import Appended, Kept, Weights, append

__all__ = ["Appended", "Kept", "Weights", "append"]
