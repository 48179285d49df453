"""Reading checkpoint directories: what is in a file comes out, and nothing hostile, damaged or foreign gets in."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import frame, load, save

from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.errors import CheckpointError

RNG = np.random.default_rng(0)
ALL_TYPES = {
    "bytes": np.arange(256, dtype=np.uint8).reshape(16, 16),
    "eight": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(4, 64),
    "brain": RNG.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
    "half": RNG.normal(size=7).astype(np.float16),
    "single": RNG.normal(size=(2, 3, 4)).astype(np.float32),
    "long": np.array([-(2**63), 2**63 - 1]),
    "scalar": np.array(2.5, np.float32),
    "none": np.zeros((0, 4), np.float32),
}


def sharded(directory: Path, shards: dict[str, dict[str, np.ndarray]], index: dict[str, object] | None = None) -> Path:
    """A directory with these shards and an index (by default the one that fits them)."""
    directory.mkdir(exist_ok=True)
    for file, tensors in shards.items():
        save(directory / file, tensors)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors} if index is None else index
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal dtype, shape and bits."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def test_every_dtype_reads_back_bit_for_bit(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", ALL_TYPES)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors.keys() == ALL_TYPES.keys()
    for name, array in ALL_TYPES.items():
        assert same(checkpoint.read(name), array), name
    assert checkpoint.nbytes == sum(array.nbytes for array in ALL_TYPES.values())


def test_a_file_of_the_safetensors_library_reads(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    tensors = {name: ALL_TYPES[name] for name in ("bytes", "half", "single", "long", "scalar")}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint.open(str(tmp_path))
    assert all(same(checkpoint.read(name), array) for name, array in tensors.items())


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", ALL_TYPES)
    with pytest.raises(CheckpointError, match="no tensor 'absent'"):
        Checkpoint.open(tmp_path).read("absent")


def test_what_was_read_survives_the_file(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", ALL_TYPES)
    array = Checkpoint.open(tmp_path).read("bytes")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 4096)
    assert same(array, ALL_TYPES["bytes"])


@pytest.mark.parametrize("preset", ["tiny", "wide", "gpu"])
def test_reference_checkpoints_read_bit_for_bit(oracle_dir: Callable[..., Path], preset: str) -> None:
    checkpoint, plain = Checkpoint.open(oracle_dir(preset)), load(oracle_dir(preset))
    assert checkpoint.tensors.keys() == plain.keys()
    assert checkpoint.unlisted == ()
    assert all(same(checkpoint.read(name), array) for name, array in plain.items())


def header(**entry: object) -> bytes:
    """A file with one tensor of two float32, some of its header replaced, and 8 bytes of data."""
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return frame(json.dumps({"x": good | entry}).encode()) + bytes(8)


def two(first: list[int], second: list[int], size: int) -> bytes:
    """A file with two tensors of bytes at these offsets."""
    spans = {"a": first, "b": second}
    entries = {name: {"dtype": "U8", "shape": [span[1] - span[0]], "data_offsets": span} for name, span in spans.items()}
    return frame(json.dumps(entries).encode()) + bytes(size)


HOSTILE = {
    "empty": (b"", r"truncated: 0 bytes"),
    "short prefix": (b"\x10\0\0", r"truncated: 3 bytes"),
    "length beyond the file": (frame(b"{}" + b" " * 50)[:30], r"truncated: its header needs 60 bytes, the file has 30"),
    "huge length": (b"\xff" * 8 + b"{}", r"claims 18446744073709551615 bytes, more than the 100000000 allowed"),
    "not JSON": (frame(b"{nope"), r"header: not JSON"),
    "not UTF-8": (frame(b'{"\xff": 1}'), r"header: not JSON"),
    "not an object": (frame(b"[1]"), r"expected a JSON object, found list"),
    "deep nesting": (frame(b"[" * 200_000), r"nested too deeply"),
    "long number": (frame(b'{"x": ' + b"9" * 5000 + b"}"), r"header: not JSON"),
    "entry not an object": (frame(b'{"x": 3}'), r"tensor 'x': expected an object"),
    "duplicate name": (frame(b'{"x": {}, "x": {}}'), r"the name 'x' appears twice"),
    "duplicate field": (frame(b'{"x": {"dtype": "F32", "dtype": "U8"}}'), r"the name 'dtype' appears twice"),
    "unknown dtype": (header(dtype="F8_E5M2"), r"unknown dtype 'F8_E5M2'; known: U8, F8_E4M3"),
    "dtype of a wrong type": (header(dtype=["F32"]), r"unknown dtype \['F32'\]"),
    "no dtype": (header(dtype=None), r"unknown dtype None"),
    "negative shape": (header(shape=[-2]), r"bad shape \[-2\]"),
    "negative twice": (header(shape=[-2, -1]), r"bad shape \[-2, -1\]"),
    "fractional shape": (header(shape=[2.0]), r"bad shape \[2.0\]"),
    "boolean shape": (header(shape=[True, 2]), r"bad shape \[True, 2\]"),
    "shape not a list": (header(shape=2), r"bad shape 2"),
    "rank": (header(shape=[1] * 100 + [2]), r"bad shape .*at most 16 integers"),
    "size past 64 bits": (header(shape=[2**62, 2**62]), r"span 8 bytes, F32 of shape .* takes \d+"),
    "shape past 64 bits": (header(shape=[2**70]), r"bad shape"),
    "shape against offsets": (header(shape=[3]), r"tensor 'x': data_offsets span 8 bytes, F32 of shape \(3,\) takes 12"),
    "offsets reversed": (header(data_offsets=[8, 0]), r"bad data_offsets \[8, 0\]"),
    "offsets negative": (header(data_offsets=[-8, 0]), r"bad data_offsets \[-8, 0\]"),
    "offsets of three": (header(data_offsets=[0, 4, 8]), r"bad data_offsets"),
    "offsets outside": (header(data_offsets=[2**40, 2**40 + 8]), r"'x' leaves a hole after the header"),
    "overlap": (two([0, 8], [4, 12], 12), r"tensor 'b' overlaps tensor 'a'"),
    "same place": (two([0, 8], [0, 8], 8), r"tensor 'b' overlaps tensor 'a'"),
    "hole": (two([0, 4], [8, 12], 12), r"tensor 'b' leaves a hole after tensor 'a'"),
    "trailing bytes": (two([0, 4], [4, 8], 9), r"1 bytes too many"),
    "escapes in a name": (frame(b'{"\\u001b[2J\\ud800": 3}'), r"tensor '\\x1b\[2J\\ud800': expected an object"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = HOSTILE[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoint.open(tmp_path)
    assert "model.safetensors" in str(error.value) and len(str(error.value)) < 1000


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save(file, ALL_TYPES)
    good = file.read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")
    rng, refused = np.random.default_rng(1), 0
    for _ in range(400):
        damaged = bytearray(good)
        for place in rng.integers(0, end, size=rng.integers(1, 4)):
            damaged[place] = rng.integers(0, 256)
        file.write_bytes(damaged[: rng.integers(0, len(good))] if rng.random() < 0.2 else damaged)
        try:
            checkpoint = Checkpoint.open(tmp_path)
        except CheckpointError:
            refused += 1
        else:
            for name in checkpoint.tensors:
                checkpoint.read(name)
    assert refused > 200


def test_a_truncated_shard_is_named_with_both_sizes(tmp_path: Path) -> None:
    first = {"a": np.ones(8, np.float32)}
    sharded(tmp_path, {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": ALL_TYPES})
    file = tmp_path / "model-00002-of-00002.safetensors"
    whole = file.stat().st_size
    os.truncate(file, whole - 5)
    message = rf"model-00002-of-00002.safetensors: truncated: expected {whole} bytes, the file has {whole - 5}"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_a_file_cut_after_opening_is_noticed(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"a": np.ones(64, np.float32)})
    checkpoint = Checkpoint.open(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 100)
    with pytest.raises(CheckpointError, match="truncated since it was opened, inside tensor 'a'"):
        checkpoint.read("a")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read("a")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"a": "one.safetensors", "b": "two.safetensors"}
    sharded(tmp_path, {"one.safetensors": {"a": np.ones(2, np.float32)}}, index)
    with pytest.raises(CheckpointError, match=r"two.safetensors: this shard is missing; .* places 1 tensors in it"):
        Checkpoint.open(tmp_path)


def test_index_and_shard_must_agree(tmp_path: Path) -> None:
    x = np.ones(2, np.float32)
    index = {"a": "two.safetensors", "b": "two.safetensors"}
    sharded(tmp_path / "1", {"one.safetensors": {"a": x}, "two.safetensors": {"b": x}}, index)
    with pytest.raises(CheckpointError, match=r"two.safetensors: lacks 1 tensor that .*index.json places here: 'a'"):
        Checkpoint.open(tmp_path / "1")
    index = {"a": "one.safetensors", "b": "two.safetensors"}
    shards = {"one.safetensors": {"a": x}, "two.safetensors": {"b": x, "a": x}}
    sharded(tmp_path / "2", shards, index)
    with pytest.raises(CheckpointError, match=r"tensor 'a' lies in two files: .*one.safetensors and .*two.safetensors"):
        Checkpoint.open(tmp_path / "2")


OUTSIDE = ["../out.safetensors", "a/../../out.safetensors", "/etc/passwd.safetensors", "..", "", 3, None, "x\0.safetensors"]


@pytest.mark.parametrize("shard", OUTSIDE)
def test_an_index_may_not_point_outside(tmp_path: Path, shard: object) -> None:
    save(tmp_path / "out.safetensors", {"a": np.ones(2, np.float32)})
    sharded(tmp_path / "inside", {}, {"a": shard})
    with pytest.raises(CheckpointError, match="tensor 'a' is placed in .*(outside the checkpoint|expected the name of)"):
        Checkpoint.open(tmp_path / "inside")


BROKEN = ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": "x", "a": "y"}}']


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="model.safetensors.index.json"):
        Checkpoint.open(tmp_path)


def test_symlinks_out_of_the_directory_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save(tmp_path / "blobs" / "0123", {"a": np.ones(2, np.float32)})
    directory = sharded(tmp_path / "snapshot", {}, {"a": "model-00001-of-00001.safetensors"})
    (directory / "model-00001-of-00001.safetensors").symlink_to("../blobs/0123")
    assert Checkpoint.open(directory).read("a").tolist() == [1, 1]
    (tmp_path / "blobs" / "0123").unlink()
    with pytest.raises(CheckpointError, match="this shard is missing"):
        Checkpoint.open(directory)


def test_what_is_not_a_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors: not a regular file"):
        Checkpoint.open(tmp_path)


def test_the_draft_head_is_read_listed_or_not(tmp_path: Path) -> None:
    x = np.ones(2, np.float32)
    shards = {"model-00001-of-00001.safetensors": {"a": x}, "mtp.safetensors": {"model.mtp.b": x}}
    assert Checkpoint.open(sharded(tmp_path / "listed", shards)).tensors.keys() == {"a", "model.mtp.b"}
    index = {"a": "model-00001-of-00001.safetensors"}
    assert Checkpoint.open(sharded(tmp_path / "unlisted", shards, index)).tensors.keys() == {"a", "model.mtp.b"}


def test_shards_that_the_index_forgets_are_noted(tmp_path: Path) -> None:
    x = np.ones(2, np.float32)
    sharded(tmp_path, {"one.safetensors": {"a": x}, "two.safetensors": {"b": x}}, index={"a": "one.safetensors"})
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors.keys() == {"a"} and checkpoint.unlisted == ("two.safetensors",)


FOREIGN = {
    "model.layers.0.mlp.experts.gate_proj.scales": "MLX affine 4-bit",
    "language_model.model.layers.3.mlp.experts.up_proj.biases": "MLX affine 4-bit",
    "model.llm.layers.3.mlp.experts.w13_weight.weight_packed": "compressed-tensors",
    "model.llm.layers.3.mlp.experts.w13_weight.weight_global_scale": "compressed-tensors",
    "model.language_model.layers.0.self_attn.q_proj.weight": "Transformers",
    "model.layers.0.self_attn.q_proj.weight": "Transformers",
    "lm_head.weight": "Transformers",
    "base_model.model.llm.layers.0.attn.wq_du.lora_A.weight": "LoRA",
    "base_model.model.llm.layers.0.attn.wq_du.lora_B.weight": "LoRA",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_layout_is_refused_at_its_first_key(tmp_path: Path, name: str) -> None:
    # The index lists a shard that does not exist: the names alone must do.
    sharded(tmp_path, {}, {"model.llm.norm.weight": "gone.safetensors", name: "gone.safetensors"})
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=f"{FOREIGN[name]}.*not supported: found '{name}'") as error:
        Checkpoint.open(tmp_path)
    assert time.monotonic() - start < 1 and "\n" not in str(error.value)
    (tmp_path / "model.safetensors.index.json").unlink()
    save(tmp_path / "model.safetensors", {name: np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match=f"{FOREIGN[name]}.*not supported: found '{name}'"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model-00001-of-00002.bin", "PyTorch .bin layout is not supported"),
        ("pytorch_model.bin.index.json", "PyTorch .bin layout is not supported"),
        ("inkling-q4.gguf", "GGUF layout is not supported"),
        ("adapter_model.safetensors", "LoRA adapter layout is not supported"),
        ("adapter_config.json", "LoRA adapter layout is not supported"),
        ("model-00001-of-00003.safetensors", "1 .safetensors files .* but neither model.safetensors.index.json nor"),
        ("config.json", "no checkpoint here"),
    ],
)
def test_a_directory_without_a_checkpoint_says_what_it_holds(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_an_adapter_beside_weights_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", ALL_TYPES)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="LoRA adapter"):
        Checkpoint.open(tmp_path)


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: does not exist; expected a checkpoint directory"):
        Checkpoint.open(tmp_path / "nowhere")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="is a file; expected a checkpoint directory; GGUF layout is not supported"):
        Checkpoint.open(tmp_path / "model.gguf")
