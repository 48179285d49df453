"""The hMLP vision tower: linears that fold a patch into ever fewer and wider places, until one is left (spec 4.2).

Where each parameter of VisionTower comes from; none changes its layout:

| parameter | shape | tensor |
|---|---|---|
| `layers.i.proj` | [outputs, inputs] of `vision_folds(config)[i]` | `model.visual.layers.linear_{i}.weight` |
| `layers.i.norm.weight`, in all layers but the last | [outputs] | `model.visual.layers.norm_{i}.weight` |
| `final_norm.weight`, where `use_norm` | [D] | `model.visual.final_norm.weight` |
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from inkling_jax.config import VisionConfig
from inkling_jax.config_vision import VisionFold, vision_folds
from inkling_jax.layers.linear import linear
from inkling_jax.layers.norm import RMSNorm
from inkling_jax.layers.param import param

_EPS = 1e-6  # no configuration has another


class VisionTower(nnx.Module):
    """Patches to one row of the decoder's width each. No patch looks at another, so a caller may cut a batch anywhere.

    Declared without memory, and replicated: every rank holds all of it. Products take the parameters' dtype; all between them,
    and the final norm, is float32.
    """

    def __init__(self, config: VisionConfig, dtype: jnp.dtype):
        folds, side = vision_folds(config), config.patch_size
        self.patch = (config.temporal_patch_size, side, side, config.num_channels)  # the shape of one
        self.layers = nnx.List(FoldLayer(fold, i == len(folds) - 1, dtype) for i, fold in enumerate(folds))
        self.final_norm = RMSNorm(config.hidden_size, _EPS, dtype) if config.use_norm else None

    def __call__(self, patches: Float[Array, "N time side side channels"]) -> Float[Array, "N D"]:
        """Rows in the parameters' dtype, of patches in any: [N, 2, 40, 40, 3] in the releases.

        Besides weights, input and output, the released four layers take 128 KiB a patch in float32 and 96 KiB in bfloat16.
        """
        x = patches
        for layer in self.layers:
            x = layer(x)
        x = x[:, 0, 0, 0]
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x.astype(self.layers[0].proj.dtype)


class FoldLayer(nnx.Module):
    """One linear over blocks of time x side x side places; then, but for the last one, a norm and GELU (erf)."""

    def __init__(self, fold: VisionFold, last: bool, dtype: jnp.dtype):
        self.proj = param((fold.outputs, fold.inputs), dtype, (None, None))
        self.norm = None if last else RMSNorm(fold.outputs, _EPS, dtype)
        self.fold = fold

    def __call__(self, x: Float[Array, "N T H W C"]) -> Float[Array, "N T2 H2 W2 outputs"]:
        """The coarser grid in float32: `time`, `side` and `side` times fewer places along its axes."""
        proj = self.proj[...]
        y = linear(folded(x.astype(proj.dtype), self.fold.time, self.fold.side), proj, jnp.float32)
        return y if self.norm is None else jax.nn.gelu(self.norm(y), approximate=False)


def folded(x: Float[Array, "N T H W C"], time: int, side: int) -> Float[Array, "N T2 H2 W2 K"]:
    """The grid of blocks of `time` x `side` x `side` places, each block's values flat: channel fastest, then w, h, t."""
    batch, frames, height, width, channels = x.shape
    x = x.reshape(batch, frames // time, time, height // side, side, width // side, side, channels)
    x = x.transpose(0, 1, 3, 5, 2, 4, 6, 7)
    return x.reshape(*x.shape[:4], math.prod(x.shape[4:]))
