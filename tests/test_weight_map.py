"""From tensors to parameters: each number lands where the model looks for it, in every form that a file may take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import Tensors, load, micro_checkpoint, micro_config, plan_of

from inkling_jax.config import ModelConfig, TextConfig
from inkling_jax.convert import nvfp4
from inkling_jax.convert.assemble import conv_shapes
from inkling_jax.convert.write import write_checkpoint
from inkling_jax.model import Inkling, flat_parameters
from inkling_jax.towers import Towers

L = "model.llm.layers."
W13 = L + "3.mlp.experts.w13_weight"


@pytest.mark.parametrize(("name", "fmt"), [("tiny", "bf16"), ("tiny", "nvfp4"), ("wide", "nvfp4"), ("gpu", "nvfp4")])
def test_the_plan_supplies_what_the_model_declares(oracle_dir: Callable[..., Path], name: str, fmt: str) -> None:
    directory = oracle_dir(name, fmt)
    config = ModelConfig.from_directory(directory)
    plan = plan_of(directory)
    for dtype in ("bfloat16", "float32"):
        decoder = Inkling(config.text, plan.packed, jnp.dtype(dtype))
        towers = Towers(config.vision, config.audio, jnp.dtype(dtype))
        parameters = flat_parameters(decoder) | flat_parameters(towers)
        declared = {path: variable.get_value() for path, variable in parameters.items()}
        supplied = plan.abstract(dtype)
        assert declared.keys() == supplied.keys()
        for path, value in declared.items():
            assert (value.shape, value.dtype) == (supplied[path].shape, supplied[path].dtype), path
    for path, value in plan.abstract("bfloat16").items():
        array = plan.assemble(path)
        assert (array.shape, array.dtype) == (value.shape, value.dtype) and array.flags.c_contiguous, path


def test_every_tensor_is_accounted_for(oracle_dir: Callable[..., Path]) -> None:
    plan = plan_of(oracle_dir("tiny"))
    names = load(oracle_dir("tiny")).keys()
    read = {name for source in plan.parameters.values() for name in source.tensors}
    assert read | set(plan.deferred) | set(plan.unused) == names
    assert len(read) + len(plan.deferred) + len(plan.unused) == len(names)
    assert all(name.startswith("model.mtp.") for name in plan.deferred)
    assert {name for name in names if name.startswith(("model.audio.", "model.visual."))} < read
    assert plan.towers == {"vision", "audio"}
    assert all(name.endswith((".input_amax", ".original_shape")) for name in plan.unused) and len(plan.unused) == 20
    assert plan.packed == {(layer, matrix) for layer in range(3, 8) for matrix in ("w13", "w2")}
    assert plan.total_bytes == sum(load(oracle_dir("tiny"))[name].nbytes for name in read)


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextConfig, Tensors, Callable[[str], np.ndarray]]:
    """The micro checkpoint in NVFP4: its text configuration, its tensors and its assembled parameters."""
    directory = tmp_path_factory.mktemp("micro")
    config = micro_checkpoint(directory, nvfp4=True)
    return config.text, load(directory), plan_of(directory).assemble


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal dtype and values."""
    return left.dtype == right.dtype and np.array_equal(left, right)


@pytest.mark.parametrize("layer", [0, 3])
def test_projections_are_grouped_by_kv_head(micro: Any, layer: int) -> None:
    text, tensors, assemble = micro
    heads, kv, width = (6, 2, 4) if layer == 0 else (4, 1, 8)
    fused = assemble(f"layers.{layer}.attn.qkvr_proj")
    parts = {role: tensors[f"{L}{layer}.attn.{role}.weight"] for role in ("wq_du", "wk_dv", "wv_dv", "wr_du")}
    share = heads // kv
    for head in range(heads):
        group, place = divmod(head, share)
        for i in range(width):
            assert same(fused[group, place * width + i], parts["wq_du"][head * width + i])
        for i in range(text.rel_dim):
            row = (share + 2) * width + place * text.rel_dim + i
            assert same(fused[group, row], parts["wr_du"][head * text.rel_dim + i])
    for group in range(kv):
        for i in range(width):
            assert same(fused[group, share * width + i], parts["wk_dv"][group * width + i])
            assert same(fused[group, (share + 1) * width + i], parts["wv_dv"][group * width + i])
    assert fused.shape == (kv, (share + 2) * width + share * text.rel_dim, text.hidden_size)


def test_gate_and_up_come_apart_everywhere(micro: Any) -> None:
    _, tensors, assemble = micro
    pairs = {
        "layers.1.mlp.w13": tensors[L + "1.mlp.w13_dn.weight"],
        "layers.3.mlp.shared.w13": tensors[L + "3.mlp.shared_experts.shared_w13_weight"],
        "layers.2.mlp.experts.w13": tensors[L + "2.mlp.experts.w13_weight"],
        "layers.3.mlp.experts.w13.values": tensors[W13],
        "layers.3.mlp.experts.w13.scale": tensors[W13 + ".scale"],
    }
    for path, stored in pairs.items():
        array = assemble(path)
        assert same(array[..., 0, :, :], stored[..., 0::2, :]), path
        assert same(array[..., 1, :, :], stored[..., 1::2, :]), path


