"""The audio tower: one table of rows for each mel band and level, summed over the bands and normed (spec 5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from inkling_jax.config import AudioConfig
from inkling_jax.layers.norm import RMSNorm
from inkling_jax.layers.param import param

EPS = 1e-6  # config_read.py refuses a file that names another


class AudioTower(nnx.Module):
    """dMel bins to rows of the decoder's width, one a frame of 50 ms. Replicated: every rank computes all of it.

    `embed` is model.audio.encoder.weight as stored, [M * levels, D], row m * levels + bin; `norm.weight` is
    model.audio.final_norm.weight, [D] (`norm` is None where the config has use_audio_norm false). No layout changes.
    """

    def __init__(self, config: AudioConfig, dtype: jnp.dtype):
        self.bands, self.levels = config.num_mel_bins, config.mel_vocab_size
        self.embed = param((config.num_mel_bins * self.levels, config.hidden_size), dtype, (None, None))
        self.norm = RMSNorm(config.hidden_size, EPS, dtype) if config.use_norm else None

    def __call__(self, bins: Int[Array, "T M"]) -> Float[Array, "T D"]:
        """Rows in the parameters' dtype. Bins must lie in 0..levels-1, which the host checks: one outside adds nothing here.

        The sum is a product with 0 and 1, accumulated in float32: rows gathered first would take M times the output's memory.
        """
        table = self.embed[...]
        chosen = jax.nn.one_hot(bins, self.levels, dtype=table.dtype).reshape(bins.shape[0], -1)
        rows = jnp.einsum("tr,rd->td", chosen, table, preferred_element_type=jnp.float32)
        return (rows if self.norm is None else self.norm(rows)).astype(table.dtype)
