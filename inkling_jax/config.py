"""Model configuration: frozen dataclasses read from a checkpoint's config.json (every dialect of spec 1.2). Knows no arrays."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inkling_jax import config_read as read
from inkling_jax.config_fields import Fields, read_json_object
from inkling_jax.config_parts import AttentionConfig, AudioConfig, MtpConfig, TextConfig, VisionConfig
from inkling_jax.config_published import published_dict
from inkling_jax.config_quant import QUANT_FILE, read_quant, refuse_embedded
from inkling_jax.errors import CheckpointError, ConfigError

__all__ = ["PRESETS", "AttentionConfig", "AudioConfig", "ModelConfig", "MtpConfig", "TextConfig", "VisionConfig", "preset"]

PRESETS = ("inkling", "inkling-small")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything a checkpoint directory says about the model, besides its tensors."""

    text: TextConfig
    audio: AudioConfig | None
    vision: VisionConfig | None
    mtp: MtpConfig | None
    eos_token_id: int | tuple[int, ...] | None  # as in config.json
    image_token_id: int | None
    audio_token_id: int | None
    quant_algo: str | None  # "NVFP4" or None; tensors decide for themselves, this is for reports

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """Read `config.json` and, where present, `hf_quant_config.json` of the checkpoint directory `path`.

        Raises CheckpointError for a missing directory or file and for invalid JSON, ConfigError for what the files say.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory; expected a checkpoint directory with config.json")
        config_file, quant_file = directory / "config.json", directory / QUANT_FILE
        if not config_file.is_file():
            raise CheckpointError(f"{config_file}: no such file; a checkpoint directory holds one")
        quant = read_json_object(quant_file) if quant_file.exists() else None
        return cls.from_dict(read_json_object(config_file), quant=quant, source=str(config_file))

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], *, quant: Mapping[str, Any] | None = None, source: str = "config.json"
    ) -> ModelConfig:
        """Read the content of config.json (spec 1.2) and of hf_quant_config.json (`quant`, spec 1.3).

        A field that readers would guess differently when it is absent is required. Unknown fields are ignored.
        Raises ConfigError naming `source`, the field, its value and what would be right.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"{source}: expected a JSON object, found {type(config).__name__}")
        root = Fields(config, source)
        fields = read.find_text(root)
        refuse_embedded(root)
        refuse_embedded(fields)
        text = read.read_text(fields, read.read_dtype(fields, root))
        algo = read_quant(quant)
        if algo == "NVFP4":
            read.check_nvfp4(fields)
        usable = text.usable_vocab_size
        image, audio = (read.read_token_id(root, name, usable) for name in ("image_token_id", "audio_token_id"))
        if image is not None and image == audio:
            raise root.error("image_token_id", f"another id than audio_token_id ({audio})")
        text_only = config.get("architectures") == ["InklingForCausalLM"]
        return cls(
            text=text,
            audio=None if text_only else read.read_audio(root, text.hidden_size),
            vision=None if text_only else read.read_vision(root, text.hidden_size),
            mtp=read.read_mtp(root, fields, text.local_attention.rel_extent),
            eos_token_id=read.read_eos(root, fields, usable),
            image_token_id=image,
            audio_token_id=audio,
            quant_algo=algo,
        )

    @property
    def draft_layers(self) -> TextConfig | None:
        """The layers of the draft head as those of a decoder, a dense one each depth (spec 3); None without a head."""
        if self.mtp is None:
            return None
        return dataclasses.replace(
            self.text,
            num_layers=self.mtp.num_depths,
            local_layers=self.mtp.local_depths,
            dense_layers=(True,) * self.mtp.num_depths,
            local_attention=dataclasses.replace(self.text.local_attention, rel_extent=self.mtp.local_extent),
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json in the published dialect: `from_dict` gives this value back, but for `quant_algo`."""
        return published_dict(self)


def preset(name: str) -> ModelConfig:
    """A released model by name, in its real shape (spec 1.1), unquantised. Raises ConfigError for a name not in `PRESETS`."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}, expected one of {', '.join(PRESETS)}")
    large = name == "inkling"
    layers = 66 if large else 42
    hidden = 6144 if large else 4096
    heads = 64 if large else 32
    text = TextConfig(
        hidden_size=hidden,
        num_layers=layers,
        vocab_size=201024,
        usable_vocab_size=200058,
        max_context=1048576,
        dtype="bfloat16",
        global_attention=AttentionConfig(heads, num_kv_heads=8, head_dim=128, rel_extent=1024, window=None),
        local_attention=AttentionConfig(heads, num_kv_heads=16 if large else 8, head_dim=128, rel_extent=512, window=512),
        local_layers=read.default_local_layers(layers),
        dense_layers=tuple(i < 2 for i in range(layers)),
        rel_dim=16,
        log_scaling_floor=128000,
        log_scaling_alpha=0.1,
        rms_norm_eps=1e-6,
        use_embed_norm=True,
        conv_width=4,
        logits_divisor=hidden / 256,
        dense_width=24576 if large else 16384,
        expert_width=3072 if large else 2048,
        num_experts=256,
        num_experts_per_token=6,
        num_shared_experts=2,
        route_scale=8.0,
    )
    return ModelConfig(
        text=text,
        audio=AudioConfig(hidden, num_mel_bins=80, mel_vocab_size=16, dmel_min=-7.0, dmel_max=2.0, use_norm=True),
        vision=VisionConfig(hidden, patch_size=40, temporal_patch_size=2, num_channels=3, num_layers=4, use_norm=True),
        mtp=MtpConfig(8, local_depths=tuple(k not in (1, 3) for k in range(8)), chain_norm=False, local_extent=512),
        eos_token_id=200006,
        image_token_id=200054,
        audio_token_id=200053,
        quant_algo=None,
    )
