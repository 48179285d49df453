"""The model of compare_transformers.py: all kinds of layer, at a size that a GPU reads in some milliseconds."""

from __future__ import annotations

import dataclasses

from inkling_jax.config import AttentionConfig, AudioConfig, ModelConfig, TextConfig, VisionConfig


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is compared."""

    config: ModelConfig
    prompt_tokens: int
    new_tokens: int


def size(small: bool) -> Size:
    """2.9 GB of all kinds of layer: dense and sparse, local and global. Small: the same, narrower."""
    hidden = 256 if small else 2048
    layers = 7 if small else 12
    window, extent = (16, 32) if small else (128, 256)
    heads = 4 if small else 16
    text = TextConfig(
        hidden_size=hidden,
        num_layers=layers,
        vocab_size=512 if small else 4096,
        usable_vocab_size=500 if small else 4000,
        max_context=4096,
        dtype="bfloat16",
        global_attention=AttentionConfig(heads, num_kv_heads=2, head_dim=128, rel_extent=extent, window=None),
        local_attention=AttentionConfig(heads, num_kv_heads=heads // 2, head_dim=128, rel_extent=window, window=window),
        local_layers=tuple((i + 1) % 6 != 0 for i in range(layers)),
        dense_layers=tuple(i < 2 for i in range(layers)),
        rel_dim=16,
        log_scaling_floor=2 * window,
        log_scaling_alpha=0.1,
        rms_norm_eps=1e-6,
        use_embed_norm=True,
        conv_width=4,
        logits_divisor=hidden / 256,
        dense_width=4 * hidden,
        expert_width=hidden // 2,
        num_experts=16,
        num_experts_per_token=4,
        num_shared_experts=2,
        route_scale=8.0,
    )
    config = ModelConfig(
        text=text,
        audio=AudioConfig(hidden, num_mel_bins=80, mel_vocab_size=16, dmel_min=-7.0, dmel_max=2.0, use_norm=True),
        vision=VisionConfig(hidden, patch_size=40, temporal_patch_size=2, num_channels=3, num_layers=1, use_norm=True),
        mtp=None,
        eos_token_id=text.usable_vocab_size - 3,
        image_token_id=text.usable_vocab_size - 2,
        audio_token_id=text.usable_vocab_size - 1,
        quant_algo=None,
    )
    return Size(config, *((48, 16) if small else (512, 96)))
