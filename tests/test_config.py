"""Configuration: every dialect reads to the same value, and the releases have the published shapes."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_files import DROP, NVFP4, SMALL, changed, text_only

import inkling_jax
from inkling_jax.config import PRESETS, AttentionConfig, AudioConfig, ModelConfig, MtpConfig, VisionConfig, preset
from inkling_jax.errors import ConfigError

# what the larger release changes
LARGE_TEXT = {
    "hidden_size": 6144,
    "num_hidden_layers": 66,
    "num_attention_heads": 64,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 16,
    "local_layer_ids": [i for i in range(66) if i not in (5, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65)],
    "logits_mup_width_multiplier": 24.0,
    "dense_intermediate_size": 24576,
    "intermediate_size": 3072,
}


def renamed(section: str, **names: str) -> dict[str, Any]:
    """A copy of SMALL in which fields of one section have another spelling."""
    config = copy.deepcopy(SMALL)
    for old, new in names.items():
        config[section][new] = config[section].pop(old)
    return config


def large() -> dict[str, Any]:
    config = changed("text_config", **LARGE_TEXT)
    config["audio_config"]["decoder_dmodel"] = config["vision_config"]["decoder_dmodel"] = 6144
    return config


# --- the releases ---


@pytest.mark.parametrize(("name", "published"), [("inkling-small", SMALL), ("inkling", large())])
def test_preset_is_the_published_file(name: str, published: dict[str, Any]) -> None:
    assert name in PRESETS
    assert ModelConfig.from_dict(published) == preset(name)
    assert preset(name).to_dict() == published


def test_small_values() -> None:
    config = ModelConfig.from_dict(SMALL)
    text = config.text
    assert text.global_attention == AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128, rel_extent=1024, window=None)
    assert text.local_attention == AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128, rel_extent=512, window=512)
    assert [i for i, local in enumerate(text.local_layers) if not local] == [5, 11, 17, 23, 29, 35, 41]
    assert (text.attention(4).window, text.attention(5).window) == (512, None)
    assert text.dense_layers == (True,) * 2 + (False,) * 40
    assert (text.dense_width, text.expert_width) == (16384, 2048)
    assert (text.vocab_size, text.usable_vocab_size, text.max_context, text.dtype) == (201024, 200058, 1048576, "bfloat16")
    assert (text.log_scaling_floor, text.log_scaling_alpha, text.logits_divisor, text.route_scale) == (128000, 0.1, 16.0, 8.0)
    assert (text.num_experts, text.num_experts_per_token, text.num_shared_experts, text.conv_width) == (256, 6, 2, 4)
    assert config.audio == AudioConfig(4096, 80, 16, -7.0, 2.0, True)
    assert config.vision == VisionConfig(4096, 40, 2, 3, 4, True)
    assert config.mtp == MtpConfig(8, (True, False, True, False, True, True, True, True), False, 512)
    assert (config.eos_token_id, config.image_token_id, config.audio_token_id) == (200006, 200054, 200053)
    assert config.quant_algo is None


def test_large_has_other_kv_heads_on_local_layers() -> None:
    text = preset("inkling").text
    assert (text.attention(0).num_kv_heads, text.attention(5).num_kv_heads) == (16, 8)
    assert sum(text.local_layers) == 55 and len(text.local_layers) == 66
    assert text.logits_divisor == 24.0


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'inkling-tiny'.*inkling, inkling-small"):
        preset("inkling-tiny")


# --- dialects: each says the same as SMALL ---

KINDS = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(42)]
HYBRID = ["hybrid" if i % 6 == 5 else "hybrid_sliding" for i in range(42)]
SAME = {
    "hugging face widths": changed(
        "text_config", dense_intermediate_size=DROP, intermediate_size=16384, moe_intermediate_size=2048
    ),
    "expert width by its own name beside the published ones": changed(
        "text_config", moe_intermediate_size=2048, intermediate_size=1
    ),
    "text aliases": renamed(
        "text_config",
        sconv_kernel_size="conv_kernel_size",
        model_max_length="max_position_embeddings",
        n_routed_experts="num_local_experts",
        sliding_window_size="sliding_window",
        logits_mup_width_multiplier="embedding_multiplier",
        torch_dtype="dtype",
    ),
    "num_experts": renamed("text_config", n_routed_experts="num_experts"),
    "layer_types before local_layer_ids": changed("text_config", layer_types=HYBRID, local_layer_ids=[0]),
    "layer_types, other names": changed("text_config", layer_types=KINDS, local_layer_ids=DROP),
    "default pattern": changed("text_config", local_layer_ids=DROP),
    "null lists": changed("text_config", layer_types=None, local_layer_ids=None, mlp_layer_types=None),
    "mlp_layer_types": changed("text_config", dense_mlp_idx=DROP, mlp_layer_types=["dense"] * 2 + ["sparse"] * 40),
    "mlp_layer_types before dense_mlp_idx": changed(
        "text_config", dense_mlp_idx=9, mlp_layer_types=["dense"] * 2 + ["sparse"] * 40
    ),
    "torch. prefix": changed("text_config", torch_dtype="torch.bfloat16"),
    "dtype at the top": changed(base=changed("text_config", torch_dtype=DROP), dtype="bfloat16"),
    "audio width alias": renamed("audio_config", decoder_dmodel="text_hidden_size"),
    "audio width from the text": changed("audio_config", decoder_dmodel=DROP),
    "vision aliases": renamed(
        "vision_config", decoder_dmodel="text_hidden_size", n_channels="num_channels", n_layers="num_hidden_layers"
    ),
    "vision class defaults beside": changed("vision_config", hidden_size=1024, num_attention_heads=16),
    "promoted draft head": changed(
        base=changed("text_config", num_mtp_layers=8, mtp_local_layer_ids=[0, 2, 4, 5, 6, 7], chain_hidden_post_norm=False),
        mtp_config=DROP,
    ),
    "draft head twice": changed("text_config", num_mtp_layers=8, mtp_local_layer_ids=[0, 2, 4, 5, 6, 7]),
    "explicit draft extent": changed("mtp_config", mtp_local_extent=512),
    "stop id in the text": changed(base=changed("text_config", eos_token_id=200006), eos_token_id=DROP),
    "class default stop id in the text": changed("text_config", eos_token_id=2),
    "unknown fields": changed("text_config", rope_theta=10000.0, rope_parameters=None, padded_vocab_size=201088, new=[1]),
}


@pytest.mark.parametrize("name", SAME)
def test_dialect_reads_the_same(name: str) -> None:
    assert ModelConfig.from_dict(SAME[name]) == ModelConfig.from_dict(SMALL)


def test_expert_width_by_its_own_name_survives_a_round_trip() -> None:
    fields = changed("text_config", dense_intermediate_size=DROP, moe_intermediate_size=1024, intermediate_size=2048)
    config = ModelConfig.from_dict(fields)
    assert (config.text.expert_width, config.text.dense_width) == (1024, 2048)
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert (again.text.expert_width, again.text.dense_width) == (1024, 2048)


@pytest.mark.parametrize("spelling", ["bfloat16", "float32", "float16"])
def test_dtype(spelling: str) -> None:
    for value in (spelling, f"torch.{spelling}"):
        assert ModelConfig.from_dict(changed("text_config", torch_dtype=value)).text.dtype == spelling


def test_text_only_file_reads_the_same_text() -> None:
    config = ModelConfig.from_dict(text_only())
    assert config.text == ModelConfig.from_dict(SMALL).text
    assert (config.audio, config.vision, config.mtp, config.eos_token_id) == (None, None, None, 200006)
    promoted = ModelConfig.from_dict({**text_only(), "num_mtp_layers": 3, "mtp_local_layer_ids": [1]})
    assert promoted.mtp == MtpConfig(3, (False, True, False), False, 512)  # not the trunk's local_layer_ids
    nested = changed(architectures=["InklingForCausalLM"])
    assert ModelConfig.from_dict(nested).audio is None
    assert ModelConfig.from_dict({**text_only(), "eos_token_id": 2}).eos_token_id is None


@pytest.mark.parametrize("value", [DROP, None])
def test_absent_parts(value: object) -> None:
    absent = changed(
        audio_config=value, vision_config=value, mtp_config=value, eos_token_id=value, image_token_id=value, audio_token_id=value
    )
    config = ModelConfig.from_dict(absent)
    assert config.text == ModelConfig.from_dict(SMALL).text
    for name in ("audio", "vision", "mtp", "eos_token_id", "image_token_id", "audio_token_id"):
        assert getattr(config, name) is None, name


def test_padding_is_optional_and_no_floor_means_off() -> None:
    text = ModelConfig.from_dict(changed("text_config", unpadded_vocab_size=DROP, log_scaling_n_floor=None)).text
    assert (text.usable_vocab_size, text.log_scaling_floor) == (201024, None)


def test_draft_head_variants() -> None:
    def mtp(**fields: Any) -> MtpConfig | None:
        return ModelConfig.from_dict(changed("mtp_config", **fields)).mtp

    assert mtp(local_layer_ids=[]) == mtp(local_layer_ids=DROP) == MtpConfig(8, (False,) * 8, False, 512)
    for name in ("local_extent", "mtp_local_extent"):
        found = mtp(**{name: 256})
        assert found is not None and found.local_extent == 256
    chained = mtp(chain_hidden_post_norm=True)
    assert chained is not None and chained.chain_norm
    assert mtp(num_nextn_predict_layers=0) is None


@pytest.mark.parametrize(("value", "expected"), [(7, 7), ([7, 9], (7, 9)), ((7,), (7,)), ([], ()), (0, 0)])
def test_stop_ids(value: Any, expected: Any) -> None:
    assert ModelConfig.from_dict(changed(eos_token_id=value)).eos_token_id == expected


# --- round trip ---

ODD = changed(
    base=changed(
        "mtp_config",
        base=changed(
            "text_config",
            mlp_layer_types=["sparse", "dense"] * 21,
            layer_types=["hybrid"] * 42,
            log_scaling_n_floor=None,
            torch_dtype="float32",
            use_embed_norm=False,
            swa_head_dim=64,
        ),
        local_extent=100,
        chain_hidden_post_norm=True,
    ),
    eos_token_id=[3, 5],
    vision_config=DROP,
)


@pytest.mark.parametrize("config", [SMALL, ODD, text_only(), changed("text_config", local_layer_ids=[])])
def test_round_trip(config: dict[str, Any]) -> None:
    first = ModelConfig.from_dict(config, quant=NVFP4)
    again = ModelConfig.from_dict(json.loads(json.dumps(first.to_dict())), quant=NVFP4)
    assert again == first
    unpacked = dataclasses.replace(first, quant_algo=None)
    assert ModelConfig.from_dict(unpacked.to_dict()) == unpacked


def test_odd_patterns_survive() -> None:
    text = ModelConfig.from_dict(ModelConfig.from_dict(ODD).to_dict()).text
    assert text.dense_layers == (False, True) * 21
    assert not any(text.local_layers)


# --- files ---

# hidden, layers, usable, (kv heads, local kv heads, head width), window, extent, floor, dense, expert, experts, active, divisor
ORACLE = {
    "tiny": (128, 8, 500, (2, 4, 32), 16, 32, 24, 256, 64, 16, 4, 4.0),
    "wide": (144, 7, 384, (3, 6, 16), 24, 64, None, 192, 80, 12, 6, 3.0),
    "gpu": (256, 6, 512, (1, 2, 128), 128, 256, 200, 256, 256, 8, 3, 1.0),
}


@pytest.mark.parametrize("name", ORACLE)
def test_reference_checkpoint(name: str, oracle_dir: Callable[..., Path]) -> None:
    config = ModelConfig.from_directory(oracle_dir(name, "nvfp4"))
    text = config.text
    heads = (text.global_attention.num_kv_heads, text.local_attention.num_kv_heads, text.local_attention.head_dim)
    assert (text.hidden_size, text.num_layers, text.usable_vocab_size, heads) == ORACLE[name][:4]
    assert (text.local_attention.window, text.global_attention.rel_extent, text.log_scaling_floor) == ORACLE[name][4:7]
    assert (text.dense_width, text.expert_width, text.num_experts) == ORACLE[name][7:10]
    assert (text.num_experts_per_token, text.logits_divisor) == ORACLE[name][10:]
    assert text.local_attention.rel_extent == text.local_attention.window
    assert [i for i, local in enumerate(text.local_layers) if not local] == [5]
    assert text.dense_layers.count(True) == 2
    assert config.quant_algo == "NVFP4"
    assert ModelConfig.from_dict(config.to_dict(), quant=NVFP4) == config


def test_configuration_knows_no_arrays() -> None:
    package = Path(inkling_jax.__file__).parent
    files = sorted(package.glob("config*.py"))
    assert package / "config.py" in files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] in ("jax", "flax", "numpy", "jaxtyping") for name in names), (file.name, names)
