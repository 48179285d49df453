"""Each device gets its own part of every parameter, and only the bytes that hold it are read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import Tensors, load, micro_checkpoint, plan_of, save
from jax.sharding import NamedSharding, PartitionSpec
from spread_parameters import divides, shardings_of

import inkling_jax
from inkling_jax.config import ModelConfig
from inkling_jax.convert import load as loader
from inkling_jax.convert import nvfp4, safetensors_reader, view
from inkling_jax.convert.accounting import Source
from inkling_jax.convert.assemble import gate_up
from inkling_jax.convert.load import load_parameters
from inkling_jax.convert.quantize import quantize
from inkling_jax.convert.slices import blocks, extents, joined, moved, whole, within
from inkling_jax.convert.view import Box, View
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.errors import CheckpointError, ConfigError
from inkling_jax.sharding.mesh import make_mesh, mesh_sizes

W2 = "model.llm.layers.3.mlp.experts.w2_weight"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(tensor, first byte, bytes) of every read of a file that a view asks for."""
    seen: list[tuple[str, int, int]] = []

    def watched(info: Any, start: int, buffer: np.ndarray) -> None:
        seen.append((info.name, start, buffer.nbytes))
        safetensors_reader.read_into(info, start, buffer)

    monkeypatch.setattr(view, "read_into", watched)
    return seen


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WeightPlan]:
    """The micro checkpoint in NVFP4, and its plan."""
    directory = tmp_path_factory.mktemp("micro")
    micro_checkpoint(directory, nvfp4=True)
    return directory, plan_of(directory)


def read(source: Source, box: Box) -> np.ndarray:
    """A part of a parameter."""
    out = np.empty(extents(box), source.dtype or source.content.stored)
    source.content.read(box, out)
    return out


def random_boxes(shape: tuple[int, ...], count: int) -> Iterator[Box]:
    rng = np.random.default_rng(len(shape))
    for _ in range(count):
        ends = [sorted(rng.choice(size + 1, 2, replace=False)) for size in shape]
        yield tuple(slice(int(a), int(b)) for a, b in ends)


@pytest.mark.parametrize(("stage", "gap"), [(1 << 24, 1 << 16), (100, 40), (64, 0)])
def test_a_part_of_a_parameter_is_the_part_of_the_whole(
    micro: tuple[Path, WeightPlan], monkeypatch: pytest.MonkeyPatch, stage: int, gap: int
) -> None:
    """The whole is held against the stored tensors elsewhere; here however little is staged and whatever is read over."""
    _, plan = micro
    full = {path: plan.assemble(path) for path in plan.parameters}
    monkeypatch.setattr(view, "STAGE_BYTES", stage)
    monkeypatch.setattr(view, "GAP_BYTES", gap)
    paths = [path for path in full if path.startswith(("embed", "unembed", "layers.0", "layers.1.mlp", "layers.3"))]
    for path in paths:
        for box in random_boxes(full[path].shape, 4):
            assert read(plan.parameters[path], box).tobytes() == full[path][box].tobytes(), (path, box)


def test_gate_and_up_rows_are_even_and_odd(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"w13": np.arange(8, dtype=np.float32).reshape(4, 2)})
    seen = gate_up(safetensors_reader.Checkpoint.open(tmp_path).info("w13"))
    out = np.empty((2, 2, 2))
    seen.read(out)
    assert out.tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_packed_rows_and_their_scales_split_alike(tmp_path: Path) -> None:
    # row r is the constant r, with a block scale that differs from row to row
    rows = np.repeat(np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)[:, None], 32, axis=1)
    values, scale, scale2, _ = (np.asarray(part)[None] for part in quantize(rows))
    save(tmp_path / "model.safetensors", {"values": values, "scale": scale})
    checkpoint = safetensors_reader.Checkpoint.open(tmp_path)
    parts = [np.empty((1, 2, 4, array.shape[-1]), array.dtype) for array in (values, scale)]
    for name, part in zip(("values", "scale"), parts, strict=True):
        gate_up(checkpoint.info(name)).read(part)
    gate, up = nvfp4.dequantize(*parts, np.stack([scale2, scale2], -1))[0]
    assert np.allclose(gate[:, 0], [0, 2, 4, 8], rtol=0.05) and np.allclose(up[:, 0], [1, 3, 6, 12], rtol=0.05)


