"""NVFP4 on the host (spec 7.4): 4-bit E2M1 codes two a byte, one E4M3 scale a block of 16, one float32 scale a matrix."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Float32, UInt8

from inkling_jax.errors import CheckpointError

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)
# A byte holds the even column in its low nibble and the odd one in its high nibble.
_PAIRS = np.stack([E2M1[np.arange(256) & 0xF], E2M1[np.arange(256) >> 4]], axis=-1)
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
