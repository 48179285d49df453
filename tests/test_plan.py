"""The planner: published totals, what ranks really hold, limits worked out by hand, and refusals before a weight is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import pytest
from text_checkpoint import write_text_checkpoint

import inkling_jax
from inkling_jax import CapacityError, CheckpointError, ConfigError, InputError, loading, memory, plan
from inkling_jax.config import ModelConfig, preset
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.memory import largest, meshes, parse_bytes
from inkling_jax.planning import answer

GB, GIB = 10**9, 2**30
LARGE = {"mesh": "tensor=8", "device_memory": "141GB", "context": 131072, "batch": 32}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("plan") / "model")


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights, or making random ones, fails."""

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("weights were read")

    for name in ("stream_parameters", "random_parameters"):
        monkeypatch.setattr(loading, name, refuse)
    monkeypatch.setattr(os, "preadv", refuse)  # what reads tensors; headers come through open files


@pytest.mark.parametrize(
    ("name", "kind", "tensors", "total", "draft"),
    [  # spec 7.5
        ("inkling-small", "bf16", 1048, 531912898740, 4463824912),
        ("inkling-small", "nvfp4", 1360, 170733074592, 4463824912),
        ("inkling", "bf16", 1552, 1904755280148, 10520891408),
        ("inkling", "nvfp4", 2056, 592005369312, 10520891408),
    ],
)
def test_totals_are_the_published_ones(name: str, kind: str, tensors: int, total: int, draft: int) -> None:
    """To the byte, and what a device holds alone is what is read, but for the scales that gate and up no longer share."""
    found = answer(name, release_format=kind, device_memory="4TB", context=1024)
    assert (found.files.tensors, found.files.total, found.files.draft) == (tensors, total, draft)
    text = preset(name).text
    split_scales = 4 * text.num_experts * (text.num_layers - 3) if kind == "nvfp4" else 0
    wider_scalars = 2 * sum(text.dense_layers)  # the dense layers' global scale, kept in float32
    assert sum(found.memory.weights.values()) == found.files.read + split_scales + wider_scalars


def test_known_sizes_of_a_rank() -> None:
    """Inkling in NVFP4 at tensor=4 as others lay it out, its router in float32: shared experts whole, or all but experts."""
    split = answer("inkling", mesh="tensor=4", device_memory="1TB", context=1024).memory.weights
    whole = answer("inkling", device_memory="1TB", context=1024).memory.weights
    always = whole["router"] * 2 + whole["towers"] + whole["norms and convolutions"] + whole["shared experts"]
    ends = ("attention", "embedding", "head", "dense feed-forward")
    shared_whole = always + split["routed experts"] + sum(split[kind] for kind in ends)
    experts_alone = always + split["routed experts"] + sum(whole[kind] for kind in ends)
    assert round(shared_whole / GIB, 2) == 145.98
    assert round(experts_alone / GIB, 2) == 162.68


def test_cache_by_hand() -> None:
    """Eight ranks: one key head of a global layer each and two of a local one; 32 sequences, 64 tokens a page, bfloat16."""
    found = answer("inkling", **LARGE).memory.cache
    pair = 2 * 128 * 2  # a key and a value
    assert found["global"] == 11 * pair * 32 * 131072
    ring = (511 + 512 + 62) // 64 + 1  # pages that the window and a chunk of 512 can touch
    assert found["local"] == 55 * 2 * pair * 32 * ring * 64
    streams = 11 * 2 * 128 + 55 * 2 * 256 + 66 * 2 * 6144  # channels of keys and values, and of both sublayers
    assert found["conv"] == 33 * 3 * 2 * streams


def test_key_heads_held_twice_by_hand() -> None:
    """Sixteen ranks and eight key heads of global layers: a rank has a head, and a head two ranks; of local layers one each."""
    found = answer("inkling", **(LARGE | {"mesh": "tensor=16"})).memory
    pair = 2 * 128 * 2
    assert found.cache["global"] == 11 * pair * 32 * 131072
    ring = (511 + 512 + 62) // 64 + 1
    assert found.cache["local"] == 55 * pair * 32 * ring * 64
    per_head = (4 + 2) * 128 + 4 * 16  # rows of four queries, a key, a value and the biases
    assert found.weights["attention"] == 2 * (66 * 6144 * (per_head + 4 * 128) + (11 * 1024 + 55 * 512) * 16)


