"""The parts of a configuration from the fields of config.json: dialects, aliases and bounds (spec 1.2)."""

from __future__ import annotations

from inkling_jax.config_fields import MAX_LAYERS, MAX_SIZE, Fields
from inkling_jax.config_parts import AttentionConfig, AudioConfig, MtpConfig, TextConfig, VisionConfig
from inkling_jax.config_quant import NVFP4_BLOCK


def find_text(root: Fields) -> Fields:
    """Where the text model's fields are: `text_config`, or the top level of a text-only file. Refuses another model family."""
    kind = root.values.get("model_type")
    if kind is not None and not (isinstance(kind, str) and kind.startswith("inkling")):
        raise root.error("model_type", "inkling_mm_model or another type of the Inkling family")
    nested = root.section("text_config")
    if nested is None and root.present("hidden_size") is None:
        raise root.missing("text_config", hint=", and the text fields are not at the top level either")
    return nested or root


def default_local_layers(layers: int) -> tuple[bool, ...]:
    """Five local layers, then a global one (spec 1.2)."""
    return tuple((i + 1) % 6 != 0 for i in range(layers))


def read_dtype(text: Fields, root: Fields) -> str:
    """The dtype of weights and caches; without a name it is that of the releases."""
    for fields in (text, root):
        name = fields.present("torch_dtype", "dtype")
        if name is not None:
            value = fields.values[name]
            dtype = value.removeprefix("torch.") if isinstance(value, str) else None
            if dtype not in ("bfloat16", "float32", "float16"):
                raise fields.error(name, "bfloat16, float32 or float16")
            return dtype
    return "bfloat16"


def read_text(text: Fields, dtype: str) -> TextConfig:
    """The decoder; a size is required wherever public readers would guess differently when it is absent."""
    _refuse_unsupported(text)
    layers = text.integer("num_hidden_layers", high=MAX_LAYERS)
    vocab = text.integer("vocab_size")
    window = text.integer("sliding_window_size", "sliding_window")
    experts = text.integer("n_routed_experts", "num_local_experts", "num_experts")
    dense_width, expert_width = (text.integer(name) for name in _width_names(text))
    return TextConfig(
        hidden_size=text.integer("hidden_size"),
        num_layers=layers,
        vocab_size=vocab,
        usable_vocab_size=text.integer("unpadded_vocab_size", high=vocab, limit="vocab_size", default=vocab),
        max_context=text.integer("model_max_length", "max_position_embeddings"),
        dtype=dtype,
        global_attention=_read_attention(text, "", window=None, extent=text.integer("rel_extent")),
        local_attention=_read_attention(text, "swa_", window=window, extent=window),
        local_layers=_read_local_layers(text, layers),
        dense_layers=_read_dense_layers(text, layers),
        rel_dim=text.integer("d_rel"),
        log_scaling_floor=_read_floor(text),
        log_scaling_alpha=text.number("log_scaling_alpha", low=0, default=0.1),
        rms_norm_eps=text.number("rms_norm_eps", default=1e-6),
        use_embed_norm=text.flag("use_embed_norm", True),
        conv_width=text.integer("sconv_kernel_size", "conv_kernel_size"),
        logits_divisor=text.number("logits_mup_width_multiplier", "embedding_multiplier"),
        dense_width=dense_width,
        expert_width=expert_width,
        num_experts=experts,
        num_experts_per_token=text.integer("num_experts_per_tok", high=experts, limit="the number of routed experts"),
        num_shared_experts=text.integer("n_shared_experts"),
        route_scale=text.number("route_scale"),
    )


def _refuse_unsupported(text: Fields) -> None:
    for name in ("use_sconv", "use_gate_bias", "use_global_scale", "norm_after_topk", "shared_expert_sink"):
        text.require(name, True)
    for name in ("q_bias", "o_bias"):
        text.require(name, False)
    text.require("gate_activation", "sigmoid")
    text.require("hidden_act", "silu")
    if text.present("final_logit_softcapping"):
        raise text.error("final_logit_softcapping", "null (nothing else is supported)")


def _width_names(text: Fields) -> tuple[str, str]:
    """The fields of the dense and of the expert width: `intermediate_size` is the one that has no name of its own (spec 1.2)."""
    dense = text.present("dense_intermediate_size") or "intermediate_size"
    expert = text.present("moe_intermediate_size") or "intermediate_size"
    if dense == expert:
        hint = ": intermediate_size alone does not say whether it is the dense or the expert width"
        raise text.missing("dense_intermediate_size", "moe_intermediate_size", hint=hint)
    return dense, expert


def check_nvfp4(text: Fields) -> None:
    """Both axes that packed experts contract must be whole blocks."""
    for name in ("hidden_size", _width_names(text)[1]):
        if text.integer(name) % NVFP4_BLOCK:
            raise text.error(name, f"a multiple of {NVFP4_BLOCK}, the block of NVFP4")


def _read_attention(text: Fields, prefix: str, *, window: int | None, extent: int) -> AttentionConfig:
    heads = text.integer(f"{prefix}num_attention_heads")
    kv_heads = text.integer(f"{prefix}num_key_value_heads")
    if heads % kv_heads:
        raise text.error(f"{prefix}num_key_value_heads", f"a divisor of {prefix}num_attention_heads ({heads})")
    return AttentionConfig(heads, kv_heads, text.integer(f"{prefix}head_dim"), extent, window)


