"""A tiny checkpoint of random weights in the published NVFP4 layout, with towers and a tokenizer: for demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inkling_jax.config import ModelConfig
from inkling_jax.convert.write import write_checkpoint
from inkling_jax.inputs.demo_tokenizer import write_demo_tokenizer

VOCABULARY = 1000

# The released shape made small: the same kinds of layers in the same order, and a head width, group and block that kernels take.
TEXT: dict[str, Any] = {
    "model_type": "inkling_model",
    "model_max_length": 4096,
    "torch_dtype": "bfloat16",
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "vocab_size": 1024,
    "unpadded_vocab_size": VOCABULARY,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 32,
    "sliding_window_size": 64,
    "d_rel": 16,
    "rel_extent": 128,
    "local_layer_ids": [0, 1, 2, 3, 4],
    "dense_mlp_idx": 2,
    "sconv_kernel_size": 4,
    "logits_mup_width_multiplier": 0.5,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "dense_intermediate_size": 256,
    "intermediate_size": 64,
    "route_scale": 8.0,
    "rms_norm_eps": 1e-6,
    "use_embed_norm": True,
    "log_scaling_n_floor": 128000,
    "log_scaling_alpha": 0.1,
}
VISION = {
    "vision_encoder_type": "hmlp",
    "patch_size": 40,
    "temporal_patch_size": 2,
    "n_channels": 3,
    "n_layers": 2,  # of the released four the third alone would weigh 49 MB
}
AUDIO = {"n_mel_bins": 80, "mel_vocab_size": 16, "dmel_min_value": -7.0, "dmel_max_value": 2.0}
DRAFT_HEAD = {"num_nextn_predict_layers": 2, "chain_hidden_post_norm": False, "local_layer_ids": [0]}


def write_demo_model(directory: str | Path) -> int:
    """Write the checkpoint and its tokenizer; bytes of weights. InputError for a directory that holds weights already.

    It has learned nothing: its text is noise.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = ModelConfig.from_dict(
        {
            "architectures": ["InklingForConditionalGeneration"],
            "text_config": TEXT,
            "vision_config": VISION | {"decoder_dmodel": TEXT["hidden_size"]},
            "audio_config": AUDIO | {"decoder_dmodel": TEXT["hidden_size"]},
            "mtp_config": DRAFT_HEAD,
            **write_demo_tokenizer(directory, VOCABULARY),
        },
        quant={"quantization": {"quant_algo": "NVFP4", "group_size": 16}},
    )
    return write_checkpoint(directory, config, seed=1, nvfp4=True)
