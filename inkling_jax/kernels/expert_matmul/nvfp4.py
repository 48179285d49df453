"""NVFP4 weights on the device: two E2M1 codes a byte, an E4M3 scale for 16 of them, a float32 scale a matrix (spec 7.4)."""

from __future__ import annotations

from typing import NamedTuple

import jax
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
    scale = weight.scale.astype(jnp.float32) * (weight.scale2[..., None, None] * 2.0**14)
    scale = jnp.repeat(scale, 8, axis=-1)
    return (_e2m1(weight.values & 0xF) * scale).astype(dtype), (_e2m1(weight.values >> 4) * scale).astype(dtype)


def _e2m1(code: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """0, .5, 1, 1.5, 2, 3, 4, 6 by the low three bits, bit 3 the sign; times 2**-14.

    That is the float16 with the same sign, exponent and mantissa bits, whose exponent is 14 less: a few integer operations where
    this is computed for every weight of every step.
    """
    code = code.astype(jnp.uint16)
    return jax.lax.bitcast_convert_type((code & 8) << 12 | (code & 7) << 9, jnp.float16).astype(jnp.float32)
