"""The parts of a model configuration: frozen dataclasses, no arrays and no files."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Geometry of one kind of attention layer (spec 1.1): heads, width, window and bias extent."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rel_extent: int  # distances 0..rel_extent-1 have a learned bias, beyond it is zero
    window: int | None  # keys visible to a query, itself included; None: all


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The text decoder (spec 2)."""

    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of the embedding, padding included
    usable_vocab_size: int  # ids below this are real
    max_context: int
    dtype: str  # "bfloat16" | "float32" | "float16"
    global_attention: AttentionConfig
    local_attention: AttentionConfig
    local_layers: tuple[bool, ...]
    dense_layers: tuple[bool, ...]
    rel_dim: int  # d_rel
    log_scaling_floor: int | None
    log_scaling_alpha: float
    rms_norm_eps: float
    use_embed_norm: bool
    conv_width: int  # taps of the short convolutions
    logits_divisor: float  # muP width multiplier M
    dense_width: int
    expert_width: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    route_scale: float

    def attention(self, layer: int) -> AttentionConfig:
        """Geometry of decoder layer `layer`."""
        return self.local_attention if self.local_layers[layer] else self.global_attention


@dataclasses.dataclass(frozen=True)
class AudioConfig:
    """The dMel audio tower (spec 5)."""

    hidden_size: int
    num_mel_bins: int
    mel_vocab_size: int
    dmel_min: float
    dmel_max: float
    use_norm: bool


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The hMLP vision tower (spec 4.2)."""

    hidden_size: int
    patch_size: int
    temporal_patch_size: int
    num_channels: int
    num_layers: int
    use_norm: bool


@dataclasses.dataclass(frozen=True)
class MtpConfig:
    """The multi-token-prediction draft head (spec 3)."""

    num_depths: int
    local_depths: tuple[bool, ...]
    chain_norm: bool
    local_extent: int
