"""The residual stream's update on Hopper: one launch, a block a token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from inkling_jax.kernels.launch import launch
from inkling_jax.kernels.residual import device
from inkling_jax.kernels.residual.reference import Stream
from inkling_jax.kernels.ring import Rows


def unsupported(width: int, taps: int) -> str | None:
    """Why the kernel cannot take a stream of `width` channels with convolutions of `taps`; None: it can."""
    if width % device.CHANNELS:
        return f"a width of {width}: the kernels take multiples of {device.CHANNELS}; the reference takes any"
    if taps != device.ring.KEPT + 1:
        return f"convolutions of {taps} taps: the kernels take {device.ring.KEPT + 1}; the reference takes any"
    return None


@functools.partial(jax.jit, static_argnames="eps")
def add_conv_norm(
    h: BFloat16[Array, "T D"],
    y: BFloat16[Array, "T D"],
    taps: BFloat16[Array, "D 4"],
    weight: BFloat16[Array, " D"],
    state: BFloat16[Array, "slots 3 D"],
    rows: Rows,
    *,
    eps: float,
) -> Stream:
    """See `reference.add_conv_norm`. A jit of its own: layers of a step lower it once."""
    shape = device.Shape(h.shape[0], h.shape[1], eps)
    operands = {"h": h, "y": y, "taps": taps, "weight": weight}
    operands |= {name: array.astype(jnp.int32) for name, array in rows._asdict().items()}
    made = launch(
        "residual",
        functools.partial(device.add_conv_norm, shape),
        operands=operands,
        changed={"state": state},
        results={name: jax.ShapeDtypeStruct(h.shape, h.dtype) for name in ("next_h", "normed")},
        shared={"sums": plgpu.SMEM((shape.warps,), jnp.float32)},
        programs=shape.tokens,
        warpgroups=shape.warpgroups,
    )
    return Stream(made["next_h"], made["normed"], made["state"])
