"""The nano model: the published architecture in full at 6.7 million parameters, 10.06 MB of weights as NVFP4.

| part (width 128, heads of 128) | MB in NVFP4 layout |
| --- | --- |
| vision: one linear [128, 9600] | 2.46 |
| audio: table [1280, 128]; embedding and head of 1024 ids | 0.33 + 0.52 |
| 7 layers' attention: 2 query heads, 1 key head; layers 2 and 5 global, the others with a window of 128 | 1.48 |
| 3 dense feed-forwards of 256 | 0.59 |
| 4 sparse ones: 8 routed experts of 256, 2 of them chosen, 1 shared; the first in bfloat16, as in releases | 1.77 + 3 x 0.64 |
| 2 draft depths, one local, one global | 0.95 |

All sizes are ones that the kernels for Hopper take: a width of 128 wants experts of 256, a width of 256 leaves the tower 5 MB.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from inkling_jax.config import AttentionConfig, AudioConfig, ModelConfig, MtpConfig, TextConfig, VisionConfig

VOCABULARY = 1024  # rows of the tables; the tokenizer may have fewer ids
QK_NORM = 128**0.25  # of queries and of keys: scores, which the model divides by 128, then have the usual scale 1 / sqrt(128)


def nano_config(usable_vocab_size: int, ids: Mapping[str, int]) -> ModelConfig:
    """The configuration for a tokenizer of so many ids; `ids` are the fields that it gives config.json."""
    size, window, layers = 128, 128, 7
    text = TextConfig(
        hidden_size=size,
        num_layers=layers,
        vocab_size=VOCABULARY,
        usable_vocab_size=usable_vocab_size,
        max_context=4096,
        dtype="bfloat16",
        global_attention=AttentionConfig(2, num_kv_heads=1, head_dim=128, rel_extent=256, window=None),
        local_attention=AttentionConfig(2, num_kv_heads=1, head_dim=128, rel_extent=window, window=window),
        local_layers=tuple((i + 1) % 3 != 0 for i in range(layers)),
        dense_layers=tuple(i < 3 for i in range(layers)),
        rel_dim=16,
        log_scaling_floor=128000,
        log_scaling_alpha=0.1,
        rms_norm_eps=1e-6,
        use_embed_norm=True,
        conv_width=4,
        logits_divisor=size / 256,
        dense_width=256,
        expert_width=256,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=1,
        route_scale=8.0,
    )
    return ModelConfig(
        text=text,
        audio=AudioConfig(size, num_mel_bins=80, mel_vocab_size=16, dmel_min=-7.0, dmel_max=2.0, use_norm=True),
        vision=VisionConfig(size, patch_size=40, temporal_patch_size=2, num_channels=3, num_layers=1, use_norm=True),
        mtp=MtpConfig(2, local_depths=(True, False), chain_norm=False, local_extent=window),
        eos_token_id=ids["eos_token_id"],
        image_token_id=ids["image_token_id"],
        audio_token_id=ids["audio_token_id"],
        quant_algo=None,
    )


def initial_value(path: str, shape: tuple[int, ...], config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    """A parameter before training, in float32, by its role: see `Inkling` and its layers for the paths."""
    layers = config.text.num_layers

    def normal(spread: float) -> np.ndarray:
        return (spread * rng.standard_normal(shape)).astype(np.float32)

    if re.search(r"[qk]_norm\.weight$", path):
        return np.full(shape, QK_NORM, np.float32)
    if "norm" in path:
        return np.ones(shape, np.float32)
    if path.endswith(("router.bias", "conv.weight")):  # a convolution adds nothing yet to its own residual
        return np.zeros(shape, np.float32)
    if path.endswith("router.global_scale"):
        chosen = config.text.num_experts_per_token + config.text.num_shared_experts
        return np.full(shape, chosen / config.text.route_scale, np.float32)  # the weights of a token then add up to `chosen`
    if path.endswith("global_scale"):
        return np.ones(shape, np.float32)
    if path in ("embed", "audio.embed"):
        return normal(1.0)
    if path == "unembed" or path.endswith(("rel_bias", "router.weight")):
        return normal(0.02)
    inputs = int(np.prod(shape[1:])) if path.endswith("shared.w2") else shape[-1]
    into_stream = path.endswith(("o_proj", "w2"))
    return normal(inputs**-0.5 * ((2 * layers) ** -0.5 if into_stream else 1.0))


def rate_of(path: str, shape: tuple[int, ...]) -> float:
    """A parameter's learning rate as a part of the highest: less for matrices of many inputs, most of all the vision tower's.

    Each step moves every weight as far, and inputs that agree, as the pixels of an even ground do, add that up.
    """
    if len(shape) < 2 or path.endswith(("conv.weight", "rel_bias", "embed")):
        return 1.0
    return min(1.0, (128 / shape[-1]) ** 0.75)


def trained_by_decay(path: str, value: Any) -> bool:
    """Whether weight decay applies: to matrices, but not to convolutions, the bias by distance and the tables of rows."""
    return value.ndim > 1 and not path.endswith(("conv.weight", "rel_bias", "embed"))