def test_packed_experts_mean_what_they_meant(micro: Any) -> None:
    text, tensors, assemble = micro
    for matrix in ("w13", "w2"):
        name, path = L + f"4.mlp.experts.{matrix}_weight", f"layers.4.mlp.experts.{matrix}"
        stored = nvfp4.dequantize(tensors[name], tensors[name + ".scale"], tensors[name + ".scale2"])
        ours = nvfp4.dequantize(*(assemble(f"{path}.{part}") for part in ("values", "scale", "scale2")))
        if matrix == "w13":
            assert ours.shape == (text.num_experts, 2, text.expert_width, text.hidden_size)
            ours = np.stack([ours[:, 0], ours[:, 1]], axis=2).reshape(stored.shape)
        assert same(ours, stored)


def test_the_rest_lands_as_it_is(micro: Any) -> None:
    text, tensors, assemble = micro
    as_stored = {
        "embed": "model.llm.embed.weight",
        "embed_norm.weight": "model.llm.embed_norm.weight",
        "norm.weight": "model.llm.norm.weight",
        "unembed": "model.llm.unembed.weight",
        "layers.0.mlp.w2": L + "0.mlp.w2_md.weight",
        "layers.2.mlp.router.weight": L + "2.mlp.gate.weight",
        "layers.2.mlp.router.bias": L + "2.mlp.gate.bias",
        "layers.2.mlp.experts.w2": L + "2.mlp.experts.w2_weight",
        "layers.4.attn_norm.weight": L + "4.attn_norm.weight",
        "layers.4.mlp_norm.weight": L + "4.mlp_norm.weight",
        "layers.4.attn.q_norm.weight": L + "4.attn.q_norm.weight",
        "layers.4.attn.k_norm.weight": L + "4.attn.k_norm.weight",
        "layers.4.attn.o_proj": L + "4.attn.wo_ud.weight",
        "vision.layers.0.proj": "model.visual.layers.linear_0.weight",
        "vision.final_norm.weight": "model.visual.final_norm.weight",
        "audio.embed": "model.audio.encoder.weight",
        "audio.norm.weight": "model.audio.final_norm.weight",
    }
    for path, name in as_stored.items():
        assert same(assemble(path), tensors[name]), path
    shared, stored = assemble("layers.2.mlp.shared.w2"), tensors[L + "2.mlp.shared_experts.shared_w2_weight"]
    assert all(same(shared[:, j], stored[j]) for j in range(stored.shape[0]))
    assert same(assemble("layers.3.attn.rel_bias"), tensors[L + "3.attn.rel_logits_proj.proj"].T)
    for stream in ("attn", "mlp"):
        assert same(assemble(f"layers.3.{stream}_conv.weight"), tensors[f"{L}3.{stream}_sconv.weight"][:, 0])
    for stream in ("k", "v"):
        taps, stored = assemble(f"layers.0.attn.{stream}_conv.weight"), tensors[f"{L}0.attn.{stream}_sconv.weight"]
        assert all(same(taps[head, i], stored[head * 4 + i, 0]) for head in range(2) for i in range(4))
    for path, name in (("layers.1.mlp", "1.mlp"), ("layers.2.mlp.router", "2.mlp.gate")):
        scale = assemble(path + ".global_scale")
        assert scale.shape == () and scale.dtype == np.float32 and scale == np.float32(tensors[f"{L}{name}.global_scale"][0])


def test_a_vision_tower_of_four_layers_lands_as_it_is(tmp_path: Path) -> None:
    """The releases' tower (spec 4.2): widths, and the norms between its linears."""
    config = micro_config()
    assert config.vision is not None
    config = dataclasses.replace(config, vision=dataclasses.replace(config.vision, num_layers=4))
    write_checkpoint(tmp_path, config)
    plan, tensors = plan_of(tmp_path, config), load(tmp_path)
    paths = {f"vision.layers.{i}.proj": f"layers.linear_{i}.weight" for i in range(4)}
    paths |= {f"vision.layers.{i}.norm.weight": f"layers.norm_{i}.weight" for i in range(3)}
    for path, name in (paths | {"vision.final_norm.weight": "final_norm.weight"}).items():
        assert same(plan.assemble(path), tensors["model.visual." + name]), path
    assert plan.parameters["vision.layers.2.proj"].shape == (4800, 5120)


def test_convolution_shapes_are_those_of_one_memory_order() -> None:
    assert conv_shapes(6, 4) == ((6, 1, 4), (6, 4, 1), (6, 4))