def test_a_repeated_axis_is_not_taken_for_contiguous(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"a": np.arange(4, dtype=np.float32)})
    info = safetensors_reader.Checkpoint.open(tmp_path).info("a")
    out = np.empty((2, 2), np.float32)
    View(info, (2, 2), (3, 0)).read(out)  # reaches over four elements, and has four
    assert out.tolist() == [[0, 0], [3, 3]]


def test_what_is_read_is_what_was_asked_for(micro: tuple[Path, WeightPlan], reads: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte ranges worked out by hand: embed is [72, 48] of two bytes, o_proj of layer 0 [48, 24], w2 [3, 48, 16 / 2] bytes."""
    _, plan = micro
    read(plan.parameters["embed"], (slice(10, 13), slice(0, 48)))
    assert reads == [("model.llm.embed.weight", 10 * 96, 3 * 96)]
    reads.clear()
    columns = slice(0, 2), slice(6, 12)
    read(plan.parameters["layers.0.attn.o_proj"], columns)  # one read over the gap of 36 bytes
    assert reads == [("model.llm.layers.0.attn.wo_ud.weight", 12, 48 + 12)]
    monkeypatch.setattr(view, "GAP_BYTES", 35)
    reads.clear()
    read(plan.parameters["layers.0.attn.o_proj"], columns)
    assert [part[1:] for part in reads] == [(12, 12), (48 + 12, 12)]
    reads.clear()
    read(plan.parameters["layers.3.mlp.experts.w2.values"], (slice(1, 2), slice(0, 48), slice(0, 8)))
    assert reads == [(W2, 48 * 8, 48 * 8)]
    reads.clear()
    read(plan.parameters["layers.0.attn.qkvr_proj"], (slice(1, 2), slice(0, 12), slice(0, 48)))  # a group's queries alone
    assert reads == [("model.llm.layers.0.attn.wq_du.weight", 12 * 96, 12 * 96)]


@pytest.mark.parametrize("shape", [(), (5,), (7, 4), (3, 8, 6), (2, 1, 3, 4)])
@pytest.mark.parametrize("limit", [1, 5, 12, 1000])
def test_blocks_tile_an_array(shape: tuple[int, ...], limit: int) -> None:
    for order in itertools.islice(itertools.permutations(range(len(shape))), 4):
        count = np.zeros(shape, int)
        for box in blocks(shape, order, (1,) * len(shape), limit):
            assert math.prod(extents(box)) <= limit
            count[(*box, ...)] += 1
        assert (count == 1).all()


def test_blocks_keep_to_the_grain() -> None:
    boxes = list(blocks((10, 7), (0, 1), (4, 7), 40))
    assert [box[0] for box in boxes] == [slice(0, 4), slice(4, 8), slice(8, 10)] and len(boxes) == 3


def test_neighbours_are_read_as_one() -> None:
    """Columns of the same rows join; what is apart in the file stays so."""
    columns = [(slice(0, 2), slice(c, c + 3)) for c in (3, 0, 6)]
    assert joined(columns, (6, 9), (0, 1)) == [((slice(0, 2), slice(0, 9)), [1, 0, 2])]
    assert len(joined(columns, (6, 9), (1, 0))) == 3  # of a transposed file, where the rows that are not asked for lie between
    apart = [(slice(0, 2), slice(0, 3)), (slice(0, 2), slice(6, 9)), (slice(4, 6), slice(3, 6))]
    assert [members for _, members in joined(apart, (6, 9), (0, 1))] == [[0], [1], [2]]
    assert joined([()], (), ()) == [((), [0])]


MESHES = ["tensor=1", "tensor=2", "tensor=4", "expert=4", "tensor=2,expert=2"]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("on_devices", [False, True])
def test_each_device_gets_its_part(
    oracle_dir: Callable[..., Path], reads: list, monkeypatch: pytest.MonkeyPatch, mesh: str, on_devices: bool
) -> None:
    """Block by block on host or devices: parts are those of the whole, nothing else is held, and no byte is read twice."""
    monkeypatch.setattr(loader, "BLOCK_BYTES", 20_000)
    if on_devices:
        is_large = 4096  # bytes: small ones go whole, here as on a GPU
        choose = lambda source, wanted, device: (  # noqa: E731
            loader._OnDevices if math.prod(device.shard_shape(source.shape)) > is_large else loader._OnHost
        )(source, wanted, device)
        monkeypatch.setattr(loader, "_placement", choose)
    directory, sizes = oracle_dir("tiny"), mesh_sizes(mesh)
    config, plan = ModelConfig.from_directory(directory), plan_of(directory)
    full = {path: plan.assemble(path) for path in plan.parameters}
    reads.clear()
    shardings = shardings_of(config, plan, sizes)
    chosen = ("layers.0.attn", "layers.1.mlp", "layers.3.mlp") if on_devices else ""  # there every shape is a program
    kept = {p: s for p, s in plan.parameters.items() if p.startswith(chosen) and divides(s.shape, shardings[p])}
    assert len(kept) > 10
    plan = WeightPlan(plan.checkpoint, kept, plan.packed, plan.towers, (), ())
    got = load_parameters(plan, dtype="float32", device=shardings)
    for path, array in got.items():
        wanted = full[path].astype(plan.abstract("float32")[path].dtype)
        assert array.sharding == shardings[path] and array.dtype == wanted.dtype
        shards = array.addressable_shards
        assert len(shards) == math.prod(sizes.values())
        for shard in shards:
            assert np.asarray(shard.data).tobytes() == wanted[shard.index].tobytes(), (path, shard.index)
            assert shard.data.shape == shardings[path].shard_shape(wanted.shape)
    once = sum(source.nbytes for source in plan.parameters.values())
    assert sum(nbytes for _, _, nbytes in reads) == once
    assert len({(name, start) for name, start, _ in reads}) == len(reads)


def test_a_process_reads_what_its_devices_own(
    micro: tuple[Path, WeightPlan], reads: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the second of four devices alone here, the bytes are those of its rows, and of its columns with gaps between."""
    _, plan = micro
    mesh = make_mesh({"tensor": 4})
    second = mesh.devices.flat[1]
    every = NamedSharding.addressable_devices_indices_map
    monkeypatch.setattr(
        NamedSharding, "addressable_devices_indices_map", lambda self, shape: {second: every(self, shape)[second]}
    )
    wanted = plan.abstract("bfloat16")
    for path, spec, ranges in (
        ("embed", PartitionSpec("tensor"), [(18 * 96, 18 * 96)]),
        ("layers.1.mlp.w2", PartitionSpec(None, "tensor"), [(7 * 2, 47 * 28 * 2 + 7 * 2)]),
    ):
        made = loader._placement(plan.parameters[path], wanted[path], NamedSharding(mesh, spec))
        for step in made.steps:
            made.read(step)
        assert [(start, nbytes) for _, start, nbytes in reads] == ranges
        reads.clear()


def test_a_bad_scale_is_refused_by_its_place_in_the_whole(tmp_path: Path) -> None:
    def poison(tensors: Tensors) -> None:
        tensors[W2 + ".scale"] = tensors[W2 + ".scale"].copy()
        tensors[W2 + ".scale"].view(np.uint8)[2, 31, 0] = 0x7F

    config = micro_checkpoint(tmp_path, True, poison, n_routed_experts=4, num_key_value_heads=2)
    plan = plan_of(tmp_path, config)
    with pytest.raises(CheckpointError, match=r"w2_weight.scale: block scale at \(2, 31, 0\) is NaN"):
        load_parameters(plan, dtype="bfloat16", device=shardings_of(config, plan, {"expert": 2}))


def test_a_slice_that_is_not_whole_blocks_of_sixteen_is_refused(tmp_path: Path) -> None:
    """Experts of 16 channels over two devices: eight each, half a block of NVFP4 scales."""
    micro_checkpoint(tmp_path, nvfp4=True, num_key_value_heads=2)
    with pytest.raises(ConfigError, match=r"experts\.w2\.scale"):
        inkling_jax.load(tmp_path, mesh="tensor=2", quiet=True)


def test_within_undoes_moved() -> None:
    outer, box = (slice(4, 9), slice(2, 8)), (slice(1, 3), slice(0, 6))
    assert within(moved(box, outer), outer) == box and whole((2, 3)) == (slice(0, 2), slice(0, 3))


def test_tensors_are_seen_once(micro: tuple[Path, WeightPlan]) -> None:
    """Every stored number that is read has one place in its parameter: views neither repeat (matrix scales aside) nor skip."""
    directory, plan = micro
    sizes = {name: array.size for name, array in load(directory).items()}
    for path, source in plan.parameters.items():
        for seen in source.content.views:  # pyright: ignore[reportAttributeAccessIssue]
            places = {
                seen.offset + sum(i * stride for i, stride in zip(index, seen.strides, strict=True))
                for index in np.ndindex(seen.shape)
            }
            assert len(places) == sizes[seen.info.name] == max(places, default=0) + 1, path
            assert len(places) == math.prod(seen.shape) or path.endswith("scale2")