@pytest.mark.parametrize("mesh", [{}, {"tensor": 2}, {"tensor": 2, "expert": 4}])
def test_ranks_hold_what_is_planned(oracle_dir: Callable[..., Path], mesh: dict[str, int]) -> None:
    """Bytes of every array's shard on the first device, after loading, are those of the plan, weights and state alike."""
    directory = oracle_dir("tiny")
    options = {"dtype": "float32", "mesh": mesh, "page_size": 16, "chunk": 32}
    found = answer(str(directory), context=256, batch=2, device_memory="1GB", **options).memory
    with inkling_jax.load(directory, max_context=256, slots=2, quiet=True, **options) as llm:
        first = jax.devices()[0]

        def held(tree: Any) -> int:
            shards = [shard for array in jax.tree.leaves(tree) for shard in array.addressable_shards]
            return sum(shard.data.nbytes for shard in shards if shard.device == first)

        assert held([llm.engine.leaves, llm.engine.media._leaves]) == sum(found.weights.values())
        assert held(llm.engine.state) == sum(found.cache.values()) + found.slots
        window = ModelConfig.from_directory(directory).text.local_attention.window
        assert window is not None
        local = 2 * ((window - 1 + 32 + 14) // 16 + 1)
        assert f"32 pages of global and {local} of local layers, 16 tokens each" in llm.summary
        assert "3 rows of convolution state; 512 tokens in all, at most 256 a sequence" in llm.summary


def test_largest_batch_and_context_fit_and_no_more() -> None:
    found = answer("inkling", **LARGE)
    assert found.fits and found.left == int(141 * GB * 0.97) - found.memory.total
    for change, more in (
        ({"batch": found.largest_batch}, {"batch": found.largest_batch + 1}),
        ({"context": found.largest_context}, {"context": found.largest_context + 64}),
    ):
        assert answer("inkling", **(LARGE | change)).fits and not answer("inkling", **(LARGE | more)).fits
    assert [largest(10, lambda n, limit=limit: n <= limit) for limit in (0, 1, 7, 10, 99)] == [0, 1, 7, 10, 10]


def test_both_layouts_of_replicas_are_told() -> None:
    """Each holds what one device alone does, but for the routed experts, of which it has an eighth where they are spread."""
    asked: dict[str, Any] = {"device_memory": "141GB", "context": 32768}
    alone, within = (answer("inkling-small", **asked, mesh=mesh) for mesh in (None, "data=8"))
    over = answer("inkling-small", **asked, mesh="data=8", experts_over="data")
    assert within.memory == alone.memory == over.other and over.memory == within.other and alone.other is None
    eighth = {"routed experts": alone.memory.weights["routed experts"] // 8}
    assert over.memory.weights == alone.memory.weights | eighth and over.memory.cache == alone.memory.cache
    assert over.fits and not within.fits
    told = list(over.sentences())[-1]
    assert told.startswith("--experts-over data: 31.33 GB of weights, ") and told.endswith(" a device in all, which does not fit")
    assert "; all experts in each replica: 166.27 GB of weights, " in told
    assert list(within.sentences())[-1].endswith(" a device in all, which fits")


@pytest.mark.parametrize(
    ("name", "gigabytes", "experts_over_data", "mesh"),
    [
        ("inkling-small", 80, False, {"tensor": 8}),
        (
            "inkling-small",
            400,
            False,
            {"tensor": 8},
        ),  # though each device could have a copy
        ("inkling-small", 80, True, {"data": 8}),
        ("inkling", 1, False, {"tensor": 8}),  # nothing fits: what is lacking is told of this one
        ("wide", 1, False, {"data": 8}),  # 12 heads on 3 and 6: no replica of several devices
    ],
)
def test_auto_takes_all_devices_for_as_few_replicas_as_may_be(
    oracle_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    gigabytes: int,
    experts_over_data: bool,
    mesh: dict[str, int],
) -> None:
    pretend(monkeypatch, gigabytes * GB)
    config = ModelConfig.from_directory(oracle_dir("wide")) if name == "wide" else preset(name)
    options = loading.EngineOptions()
    layout = loading.layout_of(config, None, loading.choose_dtype(None, config), options, experts_over_data)
    request = memory.CacheRequest(8, 64, memory.most_positions(options), None)
    with caplog.at_level("INFO"):
        found = memory.choose_mesh(layout, request)
    assert found == dict.fromkeys(("data", "tensor", "expert"), 1) | mesh
    fits = gigabytes > 1 or name == "wide"
    assert [message.startswith("mesh auto: ") for message in caplog.messages] == [True] * fits


def test_a_mesh_that_would_work() -> None:
    """Of few devices first; one that divides. 145 GB of weights do not fit four devices, 73 fit eight."""
    assert [(m["tensor"], m["expert"]) for m in meshes(4)] == [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4)]
    found = answer("inkling", **(LARGE | {"mesh": "tensor=4"}))
    assert not found.fits and found.mesh_that_fits == "tensor=8"
    assert answer("inkling", **(LARGE | {"mesh": found.mesh_that_fits})).fits
    assert found.refusal().endswith("of 141000000000 there 136770000000 can be used: --mesh tensor=8 would fit")
    assert str(found.memory.total) in found.refusal()
    hopeless = answer("inkling", **(LARGE | {"device_memory": "1GB"}))
    assert hopeless.mesh_that_fits is None and "no mesh of up to 64 devices" in hopeless.refusal()
    assert hopeless.largest_batch == hopeless.largest_context == 0


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        (
            {"mesh": "tensor=3"},
            ConfigError,
            r"qkvr_proj: 'kv_heads', 64 query heads on 8 key heads do not divide over 3 .*; --mesh tensor=8 would do",
        ),
        ({"mesh": "tensor=3", "device_memory": "9GB"}, ConfigError, r"do not divide over 3 devices .*; --mesh tensor=4 would do"),
        (
            {"mesh": "data=3", "experts_over": "data"},
            ConfigError,
            r"experts.w13: dimension 'all_experts' of size 256 does not divide over 3 devices \(data x expert\); 1, 2, 4, 8, 16",
        ),
        ({"mesh": "tensor=2", "experts_over": "data"}, InputError, "experts_over='data': mesh tensor=2 has one replica"),
        ({"mesh": "data=2", "experts_over": "tensor"}, InputError, "experts_over='tensor': expected None"),
        ({"mesh": "tensor=0"}, InputError, "'tensor=0' is not AXIS=SIZE"),
        ({"device_memory": "much"}, InputError, "size 'much': expected a number of bytes"),
        ({"context": 2**21}, InputError, "max_context 2097152 is not from 1 to the model's 1048576"),
        ({"batch": 0}, InputError, "slots=0: expected an integer of at least 1"),
        ({"page_size": 24}, InputError, "page_size 24 is not a power of two"),
        ({"dtype": "float16"}, InputError, "dtype 'float16': expected one of"),
    ],
)
def test_what_cannot_be_planned(options: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        answer("inkling", **(LARGE | options))


def test_a_directory_is_planned_from_its_headers(directory: Path, unread: None, tmp_path: Path) -> None:
    """From a directory without tensors too, by what its configuration says; a format is for those alone."""
    found = answer(str(directory), device_memory="1GB", context=128)
    assert found.files.total == sum(info.nbytes for info in Checkpoint.open(directory).tensors.values())
    with pytest.raises(InputError, match="has tensors, which tell their format themselves"):
        answer(str(directory), release_format="bf16", device_memory="1GB")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    assert answer(str(tmp_path), device_memory="1GB", context=128).memory.cache == found.memory.cache


def test_a_name_that_no_hub_id_has() -> None:
    with pytest.raises(CheckpointError, match="some/model--mine: no such directory, and no hub id"):
        answer("some/model--mine")


def test_a_hub_id_is_planned_from_the_configuration_that_is_here(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: dict[str, str] = {"some/model": str(directory / "config.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: found.get(repo))
    assert answer("some/model", device_memory="1GB", context=128).model == "some/model"
    with pytest.raises(CheckpointError, match="other/model: no such directory, and its config.json has not been downloaded"):
        answer("other/model")
    with pytest.raises(InputError, match="unknown model '~nobody here/model'"):
        answer("~nobody here/model")
    with pytest.raises(InputError, match="unknown model 'nonesuch'"):
        answer("nonesuch")


# Loading asks the planner first.


def pretend(monkeypatch: pytest.MonkeyPatch, total: int, taken: int = 0) -> None:
    """Give every device this memory."""
    monkeypatch.setattr(memory, "memory_of", lambda device, devices: (total, taken))


def test_weights_that_do_not_fit_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch, unread: None) -> None:
    """166 GB on a device of 80 GB: told before anything is allocated, with a mesh that would hold them."""
    pretend(monkeypatch, 80 * GB, GB)
    told = r"the weights take 166\d{9} bytes a device, of 80000000000 there 76600000000 can be used: .* mesh='tensor=4'"
    with pytest.raises(CapacityError, match=told):
        inkling_jax.load("inkling-small", weights="random")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_context": 512}, r"the cache needs \d+ bytes for a context of 512 tokens, \d+ are left"),
        ({}, r"weights and a step take \d+ bytes a device, of \d+ there \d+ can be used: no room for a cache"),
        (
            {"kv_memory": "1GB"},
            r"weights, cache and a step take \d+ bytes a device, of \d+ there \d+ can be used: lower kv_memory",
        ),
    ],
)
def test_a_cache_that_does_not_fit_beside_the_weights_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch, unread: None, options: dict[str, Any], told: str
) -> None:
    """On a device that holds the weights and nearly nothing else."""
    planned = answer(str(directory), context=512, device_memory="1GB", batch=8, dtype="float32").memory
    beside = planned.without_cache + (sum(planned.cache.values()) // 16 if "max_context" in options else -1)
    pretend(monkeypatch, round(beside / 0.97))
    with pytest.raises(CapacityError, match=told):
        inkling_jax.load(directory, dtype="float32", quiet=True, **options)


def test_sizes_in_bytes() -> None:
    """Decimal and binary units, with and without the B, upper and lower k."""
    sizes = {"40GB": 40 * GB, "1.5M": 1_500_000, "2KiB": 2048, "2kB": 2000, "3KB": 3000, "1TiB": 2**40, "17": 17, " 5 B ": 5}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "GB", "-1", "1e3", "3QB", "1 2", "nan", "9" * 400):
        with pytest.raises(InputError, match="expected a number of bytes"):
            parse_bytes(text)


