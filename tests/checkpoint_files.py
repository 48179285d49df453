"""Small checkpoints to damage: a configuration with every kind of layer, and a reader and writer that share no code with ours."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from inkling_jax.config import ModelConfig
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.convert.write import write_checkpoint

SPELLINGS = {
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "int64": "I64",
}
TYPES = {
    "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "I64": np.int64,
}
Tensors = dict[str, np.ndarray]


def micro_config(**text: Any) -> ModelConfig:
    """Five layers: dense 0 and 1, sparse 2 to 4, layer 3 global; every width differs from every other."""
    return ModelConfig.from_dict(
        {
            "architectures": ["InklingForConditionalGeneration"],
            "model_type": "inkling_mm_model",
            "eos_token_id": 60,
            "text_config": {
                "model_max_length": 512,
                "torch_dtype": "bfloat16",
                "hidden_size": 48,
                "num_hidden_layers": 5,
                "vocab_size": 72,
                "unpadded_vocab_size": 70,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "swa_num_attention_heads": 6,
                "swa_num_key_value_heads": 2,
                "swa_head_dim": 4,
                "sliding_window_size": 12,
                "d_rel": 5,
                "rel_extent": 20,
                "local_layer_ids": [0, 1, 2, 4],
                "dense_mlp_idx": 2,
                "sconv_kernel_size": 4,
                "logits_mup_width_multiplier": 2.0,
                "n_routed_experts": 3,
                "num_experts_per_tok": 2,
                "n_shared_experts": 2,
                "dense_intermediate_size": 28,
                "intermediate_size": 16,
                "route_scale": 8.0,
                "rms_norm_eps": 1e-6,
                "use_embed_norm": True,
                "log_scaling_n_floor": 16,
                "log_scaling_alpha": 0.1,
                **text,
            },
            "mtp_config": {"num_nextn_predict_layers": 2, "chain_hidden_post_norm": True, "local_layer_ids": [0]},
            "audio_config": {
                "decoder_dmodel": text.get("hidden_size", 48),
                "n_mel_bins": 80,
                "mel_vocab_size": 16,
                "dmel_min_value": -7.0,
                "dmel_max_value": 2.0,
            },
            "vision_config": {
                "vision_encoder_type": "hmlp",
                "decoder_dmodel": text.get("hidden_size", 48),
                "patch_size": 40,
                "temporal_patch_size": 2,
                "n_channels": 3,
                "n_layers": 1,
            },
        }
    )


def save(file: Path, tensors: Tensors) -> None:
    """Write one safetensors file."""
    header, data = {}, b""
    for name, array in tensors.items():
        begin, data = len(data), data + array.tobytes()
        header[name] = {"dtype": SPELLINGS[array.dtype.name], "shape": list(array.shape), "data_offsets": [begin, len(data)]}
    file.write_bytes(frame(json.dumps(header).encode()) + data)


def frame(header: bytes) -> bytes:
    """A header as it begins a file."""
    return struct.pack("<Q", len(header)) + header


def load(directory: Path) -> Tensors:
    """Every tensor of every safetensors file in a directory."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        for name, entry in json.loads(content[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            dtype, (begin, _) = np.dtype(TYPES[entry["dtype"]]), entry["data_offsets"]
            count = math.prod(entry["shape"])
            tensors[name] = np.frombuffer(content, dtype, count, 8 + length + begin).reshape(entry["shape"])
    return tensors


def micro_checkpoint(directory: Path, nvfp4: bool, edit: Callable[[Tensors], Any] | None = None, **text: Any) -> ModelConfig:
    """Write a micro checkpoint; with `edit`, as a single file of the tensors that it leaves."""
    config = micro_config(**text)
    write_checkpoint(directory, config, seed=5, nvfp4=nvfp4)
    if edit is not None:
        tensors = load(directory)
        edit(tensors)
        for file in [*directory.glob("*.safetensors"), directory / "model.safetensors.index.json"]:
            file.unlink()
        save(directory / "model.safetensors", tensors)
    return config


def plan_of(directory: Path, config: ModelConfig | None = None, *, draft: bool = False) -> WeightPlan:
    """The plan of a checkpoint directory, with `draft` of its draft head too."""
    return WeightPlan.build(config or ModelConfig.from_directory(directory), Checkpoint.open(directory), draft=draft)
