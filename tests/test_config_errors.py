"""Bad configurations are refused in one line that names the file, the field, its value and what would be right."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from config_files import DROP, NVFP4, SMALL, changed, text_only

from inkling_jax.config import ModelConfig
from inkling_jax.errors import CheckpointError, ConfigError

HYBRID = ["hybrid" if i % 6 == 5 else "hybrid_sliding" for i in range(42)]
# --- refusals: (section, field, value); the message names the field and the value ---

INF, NAN = float("inf"), float("nan")
SIZES = (
    "model_max_length hidden_size num_hidden_layers vocab_size unpadded_vocab_size num_attention_heads num_key_value_heads "
    "head_dim swa_num_attention_heads swa_num_key_value_heads swa_head_dim sliding_window_size d_rel rel_extent "
    "log_scaling_n_floor sconv_kernel_size n_routed_experts num_experts_per_tok n_shared_experts dense_intermediate_size "
    "intermediate_size"
).split()
NUMBERS = "rms_norm_eps logits_mup_width_multiplier route_scale".split()
OPTIONAL = ("unpadded_vocab_size", "rms_norm_eps")
REQUIRED = [name for name in (*SIZES, *NUMBERS, "dense_mlp_idx") if name not in OPTIONAL]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [-1, 0, True, 1.5, 64.0, "64", [64], 2**31 + 1, 10**40, NAN])
def test_bad_size(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: text_config\.{name} is .*expected an integer from 1 to"):
        ModelConfig.from_dict(changed("text_config", **{name: value}))


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, 0.0, -1e-6, INF, -INF, NAN, "1", True, [1.0], 10**400, 1e-300])
def test_bad_number(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"text_config\.{name} is .*expected a finite number above 0"):
        ModelConfig.from_dict(changed("text_config", **{name: value}))


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_field(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: text_config\..*{name}.*is missing"):
        ModelConfig.from_dict(changed("text_config", **{name: DROP}))


UNSUPPORTED = [
    ("use_sconv", False),
    ("use_gate_bias", False),
    ("use_global_scale", False),
    ("norm_after_topk", False),
    ("shared_expert_sink", False),
    ("q_bias", True),
    ("o_bias", True),
    ("q_bias", 0),
    ("gate_activation", "softmax"),
    ("hidden_act", "gelu"),
    ("final_logit_softcapping", 30.0),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_unsupported_text_variant(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"text_config\.{name} is .*supported"):
        ModelConfig.from_dict(changed("text_config", **{name: value}))


BAD = [
    ("text_config", {"num_key_value_heads": 6}, r"num_key_value_heads is 6, expected a divisor of num_attention_heads \(32\)"),
    ("text_config", {"swa_num_key_value_heads": 5}, r"swa_num_key_value_heads is 5, expected a divisor of swa_num_att"),
    ("text_config", {"unpadded_vocab_size": 201025}, r"unpadded_vocab_size is 201025, .*201024 \(vocab_size\)"),
    ("text_config", {"num_experts_per_tok": 257}, r"num_experts_per_tok is 257, .*256"),
    ("text_config", {"num_hidden_layers": 4097}, r"num_hidden_layers is 4097"),
    ("text_config", {"log_scaling_alpha": -0.1}, r"log_scaling_alpha is -0\.1"),
    ("text_config", {"log_scaling_alpha": INF}, r"log_scaling_alpha is inf"),
    ("text_config", {"layer_types": HYBRID[:-1]}, r"layer_types is .*a list of 42 kinds.*found 41"),
    ("text_config", {"layer_types": "hybrid"}, r"layer_types is 'hybrid', expected a list of 42"),
    ("text_config", {"layer_types": ["mamba", *HYBRID[1:]]}, r"layer_types\[0\] is 'mamba', expected one of hybrid_sliding"),
    ("text_config", {"layer_types": [[], *HYBRID[1:]]}, r"layer_types\[0\] is \[\]"),
    ("text_config", {"mlp_layer_types": ["dense"] * 43}, r"mlp_layer_types is .*a list of 42 kinds.*found 43"),
    ("text_config", {"mlp_layer_types": ["moe"] * 42}, r"mlp_layer_types\[0\] is 'moe', expected one of dense, sparse"),
    ("text_config", {"local_layer_ids": [0, 42]}, r"local_layer_ids\[1\] is 42, expected an integer from 0 to 41"),
    ("text_config", {"local_layer_ids": [-1]}, r"local_layer_ids\[0\] is -1"),
    ("text_config", {"local_layer_ids": [True]}, r"local_layer_ids\[0\] is True"),
    ("text_config", {"local_layer_ids": [3, 4, 3]}, r"local_layer_ids has 3 more than once"),
    ("text_config", {"local_layer_ids": 3}, r"local_layer_ids is 3, expected a list"),
    ("text_config", {"dense_mlp_idx": 43}, r"dense_mlp_idx is 43, .*42 \(num_hidden_layers\)"),
    ("text_config", {"dense_mlp_idx": -1}, r"dense_mlp_idx is -1"),
    ("text_config", {"torch_dtype": "float8"}, r"torch_dtype is 'float8', expected bfloat16"),
    ("text_config", {"torch_dtype": 16}, r"torch_dtype is 16"),
    ("text_config", {"use_embed_norm": "yes"}, r"use_embed_norm is 'yes', expected true or false"),
    ("audio_config", {"n_mel_bins": DROP}, r"n_mel_bins is missing"),
    ("audio_config", {"mel_vocab_size": DROP}, r"mel_vocab_size is missing"),
    ("audio_config", {"decoder_dmodel": 6144}, r"decoder_dmodel is 6144, expected 4096"),
    ("audio_config", {"dmel_max_value": -7.0}, r"dmel_max_value is -7\.0"),
    ("audio_config", {"dmel_min_value": NAN}, r"dmel_min_value is nan"),
    ("audio_config", {"bias": True}, r"bias is True"),
    ("audio_config", {"audio_mode": "codec"}, r"audio_mode is 'codec', expected \"dmel\""),
    ("vision_config", {"vision_encoder_type": DROP}, r"vision_encoder_type is missing"),
    ("vision_config", {"vision_encoder_type": "vit"}, r"vision_encoder_type is 'vit', expected \"hmlp\""),
    ("vision_config", {"n_layers": DROP}, r"n_layers .*is missing"),
    ("vision_config", {"decoder_dmodel": 1024}, r"decoder_dmodel is 1024, expected 4096"),
    ("vision_config", {"patch_size": 0}, r"patch_size is 0"),
    ("mtp_config", {"num_nextn_predict_layers": DROP}, r"num_nextn_predict_layers .*is missing"),
    ("mtp_config", {"num_nextn_predict_layers": -1}, r"num_nextn_predict_layers is -1"),
    ("mtp_config", {"local_layer_ids": [8]}, r"local_layer_ids\[0\] is 8, expected an integer from 0 to 7"),
    ("mtp_config", {"local_layer_ids": [1, 1]}, r"local_layer_ids has 1 more than once"),
    ("mtp_config", {"local_extent": 0}, r"local_extent is 0"),
    ("mtp_config", {"mtp_hidden_states_first": False}, r"mtp_hidden_states_first is False"),
    ("", {"eos_token_id": 200058}, r"eos_token_id is 200058, expected an integer from 0 to 200057"),
    ("", {"eos_token_id": [200006, -1]}, r"eos_token_id\[1\] is -1"),
    ("", {"eos_token_id": True}, r"eos_token_id is True"),
    ("", {"eos_token_id": "<eos>"}, r"eos_token_id is '<eos>'"),
    ("", {"image_token_id": 200058}, r"image_token_id is 200058"),
    ("", {"audio_token_id": -1}, r"audio_token_id is -1"),
    ("", {"image_token_id": 200053}, r"image_token_id is 200053, expected another id than audio_token_id"),
    ("", {"text_config": DROP}, r"text_config is missing"),
    ("", {"text_config": []}, r"text_config is \[\], expected an object"),
    ("", {"vision_config": {}}, r"vision_config\.vision_encoder_type is missing"),
    ("", {"model_type": "llama"}, r"model_type is 'llama', expected inkling_mm_model"),
]


@pytest.mark.parametrize(("section", "fields", "message"), BAD)
def test_refused(section: str, fields: dict[str, Any], message: str) -> None:
    where = rf"^config\.json: {section}\." if section else r"^config\.json: "
    with pytest.raises(ConfigError, match=where + message) as caught:
        ModelConfig.from_dict(changed(section, **fields))
    assert "\n" not in str(caught.value)


def test_widths_need_a_second_name() -> None:
    with pytest.raises(ConfigError, match=r"dense_intermediate_size \(also spelled moe_intermediate_size\) is missing"):
        ModelConfig.from_dict(changed("text_config", dense_intermediate_size=DROP))


@pytest.mark.parametrize("value", [None, [], "x"])
def test_config_must_be_an_object(value: Any) -> None:
    with pytest.raises(ConfigError, match="expected a JSON object"):
        ModelConfig.from_dict(value)


# --- the quantisation file ---


def quantization(**fields: Any) -> dict[str, Any]:
    return {"quantization": {**NVFP4["quantization"], **fields}}


@pytest.mark.parametrize("none", [None, "none", "None", "null", ""])
def test_spellings_of_none(none: str | None) -> None:
    def algo(**fields: Any) -> str | None:
        return ModelConfig.from_dict(SMALL, quant=quantization(**fields)).quant_algo

    assert algo(quant_algo=none) is None
    assert algo(kv_cache_quant_algo=none) == "NVFP4"
    plain = {"quant_algo": none, "kv_cache_quant_algo": none}
    assert algo(quant_algo="MIXED_PRECISION", quantized_layers={"a": plain}) is None
    packed = {"quant_algo": "NVFP4", "group_size": 16}
    assert algo(quant_algo="MIXED_PRECISION", quantized_layers={"a": plain, "b": packed}) == "NVFP4"
    assert algo(quant_algo=none, quantized_layers={"b": packed}) == "NVFP4"


MIXED = {"quant_algo": "MIXED_PRECISION"}
BAD_QUANT = [
    ({"quant_algo": "FP9"}, r"quant_algo is 'FP9', expected \"NVFP4\""),
    ({"quant_algo": "MIXED_PRECISION"}, r"quant_algo is 'MIXED_PRECISION'"),
    ({"quant_algo": ["NVFP4"]}, r"quant_algo is \['NVFP4'\]"),
    ({"kv_cache_quant_algo": "FP9"}, r"kv_cache_quant_algo is 'FP9'"),
    ({"group_size": 32}, r"group_size is 32, expected 16"),
    ({"group_size": "16"}, r"group_size is '16'"),
    ({**MIXED, "quantized_layers": {"a": {"quant_algo": "FP9"}}}, r"quantized_layers\.a\.quant_algo is 'FP9'"),
    ({**MIXED, "quantized_layers": {"a": {"kv_cache_quant_algo": "FP9"}}}, r"quantized_layers\.a\.kv_cache_quant_algo is 'FP9'"),
    ({**MIXED, "quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 32}}}, r"quantized_layers\.a\.group_size is 32"),
    ({**MIXED, "quantized_layers": {"a": "NVFP4"}}, r"quantized_layers\.a is 'NVFP4', expected an object"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_QUANT)
def test_bad_quantisation(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^hf_quant_config\.json: quantization\.{message}"):
        ModelConfig.from_dict(SMALL, quant=quantization(**fields))


@pytest.mark.parametrize("quant", [{"quant_algo": "NVFP4"}, {}, {"quantization": None}])
def test_quantisation_is_nested(quant: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^hf_quant_config\.json: quantization is missing"):
        ModelConfig.from_dict(SMALL, quant=quant)


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "moe_intermediate_size"])
def test_packed_widths_are_whole_blocks(name: str) -> None:
    config = text_only()
    config[name] = 24
    assert ModelConfig.from_dict(config).quant_algo is None
    with pytest.raises(ConfigError, match=rf"{name} is 24, expected a multiple of 16"):
        ModelConfig.from_dict(config, quant=NVFP4)


@pytest.mark.parametrize("section", ["", "text_config"])
def test_foreign_quantisation_in_the_config_is_refused_by_name(section: str) -> None:
    foreign = changed(section, quantization_config={"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"})
    with pytest.raises(ConfigError, match=r"quantization_config describes the layout 'compressed-tensors'"):
        ModelConfig.from_dict(foreign)
    with pytest.raises(ConfigError, match=r"quantization describes the layout 'MLX affine'"):
        ModelConfig.from_dict(changed(section, quantization={"group_size": 64, "bits": 4}))
    assert ModelConfig.from_dict(changed(section, quantization_config=None)) == ModelConfig.from_dict(SMALL)


# --- directories ---


def write(path: Path, config: Any, quant: Any = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if quant is not None:
        (path / "hf_quant_config.json").write_text(json.dumps(quant))
    return path


def test_directory(tmp_path: Path) -> None:
    assert ModelConfig.from_directory(write(tmp_path, SMALL)) == ModelConfig.from_dict(SMALL)
    packed = ModelConfig.from_directory(str(write(tmp_path, SMALL, NVFP4)))
    assert packed == dataclasses.replace(ModelConfig.from_dict(SMALL), quant_algo="NVFP4")


def test_directory_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no such directory"):
        ModelConfig.from_directory(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        ModelConfig.from_directory(tmp_path)
    write(tmp_path, changed("text_config", hidden_size=-1))
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/config\.json: text_config\.hidden_size is -1"):
        ModelConfig.from_directory(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json: no such directory"):
        ModelConfig.from_directory(tmp_path / "config.json")
    write(tmp_path, SMALL, ["NVFP4"])
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: expected a JSON object, found list"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "hf_quant_config.json").unlink()
    os.mkfifo(tmp_path / "hf_quant_config.json")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: not a regular file"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("text", [b"", b'{"text_config": ', b"\xff\xfe{}", b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"])
def test_directory_with_invalid_json(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON") as caught:
        ModelConfig.from_directory(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", '"config"', "null", "3"])
def test_directory_with_another_json_value(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON object"):
        ModelConfig.from_directory(tmp_path)