# The command line.

COMMAND = ["--model", "inkling", "--mesh", "tensor=8", "--context", "131072", "--batch", "32"]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*COMMAND, "--device-memory", "141GB"]) == 0
    out = capsys.readouterr().out
    for line in (r"weights: routed experts 67,834,672,128 67.83 GB", r"keys and values of global layers 23,622,320,128 23.62 GB"):
        assert line in " ".join(out.split())
    assert "files: 592,005,369,312 bytes in 2,056 tensors" in out and "largest that fits this mesh: " in out


def test_json_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """0 where it fits; 2 where it does not, with one line of standard error, or where the question is wrong."""
    assert plan.main([*COMMAND, "--device-memory", "141GB", "--json"]) == 0
    fits = json.loads(capsys.readouterr().out)
    assert fits["fits"] and fits["total"] + fits["left"] + fits["margin"] == fits["device_memory"] == 141 * GB
    assert fits["memory"]["cache"]["global"] == 23_622_320_128
    assert plan.main([*COMMAND, "--device-memory", "80GiB", "--json"]) == 2
    out, err = capsys.readouterr()
    assert not json.loads(out)["fits"] and json.loads(out)["device_memory"] == 80 * GIB
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith(": --mesh tensor=16 would fit\n")
    assert plan.main(["--model", "nonesuch"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown model 'nonesuch'")


def test_the_memory_of_this_machine_is_the_default(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--model", str(directory), "--context", "128", "--batch", "1", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)["device_memory"]
    assert whole == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shared = answer("inkling-small", mesh="tensor=4", context=128, batch=1).device_memory
    assert shared == whole // 4  # the CPU's devices share it, and loading counts so
