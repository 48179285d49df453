"""A converted checkpoint is the source's numbers bit for bit, on any mesh, or it is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import micro_checkpoint, plan_of
from spread_parameters import held, open_weights_of, shardings_of
from text_checkpoint import write_text_checkpoint

import inkling_jax
from inkling_jax.config import ModelConfig
from inkling_jax.convert import orbax_store
from inkling_jax.convert.conversion import Conversion
from inkling_jax.convert.converted import RECORD
from inkling_jax.convert.converter import convert
from inkling_jax.convert.orbax_store import Grid
from inkling_jax.convert.verify import verify
from inkling_jax.errors import CapacityError, CheckpointError, ConfigError
from inkling_jax.sharding.mesh import mesh_sizes

STATE = Path("weights/state")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of text, with experts in both forms."""
    return write_text_checkpoint(tmp_path_factory.mktemp("source") / "published")


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What it was converted to, in files of several chunks and more than one file a parameter."""
    destination = tmp_path_factory.mktemp("converted") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbax_store, "CHUNK_BYTES", 1000)
        patch.setattr(orbax_store, "FILE_BYTES", 4000)
        convert(Conversion.of(source, destination), quiet=True)
    return destination


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    """One to damage."""
    return Path(shutil.copytree(converted, tmp_path / "copy"))


CHECKPOINTS = [("tiny", "nvfp4"), ("wide", "nvfp4"), ("gpu", "nvfp4"), ("tiny", "bf16")]


@pytest.mark.parametrize(("name", "fmt"), CHECKPOINTS)
def test_a_checkpoint_means_what_it_meant(oracle_dir: Callable[..., Path], tmp_path: Path, name: str, fmt: str) -> None:
    """Every parameter, bit for bit, on one device and on others than it was written for; `verify` reads all of it too."""
    directory, destination = oracle_dir(name, fmt), tmp_path / "converted"
    conversion = Conversion.of(directory, destination, mesh_sizes("tensor=2") if name == "tiny" else None)
    convert(conversion, quiet=True)
    wanted = held(directory)
    assert held(destination) == wanted
    spread = held(destination, "tensor=4,expert=2")
    assert len(spread) > 50 and spread == {path: wanted[path] for path in spread}
    assert verify(conversion, quiet=True) == sum(made.nbytes for made in open_weights_of(destination).parameters.values())
    for file in directory.iterdir():
        if not file.name.endswith((".safetensors", ".index.json")):
            assert (destination / file.name).read_bytes() == file.read_bytes()


def test_it_loads_like_any_checkpoint(source: Path, converted: Path) -> None:
    """Onto a mesh as well; the tokenizer went along."""
    for directory in (source, converted):
        llm = inkling_jax.load(directory, mesh="expert=1", max_context=16, page_size=16, quiet=True)
        assert llm.config == ModelConfig.from_directory(source)
        llm.close()
    with pytest.raises(ConfigError, match="4 query heads on 1 key heads do not divide over 3 devices"):
        inkling_jax.load(converted, mesh="tensor=3", quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fmt"), CHECKPOINTS)
def test_logits_are_equal_to_the_bit(oracle_dir: Callable[..., Path], tmp_path: Path, name: str, fmt: str) -> None:
    convert(Conversion.of(oracle_dir(name, fmt), tmp_path / "converted"), quiet=True)
    logits = []
    for directory in (oracle_dir(name, fmt), tmp_path / "converted"):
        llm = inkling_jax.load(directory, dtype="float32", max_context=64, quiet=True)
        logits.append(llm.score([3, 1, 4, 1, 5, 9, 2, 6]).tobytes())
        llm.close()
    assert logits[0] == logits[1]


def test_orbax_restores_it_alone(source: Path, converted: Path) -> None:
    """It is a checkpoint of Orbax's, which knows nothing of us: on another mesh, packed and float8 leaves bit for bit."""
    from orbax.checkpoint import v1 as orbax

    plan = plan_of(source, draft=True)
    config = ModelConfig.from_directory(source)
    shardings = shardings_of(config, plan, mesh_sizes("expert=2"))
    wanted = {
        path: jax.ShapeDtypeStruct(made.shape, made.dtype or made.content.stored, sharding=shardings[path])
        for path, made in plan.parameters.items()
        if path.startswith("layers.2.mlp.router") or path == "embed"
    }
    packed = "layers.2.mlp.experts.w13"
    spread = jax.NamedSharding(shardings["embed"].mesh, jax.P(None, None, "expert"))
    for part in ("values", "scale"):
        made = plan.parameters[f"{packed}.{part}"]
        wanted[f"{packed}.{part}"] = jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=spread)
    context = orbax.Context()
    context.pytree.loading.partial_load = True
    with context:
        got = orbax.load(str(converted / "weights"), wanted)
    for path, struct in wanted.items():
        assert got[path].sharding == struct.sharding
        assert np.asarray(got[path]).tobytes() == plan.assemble(path).tobytes(), path
    described = orbax.metadata(str(converted / "weights")).metadata
    assert described.keys() == plan.parameters.keys()
    assert all(described[path].shape == made.shape for path, made in plan.parameters.items())


