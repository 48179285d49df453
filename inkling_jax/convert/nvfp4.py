"""NVFP4 on the host (spec 7.4): 4-bit E2M1 codes two a byte, one E4M3 scale a block of 16, one float32 scale a matrix."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, UInt8

from inkling_jax.errors import CheckpointError, InputError

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)
# A byte holds the even column in its low nibble and the odd one in its high nibble.
_PAIRS = np.stack([E2M1[np.arange(256) & 0xF], E2M1[np.arange(256) >> 4]], axis=-1)
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbouring magnitudes
_NAN_BYTE = 0x7F  # E4M3 without its sign bit; there is no infinity
_log = logging.getLogger(__name__)


def unpack(values: UInt8[np.ndarray, "*batch half"]) -> Float32[np.ndarray, "*batch columns"]:
    """The numbers that packed codes stand for, before any scale; the last axis doubles."""
    return _PAIRS[values].reshape(*values.shape[:-1], 2 * values.shape[-1])


def dequantize(
    values: UInt8[np.ndarray, "*batch rows half"],
    scale: Float[np.ndarray, "*batch rows blocks"],
    scale2: Float32[np.ndarray, "*batch"],
) -> Float32[np.ndarray, "*batch rows columns"]:
    """e2m1 * scale * scale2 in float32 (spec 7.4).

    The first product is exact (3 by 4 bits) and float32 holds the second even for the smallest block scales, which a product in
    bfloat16 or float16 would flush to zero.
    """
    blocks = unpack(values).reshape(*scale.shape, BLOCK) * scale.astype(np.float32)[..., None]
    return blocks.reshape(*values.shape[:-1], -1) * scale2.astype(np.float32)[..., None, None]


def quantize(
    weight: Float[np.ndarray, "*batch rows columns"],
) -> tuple[UInt8[np.ndarray, "*batch rows half"], Float[np.ndarray, "*batch rows blocks"], Float32[np.ndarray, "*batch"]]:
    """Codes, block scales and matrix scales nearest to `weight`: scale2 = amax / (6 * 448), scale = block amax / 6 / scale2.

    Ties between two codes go to the even one. Raises InputError for columns that are not whole blocks of 16 and for a weight
    that is not finite.
    """
    weight = np.asarray(weight, np.float32)
    if weight.shape[-1] % BLOCK:
        raise InputError(f"quantize: {weight.shape[-1]} columns are not whole blocks of {BLOCK}")
    if not np.isfinite(weight).all():
        raise InputError("quantize: a weight is not finite")
    blocks = weight.reshape(*weight.shape[:-1], -1, BLOCK)
    amax = np.abs(blocks).max(-1)
    # A matrix of zeros has no scale of its own; any positive one will do.
    whole = np.maximum(amax.max((-1, -2)), np.float32(2.0**-110))
    scale2 = (whole / np.float32(E2M1_MAX * E4M3_MAX)).astype(np.float32)
    scale = encode_scale(amax / np.float32(E2M1_MAX) / scale2[..., None, None])
    step = scale.astype(np.float32) * scale2[..., None, None]
    return pack(encode(blocks / step[..., None]).reshape(weight.shape)), scale, scale2


def encode_scale(ideal: Float32[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Block scales as E4M3, clipped to [2^-9, 448] first: the cast turns what is above into NaN, and zero cannot divide."""
    return np.clip(ideal, 2.0**-9, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)


def encode(x: Float32[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    """The E2M1 code nearest to each number: beyond 6 saturates, a tie goes to the even code, the sign is bit 3."""
    magnitude = np.abs(x)
    code = np.zeros(x.shape, np.uint8)
    for lower, midpoint in enumerate(_MIDPOINTS):
        code += magnitude >= midpoint if lower % 2 else magnitude > midpoint
    return code | np.where(np.signbit(x), np.uint8(8), np.uint8(0))


def pack(codes: UInt8[np.ndarray, "*batch columns"]) -> UInt8[np.ndarray, "*batch half"]:
    """Two codes a byte, the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def check_scale(name: str, scale: Float[np.ndarray, "*shape"], origin: tuple[int, ...] = ()) -> None:
    """Raise CheckpointError naming the tensor if an E4M3 block scale is NaN (byte 0x7F or 0xFF) or negative.

    `origin` is where `scale` begins in a larger array.
    """
    data = scale.view(np.uint8)
    if data.size and data.max() >= _NAN_BYTE:
        where = np.unravel_index(int(np.argmax(data >= _NAN_BYTE)), data.shape)
        byte = int(data[where])
        fault = "NaN" if byte & 0x7F == _NAN_BYTE else "negative"
        place = _place(where, origin)
        raise CheckpointError(f"{name}: block scale at {place} is {fault} (byte 0x{byte:02X}); expected 0x00 to 0x7E")


def check_scale2(name: str, scale2: Float32[np.ndarray, "*shape"], origin: tuple[int, ...] = ()) -> None:
    """Raise CheckpointError naming the tensor unless every matrix scale is finite and positive; log a warning at 1 or above.

    ModelOpt stores a small multiplier; other formats store its reciprocal, which is large, under another name.
    """
    check_positive(name, scale2, origin)
    if (scale2 >= 1).any():
        _log.warning("%s: a scale of %g is suspiciously large: is it the reciprocal?", name, float(scale2.max()))


def check_positive(name: str, scale: Float32[np.ndarray, "*shape"], origin: tuple[int, ...] = ()) -> None:
    """Raise CheckpointError naming the tensor unless every scale is finite and positive."""
    bad = ~(np.isfinite(scale) & (scale > 0))
    if bad.any():
        where = tuple(np.argwhere(bad)[0])
        found = float(scale[where])
        raise CheckpointError(f"{name}: scale at {_place(where, origin)} is {found}; expected a finite positive number")


def _place(where: Sequence[int | np.integer], origin: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) + start for i, start in zip(where, origin or (0,) * len(where), strict=True))
