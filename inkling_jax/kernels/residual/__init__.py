"""A sublayer's end and the next one's begin in decode: h + conv(y), and its root-mean-square norm (spec 2.2, 2.4).

`reference.add_conv_norm` runs anywhere; `sm90.add_conv_norm` is one launch on Hopper, with the convolution's state in place.
"""

from __future__ import annotations

from inkling_jax.kernels.residual.reference import Stream, add_conv_norm

__all__ = ["Stream", "add_conv_norm"]