def test_the_record_says_what_it_was_made_of(source: Path, converted: Path) -> None:
    import hashlib

    record = json.loads((converted / RECORD).read_text())
    for file in source.glob("*.safetensors"):
        content = file.read_bytes()
        assert record["source"][file.name] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert len(record["source"]) == len([*source.glob("*.safetensors")])
    assert record["versions"]["inkling_jax"] == inkling_jax.__version__ and "tensorstore" in record["versions"]
    plan = plan_of(source, draft=True)
    assert record["left_out"] == sorted((*plan.deferred, *plan.unused))
    entry = record["parameters"]["layers.0.attn.qkvr_proj"]
    assert entry["tensors"] == [f"model.llm.layers.0.attn.{role}.weight" for role in ("wq_du", "wk_dv", "wv_dv", "wr_du")]
    assert str(source.parent) not in (converted / RECORD).read_text(), "a record goes along with its model: no paths of here"


@pytest.mark.parametrize(
    ("shape", "itemsize", "ways", "chunk", "file"),
    [
        ((), 4, (), (), ()),
        ((10, 6), 2, (1, 1), (10, 6), (10, 6)),  # 120 bytes: one chunk
        ((10, 500), 2, (1, 1), (1, 500), (6, 500)),  # rows of 1,000 bytes, six to a file
        ((10, 600), 2, (1, 1), (1, 512), (3, 1024)),  # rows of 1,200 bytes, a chunk of 1,024 and the rest: three to a file
        ((48, 64), 1, (1, 16), (48, 4), (48, 64)),  # columns that sixteen devices share, all in one file
        ((48, 64), 1, (1, 6), (32, 32), (64, 64)),  # of six only two can: chunks of 1,024 bytes
        ((3, 4, 1000), 1, (16, 1, 1), (1, 1, 1000), (1, 4, 1000)),
    ],
)
def test_grids(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    itemsize: int,
    ways: tuple[int, ...],
    chunk: tuple[int, ...],
    file: tuple[int, ...],
) -> None:
    """Chunks of 1,024 bytes and files of 6,144, worked out by hand; files tile the array."""
    monkeypatch.setattr(orbax_store, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(orbax_store, "FILE_BYTES", 6144)
    grid = Grid.of(shape, itemsize, ways)
    assert (grid.chunk, grid.file) == (chunk, file)
    count = np.zeros(shape, int)
    for box in grid.files():
        count[(*box, ...)] += 1
    assert (count == 1).all()


def test_a_mesh_cuts_the_files_for_its_devices(source: Path, tmp_path: Path) -> None:
    """Without one, an axis is cut as finely as up to sixteen devices can split it; what does not divide is refused."""
    micro_checkpoint(tmp_path, True, num_key_value_heads=2, n_routed_experts=4, intermediate_size=32)
    grids = Conversion.of(tmp_path, tmp_path / "x").grids
    assert grids["layers.3.mlp.experts.w2.values"].chunk == (1, 48, 1)  # of [4, 48, 16]
    grids = Conversion.of(tmp_path, tmp_path / "x", mesh_sizes("tensor=2")).grids
    assert grids["layers.3.mlp.experts.w2.values"].chunk == (4, 48, 8)
    assert grids["layers.3.attn.o_proj"].chunk == (48, 16)
    with pytest.raises(ConfigError, match="layers.1.attn.qkvr_proj: 'kv_heads', 4 query heads on 1 key heads"):
        Conversion.of(source, tmp_path / "x", mesh_sizes("tensor=3"))


def test_a_truncated_file_is_named(copy: Path) -> None:
    file = copy / STATE / "embed/c/1/0"
    size = file.stat().st_size
    os.truncate(file, size - 3)
    with pytest.raises(CheckpointError, match=rf"embed/c/1/0: {size - 3} bytes, expected {size}: truncated"):
        inkling_jax.load(copy, quiet=True)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"embed/c/1/0: is missing"):
        inkling_jax.load(copy, quiet=True)


