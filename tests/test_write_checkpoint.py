"""Random checkpoints in the published layout: readable by others, sound in size, the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import load, micro_checkpoint, micro_config

from inkling_jax.config import ModelConfig
from inkling_jax.convert import nvfp4
from inkling_jax.convert.header import DTYPES
from inkling_jax.convert.published import published_tensors
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.write import write_checkpoint
from inkling_jax.errors import InputError

L = "model.llm.layers."


@pytest.mark.parametrize("packed", [False, True])
def test_other_readers_find_the_published_tensors(tmp_path: Path, packed: bool) -> None:
    from safetensors import safe_open

    config = micro_checkpoint(tmp_path, packed)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(file, "numpy") as reader:
            assert reader.metadata() == {"format": "pt"}
            for name in reader.keys():
                piece = reader.get_slice(name)
                found[name] = (piece.get_dtype(), tuple(piece.get_shape()))
                assert index["weight_map"][name] == file.name
    assert found == published_tensors(config, packed)
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in load(tmp_path).values())
    assert {index["weight_map"][name] for name in found if name.startswith("model.mtp.")} == {"mtp.safetensors"}
    assert len(set(index["weight_map"].values())) == 4
    for info in Checkpoint.open(tmp_path).tensors.values():
        assert info.start % DTYPES[info.dtype].itemsize == 0, "others map files and need aligned data"


@pytest.mark.parametrize("packed", [False, True])
def test_the_configuration_reads_back(tmp_path: Path, packed: bool) -> None:
    config = micro_checkpoint(tmp_path, packed)
    read = ModelConfig.from_directory(tmp_path)
    assert (read.text, read.audio, read.vision, read.mtp) == (config.text, config.audio, config.vision, config.mtp)
    assert read.eos_token_id == config.eos_token_id
    assert read.quant_algo == ("NVFP4" if packed else None)
    if packed:
        excluded = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
        assert L + "2.mlp.experts" in excluded and L + "3.mlp.experts" not in excluded


def test_a_tensor_depends_on_the_seed_and_its_name_only(tmp_path: Path) -> None:
    config = micro_config()
    for name, options in {"a": {}, "b": {"shards": 1}, "c": {"nvfp4": True}, "d": {"seed": 1}}.items():
        write_checkpoint(tmp_path / name, config, **options)
    a, b, c, d = (load(tmp_path / name) for name in "abcd")
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)
    assert all(a[name].tobytes() == c[name].tobytes() for name in a if ".mlp.experts." not in name or ".2.mlp" in name)
    assert not any(a[name].tobytes() == d[name].tobytes() for name in a)
    assert a[L + "0.attn.wk_dv.weight"].tobytes() != a[L + "0.attn.wv_dv.weight"].tobytes()


def test_weights_have_a_sound_size(tmp_path: Path) -> None:
    size = {"hidden_size": 512, "intermediate_size": 256, "n_routed_experts": 8, "vocab_size": 2000, "unpadded_vocab_size": 2000}
    config = micro_config(**size)
    write_checkpoint(tmp_path, config, nvfp4=True)
    tensors = load(tmp_path)
    for name, inputs in {
        L + "0.attn.wq_du.weight": 512,
        L + "2.mlp.experts.w2_weight": 256,
        L + "2.mlp.experts.w13_weight": 512,
        L + "3.attn.rel_logits_proj.proj": 5,
        L + "3.attn_sconv.weight": 4,
    }.items():
        weight = tensors[name].astype(np.float64)
        assert abs(weight.mean()) < 0.1 * weight.std() and np.isclose(weight.std(), inputs**-0.5, rtol=0.12), name
    assert np.isclose(tensors["model.llm.embed.weight"].astype(np.float64).std(), 1, rtol=0.02)
    assert np.isclose(tensors["model.llm.unembed.weight"].astype(np.float64).std(), 2 * 512**-0.5, rtol=0.02)
    for name, array in tensors.items():
        if name.endswith("norm.weight"):
            assert abs(array.astype(np.float64).mean() - 1) < 0.15, name
    for matrix, inputs in (("w13", 512), ("w2", 256)):
        name = f"{L}3.mlp.experts.{matrix}_weight"
        scale, scale2 = tensors[name + ".scale"], tensors[name + ".scale2"]
        nvfp4.check_scale(name, scale)
        nvfp4.check_scale2(name, scale2)
        assert (scale2 < 1).all() and len(set(scale2.tolist())) > 1
        weight = nvfp4.dequantize(tensors[name], scale, scale2).astype(np.float64)
        assert abs(weight.mean()) < 0.01 * weight.std() and np.isclose(weight.std(), inputs**-0.5, rtol=0.12)
        assert len(np.unique(tensors[name])) == 256
        assert tensors[name + ".original_shape"].tolist() == list(weight.shape)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    micro_checkpoint(tmp_path, False)
    with pytest.raises(InputError, match="already holds .safetensors files"):
        write_checkpoint(tmp_path, micro_config())
    with pytest.raises(InputError, match="shards 0"):
        write_checkpoint(tmp_path / "new", micro_config(), shards=0)
