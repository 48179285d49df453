"""What the pages of a cache hold: vectors as they are, or in fp8, their numbers' e4m3 codes beside a scale for each vector."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

PER_AMAX = float(np.float32(1 / 448))  # of a scale; 448 is the largest e4m3. A factor: XLA makes one of a division anyhow
LEAST_AMAX = 2.0**-100  # a vector is scaled as if its largest number were no smaller: zeros stay zeros, no scale underflows


class Fp8Pages(NamedTuple):
    """Keys or values as scale * e4m3, one scale a token and head. A vector that is not finite has the scale NaN.

    Codes are bytes and not of a float8 dtype: XLA's CPU would convert a whole pool of those to float16 and back to write one.
    """

    codes: UInt8[Array, "pages K P H"]
    scale: Float[Array, "pages K P"]  # float32

    @property
    def shape(self) -> tuple[int, ...]:
        """[pages, K, P, H]."""
        return self.codes.shape


Pages = Any  # Float[Array, "pages K P H"] | Fp8Pages: jaxtyping has no word for either


def quantize(x: Float[Array, "*N H"]) -> tuple[UInt8[Array, "*N H"], Float[Array, "*N"]]:
    """Codes and scales of vectors: scale = max(amax, 2^-100) / 448, codes = x / scale to the nearest e4m3, ties to even."""
    wide = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(wide), axis=-1)
    # Not asked of amax: XLA's CPU leaves NaN out of a maximum.
    scale = jnp.where(jnp.isfinite(wide).all(axis=-1), jnp.maximum(amax, LEAST_AMAX) * PER_AMAX, jnp.nan)
    return lax.bitcast_convert_type((wide / scale[..., None]).astype(jnp.float8_e4m3fn), jnp.uint8), scale


def decode(codes: UInt8[Array, "*N"], dtype: jnp.dtype) -> Float[Array, "*N"]:
    """The numbers of e4m3 codes, exact in bfloat16 and wider."""
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(dtype)


def parts(k_pages: Pages, v_pages: Pages) -> dict[str, Array]:
    """The arrays of both by name: "k_pages", "v_pages" and in fp8 "k_scale", "v_scale"."""
    if not isinstance(k_pages, Fp8Pages):
        return {"k_pages": k_pages, "v_pages": v_pages}
    return {"k_pages": k_pages.codes, "v_pages": v_pages.codes, "k_scale": k_pages.scale, "v_scale": v_pages.scale}


def write(pages: Pages, target: tuple[Any, ...], new: Float[Array, "T K H"]) -> Pages:
    """`pages` with vectors at `target`: for each token a page, all heads, and a place; what is no page drops the write."""
    put = lambda pool, part: pool.at[target].set(part.astype(pool.dtype), mode="drop")  # noqa: E731
    return jax.tree.map(put, pages, Fp8Pages(*quantize(new)) if isinstance(pages, Fp8Pages) else new)