def test_what_is_lost_does_not_read_as_zeros(copy: Path) -> None:
    """A file that is gone when it is read, after sizes were compared."""
    plan = open_weights_of(copy)
    (copy / STATE / "embed/c/1/0").unlink()
    with pytest.raises(CheckpointError, match=r"state/embed: cannot be read: NOT_FOUND: .* is missing"):
        plan.assemble("embed")


def test_a_lost_copy_is_named(source: Path, tmp_path: Path) -> None:
    """A template above all, without which chats are rendered by another. What loading does not read may go."""
    published, destination = shutil.copytree(source, tmp_path / "published"), tmp_path / "model"
    for name in ("chat_template.jinja", "README.md"):
        (published / name).write_text("{{ messages }}")
    convert(Conversion.of(published, destination), quiet=True)
    (destination / "README.md").unlink()
    assert open_weights_of(destination).parameters
    (destination / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match=r"model/chat_template\.jinja: is missing; the source had it"):
        open_weights_of(destination)


def test_a_published_checkpoint_may_hold_a_directory_of_that_name(source: Path, tmp_path: Path) -> None:
    published = shutil.copytree(source, tmp_path / "published")
    (published / "weights").mkdir()
    assert open_weights_of(published).parameters.keys() == open_weights_of(source).parameters.keys()


def test_a_flipped_bit_is_noticed(source: Path, copy: Path) -> None:
    """By the checksum of its chunk when it is read; where a number was written anew with its checksum, by comparison."""
    file = copy / STATE / "embed/c/0/0"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    conversion = Conversion.of(source, copy)
    for read in (lambda: held(copy), lambda: verify(conversion, quiet=True)):
        with pytest.raises(CheckpointError, match=r"state/embed: cannot be read: DATA_LOSS: .*embed/c/0/0.: Digest mismatch"):
            read()


def test_verify_names_the_number_that_differs(source: Path, copy: Path) -> None:
    import tensorstore

    path = copy / STATE / "layers.2.mlp.experts.w2.values"
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    array = tensorstore.open(spec).result()
    before = int(array[2, 40, 3].read().result())
    array[2, 40, 3].write(before ^ 0x10).result()
    expected = rf"w2.values: \(2, 40, 3\) is 0x{before ^ 0x10:x}, the source has 0x{before:x}"
    with pytest.raises(CheckpointError, match=expected):
        verify(Conversion.of(source, copy), quiet=True)


def test_verify_reads_the_copied_files_too(source: Path, copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: is not the file of the source"):
        verify(Conversion.of(source, copy), quiet=True)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda record: record.update(version=2), "version 2, this release reads 1"),
        (lambda record: record.update(parameters=[]), "'parameters' is missing"),
        (lambda record: record["parameters"].pop("embed"), "lacks 1 of its parameters: 'embed'"),
        (lambda record: record["parameters"].update(extra={}), "has no place for 1 of its parameters: 'extra'"),
        (
            lambda record: record["parameters"].update(embed=3),
            "parameter 'embed': expected an object with shape, dtype and files",
        ),
        (lambda record: record["parameters"]["embed"].update(shape=[72, 47]), r"shape \[72, 47\], config.json makes it"),
        (lambda record: record["parameters"]["embed"].update(dtype="uint8"), "dtype uint8, expected a float"),
        (lambda record: record["parameters"]["layers.2.mlp.router.bias"].update(dtype="bfloat16"), "expected float32"),
        (lambda record: record["parameters"]["embed"]["files"].update({"c/9/9": 1}), "embed/c/9/9: is missing"),
        (lambda record: record["parameters"]["embed"]["files"].update({"\0": 1}), "is missing .*null byte"),
        (
            lambda record: record["parameters"].update({f"layers.{'9' * 5000}.mlp.experts.w13.values": {}}),
            "has no place for 1 of its parameters: 'layers.999",
        ),
    ],
)
def test_a_record_that_does_not_fit_is_refused(copy: Path, edit: Callable[[dict], None], told: str) -> None:
    record = json.loads((copy / RECORD).read_text())
    edit(record)
    (copy / RECORD).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=told):
        open_weights_of(copy)


