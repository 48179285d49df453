"""NVFP4 weights on the device: two E2M1 codes a byte, an E4M3 scale for 16 of them, a float32 scale a matrix (spec 7.4)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

BLOCK = 16  # columns that share a scale


class Nvfp4(NamedTuple):
    """A packed weight [..., O, I] as it lies in the checkpoint."""

    values: UInt8[Array, "*lead O I/2"]  # even column in the low nibble
    scale: Float[Array, "*lead O I/16"]  # float8_e4m3fn
    scale2: Float[Array, "*lead"]  # one a matrix


class Calibrated(NamedTuple):
    """A packed weight whose inputs are rounded to NVFP4 as well: what serving on Blackwell computes, simulated."""

    weight: Nvfp4
    input_amax: Float[Array, " E"]  # the calibrated largest input, one for all experts of a stack


def quantize_activations(
    x: Float[Array, "*lead I"], input_amax: Float[Array, "*lead"]
) -> tuple[Float[Array, "*lead I"], Float[Array, "*lead"]]:
    """The nearest e2m1 * block scale, exact in the dtype of `x`, and the scale that is left for the product (spec 7.4).

    That one is input_amax / (6 * 448). A block scale is the e4m3 number nearest to block max / 6 / that, 448 at most; ties go to
    even codes (but XLA divides by multiplying, so a tie may be missed by a last bit), and a block whose scale is zero is zero.
    """
    input_scale = input_amax.astype(jnp.float32) / (6 * 448)
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
    scale = _nearest(jnp.abs(blocks).max(-1) / 6 / input_scale[..., None], 3, -6, 448)[..., None]
    codes = _nearest(blocks / (scale * input_scale[..., None, None]), 1, 0, 6)
    return jnp.where(scale == 0, 0, codes * scale).reshape(x.shape).astype(x.dtype), input_scale


def _nearest(x: Float[Array, "..."], mantissa: int, least: int, largest: float) -> Float[Array, "..."]:
    """The nearest float of so many mantissa bits whose exponents begin at `least`, saturating; a tie goes to the even mantissa.

    By arithmetic, since not every GPU casts to these types.
    """
    _, exponent = jnp.frexp(x)  # of a mantissa below 1
    step = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent - 1, least) - mantissa)
    return jnp.clip(jnp.round(x / step) * step, -largest, largest)


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
