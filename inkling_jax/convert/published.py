"""Every tensor of the published layout for a configuration: name, dtype and shape (spec 7.1 to 7.4, 3, 4.2)."""

from __future__ import annotations

from inkling_jax.config import AttentionConfig, ModelConfig, TextConfig
from inkling_jax.config_vision import vision_folds

Layout = dict[str, tuple[str, tuple[int, ...]]]


def published_tensors(config: ModelConfig, nvfp4: bool) -> Layout:
    """Tensor name -> (dtype, shape). With `nvfp4` the routed experts are packed, except those of the first sparse layer."""
    text = config.text
    width = text.hidden_size
    layout: Layout = {
        "model.llm.embed.weight": ("BF16", (text.vocab_size, width)),
        "model.llm.norm.weight": ("BF16", (width,)),
        "model.llm.unembed.weight": ("BF16", (text.vocab_size, width)),
    }
    if text.use_embed_norm:
        layout["model.llm.embed_norm.weight"] = ("BF16", (width,))
    for layer in range(text.num_layers):
        prefix = f"model.llm.layers.{layer}."
        layout |= _block(prefix, text, text.attention(layer))
        if text.dense_layers[layer]:
            layout |= _dense(prefix, text)
        else:
            layout |= _sparse(prefix, text, nvfp4 and not is_first_sparse(text, layer))
    return layout | _towers(config) | _draft_head(config)


def is_first_sparse(text: TextConfig, layer: int) -> bool:
    """Whether `layer` is the first one with experts, which NVFP4 releases keep in BF16."""
    return not text.dense_layers[layer] and all(text.dense_layers[:layer])


def _block(prefix: str, text: TextConfig, attention: AttentionConfig) -> Layout:
    """Attention, norms and convolutions, the same in every layer and draft depth."""
    width, taps, head = text.hidden_size, text.conv_width, attention.head_dim
    heads, kv = attention.num_heads * head, attention.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "attn.wq_du.weight": (heads, width),
        "attn.wk_dv.weight": (kv, width),
        "attn.wv_dv.weight": (kv, width),
        "attn.wr_du.weight": (attention.num_heads * text.rel_dim, width),
        "attn.wo_ud.weight": (width, heads),
        "attn.q_norm.weight": (head,),
        "attn.k_norm.weight": (head,),
        "attn.rel_logits_proj.proj": (text.rel_dim, attention.rel_extent),
        "attn.k_sconv.weight": (kv, 1, taps),
        "attn.v_sconv.weight": (kv, 1, taps),
        "attn_norm.weight": (width,),
        "mlp_norm.weight": (width,),
        "attn_sconv.weight": (width, 1, taps),
        "mlp_sconv.weight": (width, 1, taps),
    }
    return {prefix + name: ("BF16", shape) for name, shape in shapes.items()}


def _dense(prefix: str, text: TextConfig) -> Layout:
    width, inner = text.hidden_size, text.dense_width
    return {
        prefix + "mlp.w13_dn.weight": ("BF16", (2 * inner, width)),
        prefix + "mlp.w2_md.weight": ("BF16", (width, inner)),
        prefix + "mlp.global_scale": ("BF16", (1,)),
    }


def _sparse(prefix: str, text: TextConfig, packed: bool) -> Layout:
    width, inner, experts, shared = text.hidden_size, text.expert_width, text.num_experts, text.num_shared_experts
    layout: Layout = {
        prefix + "mlp.gate.weight": ("BF16", (experts + shared, width)),
        prefix + "mlp.gate.bias": ("F32", (experts,)),
        prefix + "mlp.gate.global_scale": ("F32", (1,)),
        prefix + "mlp.shared_experts.shared_w13_weight": ("BF16", (shared, 2 * inner, width)),
        prefix + "mlp.shared_experts.shared_w2_weight": ("BF16", (shared, width, inner)),
    }
    for matrix, shape in (("w13", (experts, 2 * inner, width)), ("w2", (experts, width, inner))):
        name = f"{prefix}mlp.experts.{matrix}_weight"
        layout |= packed_stack(name, shape) if packed else {name: ("BF16", shape)}
    return layout


def packed_stack(name: str, shape: tuple[int, int, int]) -> Layout:
    """The tensors that stand for a stack [E, O, I] in NVFP4 (spec 7.4)."""
    experts, rows, columns = shape
    return {
        name: ("U8", (experts, rows, columns // 2)),
        name + ".scale": ("F8_E4M3", (experts, rows, columns // 16)),
        name + ".scale2": ("F32", (experts,)),
        name + ".input_amax": ("BF16", (1,)),
        name + ".original_shape": ("I64", (3,)),
    }


def _towers(config: ModelConfig) -> Layout:
    layout: Layout = {}
    if (audio := config.audio) is not None:
        layout["model.audio.encoder.weight"] = ("BF16", (audio.num_mel_bins * audio.mel_vocab_size, audio.hidden_size))
        if audio.use_norm:
            layout["model.audio.final_norm.weight"] = ("BF16", (audio.hidden_size,))
    if (vision := config.vision) is not None:
        folds = vision_folds(vision)
        for index, fold in enumerate(folds):
            layout[f"model.visual.layers.linear_{index}.weight"] = ("BF16", (fold.outputs, fold.inputs))
            if index < len(folds) - 1:
                layout[f"model.visual.layers.norm_{index}.weight"] = ("BF16", (fold.outputs,))
        if vision.use_norm:
            layout["model.visual.final_norm.weight"] = ("BF16", (vision.hidden_size,))
    return layout


def _draft_head(config: ModelConfig) -> Layout:
    layout: Layout = {}
    if config.mtp is None or (layers := config.draft_layers) is None:
        return layout
    width = layers.hidden_size
    for depth in range(layers.num_layers):
        prefix = f"model.mtp.layers.{depth}."
        layout[prefix + "hidden_norm.weight"] = ("BF16", (width,))
        layout[prefix + "embed_norm.weight"] = ("BF16", (width,))
        layout[prefix + "input_proj.weight"] = ("BF16", (width, 2 * width))
        block = prefix + "transformer_block."
        layout |= _block(block, layers, layers.attention(depth)) | _dense(block, layers)
    if config.mtp.chain_norm:
        layout["model.mtp.chain_norm.weight"] = ("BF16", (width,))
    return layout