def test_weights_without_their_record_are_refused(copy: Path) -> None:
    (copy / RECORD).unlink()
    with pytest.raises(CheckpointError, match=r"copy: its conversion.json is missing"):
        inkling_jax.load(copy, quiet=True)


def test_an_array_of_another_dtype_is_not_cast_in_silence(copy: Path) -> None:
    """Its files and sizes fit the record; what the array says of itself does not."""
    described = copy / STATE / "norm.weight/zarr.json"
    described.write_text(described.read_text().replace('"bfloat16"', '"float16"').ljust(described.stat().st_size))
    record = json.loads((copy / RECORD).read_text())
    record["parameters"]["norm.weight"]["files"]["zarr.json"] = described.stat().st_size
    (copy / RECORD).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"norm.weight: holds float16 of shape \(48,\), expected bfloat16"):
        held(copy)


def test_no_space_is_refused_before_anything_is_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = Conversion.of(source, tmp_path / "model")
    need = sum(map(conversion.nbytes, conversion.dtypes))
    free = [need]
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(0, 0, free[0]))  # pyright: ignore
    with pytest.raises(CapacityError, match=r"model: .* MB are to be written, the disk has .* MB free"):
        convert(conversion, quiet=True)
    assert not any(tmp_path.iterdir())
    free[0] = 2 * need
    convert(conversion, quiet=True)


def test_destinations_that_hold_something_are_refused(source: Path, converted: Path, tmp_path: Path) -> None:
    file, full, strange = tmp_path / "file", tmp_path / "full", tmp_path / "strange"
    file.write_text("x")
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    strange.with_name("strange.partial").mkdir()
    (strange.with_name("strange.partial") / "notes.txt").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(tmp_path)
    for place, told in (
        (file, "file: exists and is not a directory"),
        (tmp_path / "dangling", "dangling: is a mount or a link"),
        (tmp_path / "link", "link: is a mount or a link"),
        (Path("/"), "/: is a mount or a link"),
        (full, "full: is not empty"),
        (strange, "strange.partial: is no conversion under way"),
        (converted, "holds a finished conversion; --verify compares it"),
        (source, "is not empty"),
    ):
        with pytest.raises(CheckpointError, match=told):
            convert(Conversion.of(source, place), quiet=True)
    assert (full / "notes.txt").read_text() == "mine" and file.read_text() == "x"
    with pytest.raises(CheckpointError, match="is converted already"):
        Conversion.of(converted, tmp_path / "again")
    with pytest.raises(CheckpointError, match="no finished conversion is there"):
        verify(Conversion.of(source, tmp_path / "none"), quiet=True)


def test_an_empty_directory_will_do(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory too."""
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    convert(Conversion.of(source, Path(".")), quiet=True)
    assert {file.name for file in tmp_path.iterdir()} == {"model"}
    assert open_weights_of(tmp_path / "model").parameters["embed"].content.stored == jnp.dtype("bfloat16")


def test_a_source_without_a_tensor_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    micro_checkpoint(tmp_path / "source", True, lambda tensors: tensors.pop("model.llm.norm.weight"))
    with pytest.raises(CheckpointError, match="missing 1 tensor: 'model.llm.norm.weight'"):
        Conversion.of(tmp_path / "source", tmp_path / "model")
    assert not (tmp_path / "model.partial").exists()
