"""The text model: embed -> layers -> norm -> logits. The only file that knows the order (spec 2)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from inkling_jax.cache.paged import Cache
from inkling_jax.cache.ragged import Ragged
from inkling_jax.config import TextConfig
from inkling_jax.layers.attention import AttentionStep
from inkling_jax.layers.decoder import DecoderLayer
from inkling_jax.layers.linear import linear
from inkling_jax.layers.norm import RMSNorm
from inkling_jax.layers.param import param
from inkling_jax.sharding.collectives import embedding_rows, gather_vocabulary

Packed = frozenset[tuple[int, str]]  # (layer, "w13" | "w2") of the expert weights that are NVFP4


class MediaRows(NamedTuple):
    """What the towers made for the tokens of a step: where `present`, a row stands in for the token's embedding."""

    rows: Float[Array, "T D"]
    present: Bool[Array, " T"]


def flat_parameters(model: nnx.Module) -> dict[str, nnx.Param]:
    """The parameters by path ("layers.0.attn.o_proj"), in the order in which programs take their arrays."""
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model))}


class Inkling(nnx.Module):
    """The decoder, declared without memory: parameters are abstract until nnx.merge is given arrays.

    Under shard_map every array is one rank's shard, and the same code computes with its sizes.
    """

    def __init__(self, config: TextConfig, packed: Packed, dtype: jnp.dtype):
        self.embed = param((config.vocab_size, config.hidden_size), dtype, ("vocab", None))
        self.embed_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype) if config.use_embed_norm else None
        self.layers = nnx.List(
            DecoderLayer(config, i, frozenset(name for layer, name in packed if layer == i), dtype)
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.unembed = param((config.vocab_size, config.hidden_size), dtype, ("vocab", None))
        self.local_layers, self.usable_vocab_size = config.local_layers, config.usable_vocab_size
        self.logits_divisor = config.logits_divisor

    def __call__(
        self,
        token_ids: Int[Array, " T"],
        cache: Cache,
        ragged: Ragged,
        context: int,
        tape: dict[str, Array] | None = None,
        media: MediaRows | None = None,
    ) -> tuple[Float[Array, "T D"], Cache]:
        """The residual stream after the final norm, and the cache with these tokens appended.

        `context` bounds the rows' lengths statically. `tape`, where given, receives "hidden.i" and "moe.j.*" (llm.trace).
        `media` rows take their places after the embedding norm and are not normed again (spec 2.1).
        """
        h = self.embeddings(token_ids, media)
        steps: dict[bool, AttentionStep] = {}  # by kind of layer
        layers, sparse = [], 0
        x, norms = self.layers[0].attn_norm(h), [*(layer.attn_norm for layer in self.layers[1:]), self.norm]
        for i, (layer, after) in enumerate(zip(self.layers, norms, strict=True)):
            if tape is not None:
                tape[f"hidden.{i}"] = h
            routing: dict[str, Array] | None = {} if tape is not None else None
            local = self.local_layers[i]
            if local not in steps:
                steps[local] = layer.attn.step(cache.table(local)[ragged.slot], ragged, context)
            h, x, state = layer(h, x, cache.layers[i], steps[local], ragged, after, routing)
            layers.append(state)
            if tape is not None and routing:
                tape.update({f"moe.{sparse}.{name}": value for name, value in routing.items()})
                sparse += 1
        if tape is not None:
            tape[f"hidden.{len(layers)}"] = x
        return x, dataclasses.replace(cache, layers=tuple(layers))

    def embeddings(self, token_ids: Int[Array, " T"], media: MediaRows | None = None) -> Float[Array, "T D"]:
        """What stands for tokens: their normed rows of the table, or the rows of `media`, which are not normed again."""
        rows = embedding_rows(self.embed[...], token_ids)
        if self.embed_norm is not None:
            rows = self.embed_norm(rows)
        return rows if media is None else jnp.where(media.present[:, None], media.rows, rows)

    def logits(self, z: Float[Array, "B D"]) -> Float[Array, "B usable"]:
        """float32 logits of normed states over the usable vocabulary."""
        return gather_vocabulary(self.local_logits(z))[:, : self.usable_vocab_size]

    def local_logits(self, z: Float[Array, "B D"]) -> Float[Array, "B local"]:
        """Those of this rank's part of the vocabulary, padding included; muP divides here and nowhere else."""
        return linear(z, self.unembed[...], jnp.float32) / self.logits_divisor
