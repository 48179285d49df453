"""Checkpoints that contradict their configuration or themselves: each is refused, and the tensor at fault named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import Tensors, micro_checkpoint, plan_of

from inkling_jax.config import ModelConfig
from inkling_jax.errors import CheckpointError

L = "model.llm.layers."
V = "model.visual."
W13 = L + "3.mlp.experts.w13_weight"


def refused(directory: Path, config: ModelConfig) -> str:
    """What planning the checkpoint is refused with."""
    with pytest.raises(CheckpointError) as error:
        plan_of(directory, config)
    assert "\n" not in str(error.value)
    return str(error.value)


def drop(name: str) -> Callable[[Tensors], Any]:
    """Without one tensor."""
    return lambda tensors: tensors.pop(name)


def put(name: str, array: Any) -> Callable[[Tensors], Any]:
    """With one tensor replaced or added."""
    return lambda tensors: tensors.update({name: array})


def take(name: str, key: Any) -> Callable[[Tensors], Any]:
    """With one tensor indexed."""
    return lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name][key])})


BF16 = ml_dtypes.bfloat16
REFUSED: dict[str, tuple[bool, Callable[[Tensors], Any], str]] = {
    "extra": (False, put(L + "0.attn.extra", np.ones(3, np.float32)), f"no place for 1 tensor: '{L}0.attn.extra'"),
    "a layer too many": (False, put(L + "5.mlp_norm.weight", np.ones(48, BF16)), f"place for 1 tensor: '{L}5.mlp_norm.weight'"),
    "outside the model": (False, put("model.other", np.ones(3, np.float32)), "no place for 1 tensor: 'model.other'"),
    "missing": (False, drop(L + "3.attn.k_sconv.weight"), f"missing 1 tensor: '{L}3.attn.k_sconv.weight'"),
    "missing embedding": (False, drop("model.llm.embed.weight"), "missing 1 tensor: 'model.llm.embed.weight'"),
    "missing experts": (False, drop(W13), f"missing 1 tensor: '{W13}'"),
    "wrong shape": (
        False,
        take(L + "1.attn.wo_ud.weight", np.s_[:, :20]),
        f"tensor '{L}1.attn.wo_ud.weight': expected shape (48, 24), found (48, 20)",
    ),
    "kv heads of the other kind": (
        False,
        put(L + "0.attn.k_sconv.weight", np.ones((4, 1, 4), BF16)),
        "expected shape (8, 1, 4) or (8, 4, 1) or (8, 4), found (4, 1, 4)",
    ),
    "experts": (
        False,
        take(W13, np.s_[:2]),
        "expected shape (3, 32, 48), found (2, 32, 48); its first axis contradicts config.json: n_routed_experts 3",
    ),
    "packed experts": (True, take(W13, np.s_[:2]), "found (2, 32, 24); its first axis contradicts config.json: n_routed"),
    "router": (
        False,
        take(L + "2.mlp.gate.weight", np.s_[:4]),
        "expected shape (5, 48), found (4, 48); its first axis contradicts config.json: n_routed_experts 3 + n_shared_experts 2",
    ),
    "shared experts": (
        False,
        take(L + "2.mlp.shared_experts.shared_w2_weight", np.s_[:1]),
        "its first axis contradicts config.json: n_shared_experts 2",
    ),
    "odd rows": (False, take(L + "0.mlp.w13_dn.weight", np.s_[:55]), "55 rows, but gate and up rows interleave: expected 56"),
    "odd packed rows": (True, take(W13, np.s_[:, :31]), "31 rows, but gate and up rows interleave: expected 32"),
    "integers": (False, put(L + "0.attn_norm.weight", np.ones(48, np.int64)), "expected dtype BF16 or F16 or F32, found I64"),
    "no block scales": (True, drop(W13 + ".scale"), f"tensor '{W13}': U8 without block scales; expected '{W13}.scale' beside it"),
    "no matrix scale": (True, drop(W13 + ".scale2"), f"missing 1 tensor: '{W13}.scale2'"),
    "no values": (True, drop(W13), f"tensor '{W13}.scale': scales of packed weights, but '{W13}' is absent; expected U8"),
    "not packed": (True, put(W13, np.ones((3, 32, 48), BF16)), f"of packed weights, but '{W13}' is BF16; expected U8"),
    "scales as bytes": (True, put(W13 + ".scale", np.ones((3, 32, 3), np.uint8)), "expected dtype F8_E4M3, found U8"),
    "w2 scales for halves": (
        True,
        put(L + "3.mlp.experts.w2_weight.scale2", np.ones((3, 2), np.float32)),
        "w2_weight.scale2': expected shape (3,) or (3, 1), found (3, 2)",
    ),
    "scales of another block": (True, take(W13 + ".scale", np.s_[..., :2]), "expected shape (3, 32, 3), found (3, 32, 2)"),
    "a scale we lack": (
        True,
        put(L + "2.mlp.experts.extra_scale", np.array([1, 1.01], np.float32)),
        f"'{L}2.mlp.experts.extra_scale' is a scale this model does not apply, and entry 1 is 1.01, not 1",
    ),
    "a narrow vision tower": (
        False,
        take(V + "layers.linear_0.weight", np.s_[:, :4800]),
        f"tensor '{V}layers.linear_0.weight': expected shape (48, 9600), found (48, 4800)",
    ),
    "a deeper vision tower": (
        False,
        put(V + "layers.linear_1.weight", np.ones((48, 48), BF16)),
        f"no place for 1 tensor: '{V}layers.linear_1.weight'",
    ),
    "half a vision tower": (False, drop(V + "layers.linear_0.weight"), f"missing 1 tensor: '{V}layers.linear_0.weight'"),
    "an audio tower of other levels": (
        False,
        put("model.audio.encoder.weight", np.ones((80 * 256, 48), BF16)),
        "expected shape (1280, 48), found (20480, 48); its first axis contradicts config.json: n_mel_bins 80 x mel_vocab_size 16",
    ),
    "half an audio tower": (False, drop("model.audio.final_norm.weight"), "missing 1 tensor: 'model.audio.final_norm.weight'"),
    "a scale of NaN": (True, put(L + "2.mlp.global_scale", np.array([np.nan], np.float32)), "entry 0 is nan, not 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_the_configuration_is_named(tmp_path: Path, case: str) -> None:
    packed, edit, message = REFUSED[case]
    config = micro_checkpoint(tmp_path, packed, edit)
    assert message in refused(tmp_path, config)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    def gut(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(L + "4.")]:
            del tensors[name]

    config = micro_checkpoint(tmp_path, False, gut)
    message = refused(tmp_path, config)
    assert "missing 21 tensors: " in message and message.endswith("and 17 more") and L + "4.attn_norm.weight" in message


def test_an_unused_scale_of_ones_is_accepted(tmp_path: Path) -> None:
    name = L + "2.mlp.experts.extra_scale"
    config = micro_checkpoint(tmp_path, False, put(name, np.full(256, 1.0005, np.float32)))
    assert plan_of(tmp_path, config).unused == (name,)


def test_a_shard_that_the_index_forgot_is_mentioned(tmp_path: Path) -> None:
    config = micro_checkpoint(tmp_path, False, drop(W13))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"")
    assert "files here that the index does not name: model-00002-of-00002.safetensors" in refused(tmp_path, config)


def test_bad_scales_are_refused_when_read(tmp_path: Path) -> None:
    def poison(tensors: Tensors) -> None:
        tensors[W13 + ".scale"] = tensors[W13 + ".scale"].copy()
        tensors[W13 + ".scale"].view(np.uint8)[2, 31, 1] = 0x7F
        tensors[W13 + ".scale2"] = np.array([1e-3, 0, 1e-3], np.float32)

    config = micro_checkpoint(tmp_path, True, poison)
    plan = plan_of(tmp_path, config)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: .*3.mlp.experts.w13_weight.scale: block scale at \(2, 1, 15, 1\) is NaN"
    ):
        plan.assemble("layers.3.mlp.experts.w13.scale")
    with pytest.raises(CheckpointError, match=r"w13_weight.scale2: scale at \(1, 0\) is 0.0"):
        plan.assemble("layers.3.mlp.experts.w13.scale2")


def test_a_norm_that_the_configuration_denies_is_named(tmp_path: Path) -> None:
    config = micro_checkpoint(tmp_path, False)
    text = dataclasses.replace(config.text, use_embed_norm=False)
    assert "no place for 1 tensor: 'model.llm.embed_norm.weight'" in refused(tmp_path, dataclasses.replace(config, text=text))
