"""NVFP4 weights on the device: two E2M1 codes a byte, an E4M3 scale for 16 of them, a float32 scale a matrix (spec 7.4)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8


class Nvfp4(NamedTuple):
    """A packed weight [..., O, I] as it lies in the checkpoint."""

    values: UInt8[Array, "*lead O I/2"]  # even column in the low nibble
    scale: Float[Array, "*lead O I/16"]  # float8_e4m3fn
    scale2: Float[Array, "*lead"]  # one a matrix


def dequantize(weight: Nvfp4, dtype: jnp.dtype) -> tuple[Float[Array, "*lead O I/2"], Float[Array, "*lead O I/2"]]:
    """The even and the odd columns of a packed weight, in `dtype`.

    They stay apart because joining them again is a strided write; a product contracts x[..., 0::2] and x[..., 1::2] instead.
    The scales multiply in float32, where e4m3 x float32 cannot underflow early (a bfloat16 or float16 product would).
    """
    scale = weight.scale.astype(jnp.float32) * weight.scale2[..., None, None]
    scale = jnp.repeat(scale, 8, axis=-1)
    return (_e2m1(weight.values & 0xF) * scale).astype(dtype), (_e2m1(weight.values >> 4) * scale).astype(dtype)


def _e2m1(code: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """0, .5, 1, 1.5, 2, 3, 4, 6 by the low three bits, bit 3 the sign: in halves, the integer m or (2 + m) << (e - 1)."""
    exponent, mantissa = ((code >> 1) & 3).astype(jnp.int32), (code & 1).astype(jnp.int32)
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    return jnp.where(code >= 8, -0.5, 0.5) * halves.astype(jnp.float32)
