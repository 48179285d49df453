"""The draft head (multi-token prediction, spec 3): depth k guesses the token k + 2 places after a slot.

Nothing here looks up embeddings or makes logits: both are the decoder's, `Inkling.embeddings` and `Inkling.logits`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from inkling_jax.cache.paged import Cache, LayerCache
from inkling_jax.cache.ragged import Ragged
from inkling_jax.config import ModelConfig, TextConfig
from inkling_jax.layers.attention import AttentionStep
from inkling_jax.layers.decoder import DecoderLayer
from inkling_jax.layers.linear import linear
from inkling_jax.layers.norm import RMSNorm
from inkling_jax.layers.param import param
from inkling_jax.sharding.collectives import gather_columns


class DraftDepth(nnx.Module):
    """One depth: the state of the depth before beside the embedding of a later token, projected, then a dense decoder layer."""

    def __init__(self, layers: TextConfig, depth: int, dtype: jnp.dtype):
        size = layers.hidden_size
        self.hidden_norm = RMSNorm(size, layers.rms_norm_eps, dtype)
        self.embed_norm = RMSNorm(size, layers.rms_norm_eps, dtype)
        self.input_proj = param((size, 2 * size), dtype, ("hidden", None))
        self.block = DecoderLayer(layers, depth, frozenset(), dtype)

    def __call__(
        self,
        hidden: Float[Array, "T D"],
        embedded: Float[Array, "T D"],
        cache: LayerCache,
        step: AttentionStep,
        ragged: Ragged,
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        """The residual stream after this depth, without a final norm, and the depth's cache with these slots appended."""
        both = jnp.concatenate([self.hidden_norm(hidden), self.embed_norm(embedded)], axis=-1)
        h = gather_columns(linear(both, self.input_proj[...]))
        # Nobody reads the norm of what comes out, so that it is not computed.
        h, _, cache = self.block(h, self.block.attn_norm(h), cache, step, ragged, self.hidden_norm)
        return h, cache


class DraftHead(nnx.Module):
    """All depths, declared without memory and apart from the decoder, whose steps neither take nor read them."""

    def __init__(self, layers: TextConfig, chain_norm: bool, dtype: jnp.dtype):
        self.draft = nnx.List(DraftDepth(layers, depth, dtype) for depth in range(layers.num_layers))
        self.draft_norm = RMSNorm(layers.hidden_size, layers.rms_norm_eps, dtype) if chain_norm else None
        self.local_layers = layers.local_layers

    @classmethod
    def of(cls, config: ModelConfig, dtype: jnp.dtype) -> DraftHead | None:
        """That of a configuration; None where it has none."""
        layers = config.draft_layers
        return cls(layers, config.mtp.chain_norm, dtype) if layers is not None and config.mtp is not None else None

    def __call__(
        self,
        hidden: Float[Array, "T D"],
        embedded: Sequence[Float[Array, "T D"]],
        cache: Cache,
        ragged: Ragged,
        context: int,
    ) -> tuple[list[Float[Array, "T D"]], Cache]:
        """The state of every depth at every slot, teacher forced, and the cache of the head with these slots appended.

        hidden: what the decoder returns, the state after its final norm. embedded[k]: at slot t the decoder's embedding of the
        token at t + 1 + k. At the end of a sequence, where there is none, anything may stand there: no earlier slot sees it.
        cache: `create_cache(config.draft_layers, ...)`, a layer a depth. ragged, context: as for the decoder.
        `model.logits(states[k])` at slot t are those of the token at t + 2 + k. Differentiable where the decoder is.
        """
        steps: dict[bool, AttentionStep] = {}  # by kind of layer
        states, layers = [], []
        for depth, embedding, state, local in zip(self.draft, embedded, cache.layers, self.local_layers, strict=True):
            if local not in steps:
                steps[local] = depth.block.attn.step(cache.table(local)[ragged.slot], ragged, context)
            hidden, state = depth(hidden, embedding, state, steps[local], ragged)
            if self.draft_norm is not None:
                hidden = self.draft_norm(hidden)
            states.append(hidden)
            layers.append(state)
        return states, dataclasses.replace(cache, layers=tuple(layers))