def _read_local_layers(text: Fields, layers: int) -> tuple[bool, ...]:
    kinds = {"hybrid_sliding": True, "sliding_attention": True, "hybrid": False, "full_attention": False}
    listed = text.kinds("layer_types", layers, kinds)
    if listed is None:
        listed = text.marked(layers, "local_layer_ids")
    return default_local_layers(layers) if listed is None else listed


def _read_dense_layers(text: Fields, layers: int) -> tuple[bool, ...]:
    listed = text.kinds("mlp_layer_types", layers, {"dense": True, "sparse": False})
    if listed is not None:
        return listed
    boundary = text.integer("dense_mlp_idx", low=0, high=layers, limit="num_hidden_layers")
    return tuple(i < boundary for i in range(layers))


def _read_floor(text: Fields) -> int | None:
    """Null switches the scaling off; an absent field is refused because public readers disagree on what it means."""
    if "log_scaling_n_floor" in text.values and text.present("log_scaling_n_floor") is None:
        return None
    return text.integer("log_scaling_n_floor")


def _read_tower_width(tower: Fields, hidden: int) -> int:
    """A tower writes rows of the decoder's width, under whichever name."""
    name = tower.present("decoder_dmodel", "text_hidden_size")
    if name is not None and tower.integer(name) != hidden:
        raise tower.error(name, f"{hidden}, the hidden_size of the text model")
    return hidden


def read_audio(root: Fields, hidden: int) -> AudioConfig | None:
    """The audio tower of a decoder of width `hidden`, or None where the file has none."""
    audio = root.section("audio_config")
    if audio is None:
        return None
    audio.require("audio_mode", "dmel")
    audio.require("bias", False)
    audio.require("rms_norm_eps", 1e-6)
    low = audio.number("dmel_min_value", low=-MAX_SIZE, default=-7.0)
    high = audio.number("dmel_max_value", low=-MAX_SIZE, default=2.0)
    if low >= high:
        raise audio.error("dmel_max_value", f"more than dmel_min_value ({low})")
    return AudioConfig(
        hidden_size=_read_tower_width(audio, hidden),
        num_mel_bins=audio.integer("n_mel_bins"),
        mel_vocab_size=audio.integer("mel_vocab_size"),
        dmel_min=low,
        dmel_max=high,
        use_norm=audio.flag("use_audio_norm", True),
    )


def read_vision(root: Fields, hidden: int) -> VisionConfig | None:
    """The vision tower of a decoder of width `hidden`, or None where the file has none."""
    vision = root.section("vision_config")
    if vision is None:
        return None
    if vision.present("vision_encoder_type") is None:
        raise vision.missing("vision_encoder_type")
    vision.require("vision_encoder_type", "hmlp")
    vision.require("rms_norm_eps", 1e-6)
    return VisionConfig(
        hidden_size=_read_tower_width(vision, hidden),
        patch_size=vision.integer("patch_size"),
        temporal_patch_size=vision.integer("temporal_patch_size"),
        num_channels=vision.integer("n_channels", "num_channels"),
        num_layers=vision.integer("n_layers", "num_hidden_layers", high=MAX_LAYERS),
        use_norm=vision.flag("use_vision_norm", True),
    )


def read_mtp(root: Fields, text: Fields, window: int) -> MtpConfig | None:
    """The draft head, from `mtp_config` or promoted into the text fields; None where neither counts a depth."""
    section = root.section("mtp_config")
    counts = ("num_nextn_predict_layers", "num_mtp_layers")
    if section is None and text.present(*counts) is None:
        return None
    fields = section or text
    depths = fields.integer(*counts, low=0, high=MAX_LAYERS)
    if depths == 0:
        return None
    # among the text fields, local_layer_ids are the trunk's
    local = fields.marked(depths, *(("mtp_local_layer_ids",) if section is None else ("local_layer_ids", "mtp_local_layer_ids")))
    fields.require("mtp_hidden_states_first", True)
    return MtpConfig(
        num_depths=depths,
        local_depths=(False,) * depths if local is None else local,
        chain_norm=fields.flag("chain_hidden_post_norm", False),
        local_extent=fields.integer("local_extent", "mtp_local_extent", default=window),
    )


def read_token_id(fields: Fields, name: str, usable: int) -> int | None:
    """A token id below the usable vocabulary, or None where absent."""
    if fields.present(name) is None:
        return None
    return fields.integer(name, low=0, high=usable - 1, limit="the last usable id")


def read_eos(root: Fields, text: Fields, usable: int) -> int | tuple[int, ...] | None:
    """The top level's stop ids, else the text model's; there 2 is a class default that a writer left, not an id (spec 1.2)."""
    name = "eos_token_id"
    fields = root if root.present(name) else text
    value = fields.values.get(name)
    if fields is text and value == 2:
        return None
    if isinstance(value, (list, tuple)):
        return fields.integers(name, usable, "the usable vocabulary")
    return read_token_id(fields, name, usable)
