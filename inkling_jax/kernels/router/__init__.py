"""The router of a sparse layer: logits, the choice of experts, and joint weights of the chosen and the shared (spec 2.6).

`reference.route` runs anywhere; `sm90.route` is one launch on Hopper, which sorts the rows by expert as well.
"""

from __future__ import annotations

from inkling_jax.kernels.router.reference import Routing, route

__all__ = ["Routing", "route"]
