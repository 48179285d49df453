"""A model as its ranks hold it: an equal one whose key heads and vocabulary divide over the devices of a replica. No arrays."""

from __future__ import annotations

import dataclasses

from inkling_jax.config import ModelConfig
from inkling_jax.config_parts import AttentionConfig, TextConfig
from inkling_jax.errors import ConfigError

MOST_RANKS = 64  # of those that an error names


def spread(config: ModelConfig, ranks: int) -> ModelConfig:
    """`config` for `ranks` devices of one replica (tensor x expert); a configuration that was spread stays so.

    Where there are fewer key heads than ranks, a head is counted once for each rank that holds it, as many times as its query
    heads are split: every rank has the key heads of its own queries, and no others. Vocabulary rows are padded to a multiple.
    Raises ConfigError naming the parameter and the numbers of ranks that would do.
    """
    return dataclasses.replace(config, text=spread_text(config.text, ranks))


def spread_text(text: TextConfig, ranks: int) -> TextConfig:
    """The same of a decoder alone."""
    kinds = {"global_attention": False, "local_attention": True}
    spread_kinds = {
        name: _spread_heads(getattr(text, name), ranks, f"layers.{text.local_layers.index(local)}.attn.qkvr_proj")
        for name, local in kinds.items()
        if local in text.local_layers
    }
    return dataclasses.replace(text, vocab_size=-(-text.vocab_size // ranks) * ranks, **spread_kinds)


def _spread_heads(attention: AttentionConfig, ranks: int, path: str) -> AttentionConfig:
    def divides(ranks: int) -> bool:
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)

    if not divides(ranks):
        would = ", ".join(str(n) for n in range(1, MOST_RANKS + 1) if divides(n))
        raise ConfigError(
            f"{path}: 'kv_heads', {attention.num_heads} query heads on {attention.num_kv_heads} key heads do not divide over "
            f"{ranks} devices (tensor x expert); {would} would do"
        )
    return dataclasses.replace(attention, num_kv_heads=max(attention.num_kv_heads, ranks))