@pytest.mark.parametrize("form", [lambda w: w.transpose(0, 2, 1), lambda w: w[:, 0]])
def test_convolutions_load_in_each_layout(tmp_path: Path, form: Callable[[np.ndarray], np.ndarray]) -> None:
    names = [L + "3.attn.k_sconv.weight", L + "2.mlp_sconv.weight"]
    original: Tensors = {}

    def edit(tensors: Tensors) -> None:
        original.update(tensors)
        tensors.update({name: form(tensors[name]) for name in names})

    config = micro_checkpoint(tmp_path, False, edit)
    plan = plan_of(tmp_path, config)
    assert same(plan.assemble("layers.3.attn.k_conv.weight")[0], original[names[0]][:, 0])
    assert same(plan.assemble("layers.2.mlp_conv.weight"), original[names[1]][:, 0])


def test_gate_and_up_may_have_scales_of_their_own(tmp_path: Path) -> None:
    base = np.array([1e-3, 2e-3, 3e-3], np.float32)
    for form in (base, base[:, None], np.stack([base, base * np.float32(1.25)], -1)):
        directory = tmp_path / str(form.shape)
        config = micro_checkpoint(directory, True, lambda tensors, form=form: tensors.update({W13 + ".scale2": form}))
        scale2 = plan_of(directory, config).assemble("layers.3.mlp.experts.w13.scale2")
        halves = form if form.shape[-1] == 2 else np.stack([base, base], -1)
        assert same(scale2, halves)
        values, scale = np.full((3, 2, 1, 8), 0x22, np.uint8), np.ones((3, 2, 1, 1), ml_dtypes.float8_e4m3fn)
        gate, up = np.moveaxis(nvfp4.dequantize(values, scale, scale2), 1, 0)
        assert np.allclose(up / gate, 1.25 if form.shape[-1] == 2 else 1.0, rtol=1e-6)
    w2 = L + "3.mlp.experts.w2_weight.scale2"
    config = micro_checkpoint(tmp_path / "w2", True, lambda tensors: tensors.update({w2: base[:, None]}))
    assert same(plan_of(tmp_path / "w2", config).assemble("layers.3.mlp.experts.w2.scale2"), base)


def test_packing_is_decided_a_tensor_at_a_time(tmp_path: Path) -> None:
    def unpack_w2(tensors: Tensors) -> None:
        name = L + "3.mlp.experts.w2_weight"
        packed = [tensors.pop(name + suffix) for suffix in ("", ".scale", ".scale2")]
        tensors[name] = nvfp4.dequantize(*packed).astype(ml_dtypes.bfloat16)

    config = micro_checkpoint(tmp_path, True, unpack_w2)
    plan = plan_of(tmp_path, config)
    assert plan.packed == {(3, "w13"), (4, "w13"), (4, "w2")}
    assert plan.assemble("layers.3.mlp.experts.w2").dtype == ml_dtypes.bfloat16


def test_a_text_only_checkpoint_loads(tmp_path: Path) -> None:
    def text_only(tensors: Tensors) -> None:
        for name in [name for name in tensors if not name.startswith("model.llm.")]:
            del tensors[name]

    config = micro_checkpoint(tmp_path / "kept", True)
    kept = plan_of(tmp_path / "kept", dataclasses.replace(config, mtp=None, audio=None, vision=None))
    assert len(kept.deferred) == 2 * 20 + 1 + 2 + 2
    config = micro_checkpoint(tmp_path / "bare", True, text_only)
    bare = plan_of(tmp_path / "bare", config)
    assert bare.deferred == () and bare.parameters.keys() == kept.parameters.keys()
    assert bare.towers == kept.towers == frozenset()


def test_without_the_norm_of_the_embedding(tmp_path: Path) -> None:
    config = micro_checkpoint(tmp_path, False, use_embed_norm=False)
    assert "embed_norm.weight" not in plan_of(tmp_path, config).parameters


def test_a_missing_head_is_the_embedding(tmp_path: Path) -> None:
    config = micro_checkpoint(tmp_path, False, lambda tensors: tensors.pop("model.llm.unembed.weight"))
    plan = plan_of(tmp_path, config)
    assert same(plan.assemble("unembed"), plan.assemble("embed"))


def test_a_head_without_padding_rows_is_padded(tmp_path: Path) -> None:
    name = "model.llm.unembed.weight"
    config = micro_checkpoint(tmp_path, False, lambda tensors: tensors.update({name: tensors[name][:70]}))
    head = plan_of(tmp_path, config).assemble("unembed")
    assert head.shape == (72, 48) and (head[70:] == 0).all() and same(head[:70], load(tmp_path)[name])


def test_parts_of_different_dtypes_fuse_without_loss(tmp_path: Path) -> None:
    name = L + "0.attn.wk_dv.weight"
    fine = np.random.default_rng(0).normal(size=(8, 48)).astype(np.float32)
    config = micro_checkpoint(tmp_path, False, lambda tensors: tensors.update({name: fine}))
    fused = plan_of(tmp_path, config).assemble("layers.0.attn.qkvr_proj")
    assert fused.dtype == np.float32
    assert np.array_equal(fused[0, 12:16], fine[:4]) and np.array_equal(fused[1, 12:16], fine[4:])
