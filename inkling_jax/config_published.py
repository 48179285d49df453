"""A configuration written back in the dialect of the published config.json (spec 1.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inkling_jax.config import AudioConfig, ModelConfig, MtpConfig, TextConfig, VisionConfig


def published_dict(config: ModelConfig) -> dict[str, Any]:
    """The content of config.json, ready for json.dump; absent parts and ids are left out."""
    text_only = config.audio is None and config.vision is None
    out: dict[str, Any] = {
        "architectures": ["InklingForCausalLM" if text_only else "InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "text_config": _text(config.text),
    }
    eos = config.eos_token_id
    ids = {
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "image_token_id": config.image_token_id,
        "audio_token_id": config.audio_token_id,
    }
    out |= {name: value for name, value in ids.items() if value is not None}
    if config.audio is not None:
        out["audio_config"] = _audio(config.audio)
    if config.vision is not None:
        out["vision_config"] = _vision(config.vision)
    if config.mtp is not None:
        out["mtp_config"] = _mtp(config.mtp, config.text.local_attention.rel_extent)
    return out


def _text(text: TextConfig) -> dict[str, Any]:
    wide, local = text.global_attention, text.local_attention
    out = {
        "model_type": "inkling_model",
        "model_max_length": text.max_context,
        "torch_dtype": text.dtype,
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_layers,
        "vocab_size": text.vocab_size,
        "unpadded_vocab_size": text.usable_vocab_size,
        "num_attention_heads": wide.num_heads,
        "num_key_value_heads": wide.num_kv_heads,
        "head_dim": wide.head_dim,
        "swa_num_attention_heads": local.num_heads,
        "swa_num_key_value_heads": local.num_kv_heads,
        "swa_head_dim": local.head_dim,
        "sliding_window_size": local.window,
        "d_rel": text.rel_dim,
        "rel_extent": wide.rel_extent,
        "q_bias": False,
        "o_bias": False,
        "log_scaling_n_floor": text.log_scaling_floor,
        "log_scaling_alpha": text.log_scaling_alpha,
        "rms_norm_eps": text.rms_norm_eps,
        "use_embed_norm": text.use_embed_norm,
        "local_layer_ids": _indices(text.local_layers),
        "dense_mlp_idx": sum(text.dense_layers),
        "use_sconv": True,
        "sconv_kernel_size": text.conv_width,
        "logits_mup_width_multiplier": text.logits_divisor,
        "final_logit_softcapping": None,
        "n_routed_experts": text.num_experts,
        "num_experts_per_tok": text.num_experts_per_token,
        "n_shared_experts": text.num_shared_experts,
        "shared_expert_sink": True,
        "dense_intermediate_size": text.dense_width,
        "intermediate_size": text.expert_width,
        "route_scale": text.route_scale,
        "use_gate_bias": True,
        "use_global_scale": True,
        "norm_after_topk": True,
        "gate_activation": "sigmoid",
    }
    if _indices(text.dense_layers) != list(range(sum(text.dense_layers))):  # a boundary cannot say it, the list can
        out["mlp_layer_types"] = ["dense" if dense else "sparse" for dense in text.dense_layers]
    return out


def _audio(audio: AudioConfig) -> dict[str, Any]:
    return {
        "decoder_dmodel": audio.hidden_size,
        "n_mel_bins": audio.num_mel_bins,
        "mel_vocab_size": audio.mel_vocab_size,
        "bias": False,
        "dmel_min_value": audio.dmel_min,
        "dmel_max_value": audio.dmel_max,
        "use_audio_norm": audio.use_norm,
        "audio_mode": "dmel",
    }


def _vision(vision: VisionConfig) -> dict[str, Any]:
    return {
        "vision_encoder_type": "hmlp",
        "decoder_dmodel": vision.hidden_size,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "n_channels": vision.num_channels,
        "n_layers": vision.num_layers,
        "use_vision_norm": vision.use_norm,
    }


def _mtp(mtp: MtpConfig, trunk_extent: int) -> dict[str, Any]:
    out: dict[str, Any] = {
        "num_nextn_predict_layers": mtp.num_depths,
        "chain_hidden_post_norm": mtp.chain_norm,
        "local_layer_ids": _indices(mtp.local_depths),
    }
    if mtp.local_extent != trunk_extent:  # the releases leave it out where it equals the window
        out["local_extent"] = mtp.local_extent
    return out


def _indices(flags: tuple[bool, ...]) -> list[int]:
    return [index for index, flag in enumerate(flags) if flag]
