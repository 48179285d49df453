"""The published config.json of a release, and ways to change it."""

from __future__ import annotations

import copy
from typing import Any

# config.json of the smaller release (spec 1.1), typed from the table
SMALL: dict[str, Any] = {
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_mm_model",
    "eos_token_id": 200006,
    "image_token_id": 200054,
    "audio_token_id": 200053,
    "text_config": {
        "model_type": "inkling_model",
        "model_max_length": 1048576,
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "num_hidden_layers": 42,
        "vocab_size": 201024,
        "unpadded_vocab_size": 200058,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "swa_num_attention_heads": 32,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 128,
        "sliding_window_size": 512,
        "d_rel": 16,
        "rel_extent": 1024,
        "q_bias": False,
        "o_bias": False,
        "log_scaling_n_floor": 128000,
        "log_scaling_alpha": 0.1,
        "rms_norm_eps": 1e-6,
        "use_embed_norm": True,
        "local_layer_ids": [i for i in range(42) if i not in (5, 11, 17, 23, 29, 35, 41)],
        "dense_mlp_idx": 2,
        "use_sconv": True,
        "sconv_kernel_size": 4,
        "logits_mup_width_multiplier": 16.0,
        "final_logit_softcapping": None,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "shared_expert_sink": True,
        "dense_intermediate_size": 16384,
        "intermediate_size": 2048,
        "route_scale": 8.0,
        "use_gate_bias": True,
        "use_global_scale": True,
        "norm_after_topk": True,
        "gate_activation": "sigmoid",
    },
    "audio_config": {
        "decoder_dmodel": 4096,
        "n_mel_bins": 80,
        "mel_vocab_size": 16,
        "bias": False,
        "dmel_min_value": -7.0,
        "dmel_max_value": 2.0,
        "use_audio_norm": True,
        "audio_mode": "dmel",
    },
    "vision_config": {
        "vision_encoder_type": "hmlp",
        "decoder_dmodel": 4096,
        "patch_size": 40,
        "temporal_patch_size": 2,
        "n_channels": 3,
        "n_layers": 4,
        "use_vision_norm": True,
    },
    "mtp_config": {"num_nextn_predict_layers": 8, "chain_hidden_post_norm": False, "local_layer_ids": [0, 2, 4, 5, 6, 7]},
}
NVFP4 = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "none"}}
DROP = object()


def changed(section: str = "", base: dict[str, Any] = SMALL, **fields: Any) -> dict[str, Any]:
    """A copy of `base` with fields of one section replaced, or removed where the value is DROP."""
    config = copy.deepcopy(base)
    target = config[section] if section else config
    target.update(fields)
    for name in [name for name, value in target.items() if value is DROP]:
        del target[name]
    return config


def text_only() -> dict[str, Any]:
    """The text fields at the top level, as a text-only release has them."""
    return {"architectures": ["InklingForCausalLM"], "eos_token_id": 200006, **SMALL["text_config"]}
