"""The step benchmark: what it must read, counted by hand; rows and their files; one rank that really runs; errors on one line."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax import bench
from inkling_jax.benchmarks import ceilings, rows, step, timing
from inkling_jax.benchmarks.ceilings import ReadCeiling, read_ceiling
from inkling_jax.benchmarks.shard import Shard, open_shard
from inkling_jax.benchmarks.step import Case, Stepper, compile_cases, list_cases
from inkling_jax.benchmarks.traffic import Traffic, expected_experts, step_traffic
from inkling_jax.config import TextConfig, preset
from inkling_jax.engine.state import PageUpdates
from inkling_jax.engine.steps import Chunk
from inkling_jax.errors import CapacityError, InklingError, InputError
from inkling_jax.kernels.read_bandwidth import STAGES, TILE, tma_read, xla_read

CEILING = ReadCeiling(1e9, "XLA reduction", 1e9)


def traffic_of(shard: Shard, batch: int, context: int) -> Traffic:
    return step_traffic(shard.leaves, shard.config, shard.sizes, rows=batch, queries=1, contexts=range(context, context + 1))


# What a step must read.


def decode_bytes(config: TextConfig, ranks: int, batch: int, context: int) -> tuple[float, float, float, float]:
    """Weights, routed experts, KV and convolution state that a decode step of one of `ranks` along `tensor` reads, by hand."""
    d, width, kept = config.hidden_size, config.expert_width, config.conv_width - 1
    weights = 2 * (config.vocab_size * d // ranks + 2 * d + batch * d)  # the head, two norms, a row of the embedding each
    experts = kv = conv = 0.0
    hit = config.num_experts * (1 - (1 - config.num_experts_per_token / config.num_experts) ** batch)
    sparse = 0
    for layer in range(config.num_layers):
        a = config.attention(layer)
        heads, groups, taps = a.num_heads // ranks, a.num_kv_heads // ranks, config.conv_width
        weights += 2 * d * (heads * (2 * a.head_dim + config.rel_dim) + 2 * groups * a.head_dim)  # q, o, r, k, v
        weights += 2 * (2 * a.head_dim + a.rel_extent * config.rel_dim + 2 * d)  # norms and the bias by distance
        weights += 2 * taps * (2 * groups * a.head_dim + 2 * d)
        kv += 2 * 2 * groups * a.head_dim * batch * min(context, a.window or context)
        conv += 2 * kept * batch * (2 * groups * a.head_dim + 2 * d)
        if config.dense_layers[layer]:
            weights += 2 * 3 * config.dense_width // ranks * d + 4
            continue
        weights += 2 * (config.num_experts + config.num_shared_experts) * d + 4 * config.num_experts + 4
        weights += 2 * 3 * config.num_shared_experts * width // ranks * d
        expert = 3 * width // ranks * d
        experts += hit * (expert / 2 + expert / 16 + 12 if sparse else 2 * expert)  # the first sparse layer is not packed
        sparse += 1
    return weights, experts, kv, conv


@pytest.mark.parametrize("name", ["inkling-small", "inkling"])
@pytest.mark.parametrize(("batch", "context"), [(1, 100), (8, 1024), (64, 8192)])
def test_bytes_of_a_decode_step(name: str, batch: int, context: int) -> None:
    got = traffic_of(open_shard(name, "tensor=8", None), batch, context)
    want = decode_bytes(preset(name).text, 8, batch, context)
    assert (got.weight_bytes, got.expert_bytes, got.kv_bytes, got.conv_bytes) == pytest.approx(want, rel=1e-12)
    assert got.bytes == pytest.approx(sum(want))


@pytest.mark.parametrize(("name", "gigabytes"), [("inkling-small", 13.9), ("inkling", 48.9)])
def test_weights_of_a_whole_model_at_batch_one(name: str, gigabytes: float) -> None:
    """The published shapes read 13.9 and 48.9 GB of weights for one token; six experts a layer."""
    got = traffic_of(open_shard(name, "tensor=1", None), 1, 1)
    assert (got.weight_bytes + got.expert_bytes) / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert got.experts == pytest.approx(6)


def test_expert_parallel_ranks_read_their_share() -> None:
    """A rank of expert=8 holds 32 experts, of which one token hits 6/8; its other weights are those of a rank of tensor=8."""
    whole, split = (traffic_of(open_shard("inkling-small", mesh, None), 1, 64) for mesh in ("tensor=8", "expert=8"))
    assert split.experts == pytest.approx(6 / 8)
    assert split.expert_bytes == pytest.approx(whole.expert_bytes, rel=1e-4)  # scale2 is not split over tensor
    assert split.weight_bytes == whole.weight_bytes


def test_a_series_averages_its_contexts() -> None:
    """KV over lengths 510..514: a global layer sees 512 on average, a windowed one at most 512, so less than 512."""
    shard = open_shard("inkling-small", "tensor=8", 6)
    got = step_traffic(shard.leaves, shard.config, shard.sizes, rows=1, queries=1, contexts=range(510, 515))
    windowed = (510 + 511 + 3 * 512) / 5
    assert got.kv_bytes == pytest.approx(2 * 2 * 128 * (5 * windowed + 512))


def test_operations_of_a_prefill() -> None:
    """Two layers of attention and a dense feed-forward each, and the head for the last token, by hand."""
    shard, tokens = open_shard("inkling-small", "tensor=8", 2), 700
    got = step_traffic(shard.leaves, shard.config, shard.sizes, rows=1, queries=tokens, contexts=range(tokens, tokens + 1))
    linear = 4096 * (4 * 128 + 2 * 128 + 4 * 16) + 4096 * 4 * 128 + 3 * 2048 * 4096
    scores = 4 * sum(
        min(position + 1, 512) for position in range(tokens)
    )  # of four heads, each over 128 numbers, and as much for V
    assert got.flops == pytest.approx(2 * (2 * linear * tokens + 2 * 2 * 128 * scores) + 2 * 25128 * 4096)


def test_expected_experts_is_what_drawing_gives() -> None:
    random = np.random.default_rng(0)
    drawn = [
        len({e for _ in range(8) for e in random.permutation(64)[:6] if e < 32})  # 32 of 64 held, 6 chosen by each of 8 tokens
        for _ in range(400)
    ]
    assert expected_experts(32, 64, 6, 8) == pytest.approx(np.mean(drawn), rel=0.02)


# One rank that runs.


@pytest.fixture(scope="module")
def tiny(oracle_dir) -> Shard:
    return open_shard(str(oracle_dir("tiny")), "tensor=2", 4)


@pytest.fixture(scope="module")
def compiled(tiny: Shard) -> tuple[Case, Any, list[jax.Array]]:
    case = Case("decode", batch=3, context=40, queries=1, steps=8, page_size=16)
    return case, compile_cases(tiny, [case])[0], tiny.random_leaves()


def stepper_of(tiny: Shard, compiled: tuple, leaves: list[jax.Array] | None = None) -> Stepper:
    case, program, finite = compiled
    state = tiny.random_state(tiny.cache_shape(case.batch, case.context, case.steps, case.page_size))
    return Stepper(case, program, leaves or finite, state)


def test_rows_own_their_pages_and_end_at_the_context(tiny: Shard, compiled: tuple) -> None:
    """Every row has pages of its own for the whole context, shuffled, and a series of calls ends at the context, finite."""
    stepper = stepper_of(tiny, compiled)
    for table, pages in ((stepper.state.cache.global_table, 3 * 3), (stepper.state.cache.local_table, 3 * 3)):
        entries = np.asarray(table)
        assert sorted(entries[:3].ravel()) == list(range(pages)) != list(entries[:3].ravel())
        assert (entries[3] == pages).all()
    stepper.rewind()
    for _ in range(stepper.case.calls):
        sampled = stepper()
        assert np.asarray(sampled.emitted).all() and np.asarray(sampled.result.finite).all()
    assert np.asarray(stepper.state.length).tolist() == [40, 40, 40, 0]
    assert list(stepper.case.contexts) == list(range(25, 41))
    rewound = stepper.rewind()
    assert np.asarray(rewound).tolist() == [24, 24, 24, 0]
    assert len(set(np.asarray(stepper.state.last_token[:3]).tolist())) == 3


def test_the_cache_is_read(tiny: Shard, compiled: tuple) -> None:
    """NaN among the keys that a row sees reaches that row's logits and no other's: each row reads pages of its own."""
    stepper = stepper_of(tiny, compiled)
    layers = list(stepper.state.cache.layers)
    column = (40 - 16) // 16 % stepper.state.cache.local_table.shape[1]  # position 24 is the oldest that the last step sees
    page = stepper.state.cache.local_table[0, column]
    layers[1] = dataclasses.replace(layers[1], k_pages=layers[1].k_pages.at[page, :, 20 % 16].set(jnp.nan))
    stepper.state = dataclasses.replace(stepper.state, cache=dataclasses.replace(stepper.state.cache, layers=tuple(layers)))
    stepper.rewind()
    finite = np.asarray(stepper().result.finite)
    assert not finite[0, 0] and finite[0, 1:].all()


def test_logits_that_are_not_finite_stop_it(tiny: Shard, compiled: tuple) -> None:
    broken = [
        jnp.full_like(leaf, jnp.nan) if path == "norm.weight" else leaf
        for path, leaf in zip(tiny.leaves, compiled[2], strict=True)
    ]
    with pytest.raises(InklingError, match=r"decode batch=3 context=40 .*not finite"):
        stepper_of(tiny, compiled, broken).check()


def test_random_weights_route_as_expected(tiny: Shard, compiled: tuple) -> None:
    """Distinct experts of four rows that decode, through the real routers: what the byte count expects of them."""
    batch, context = 64, 40
    state = tiny.random_state(tiny.cache_shape(batch, context, 8, 16))
    nothing = np.full((1, 3), np.iinfo(np.int32).max, np.int32)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 250, batch), jnp.int32)
    one = jnp.ones(batch, jnp.int32)
    slots, updates = jnp.arange(batch, dtype=jnp.int32), PageUpdates(nothing, nothing)
    chunk = Chunk(ids, slots, one, one * context, one == 0, one > 0, updates)
    (_, tape), _ = tiny.programs.score(compiled[2], state, chunk, context=context, trace=True)
    for layer in range(2):
        groups = np.asarray(tape[f"moe.{layer}.experts"]).reshape(-1, 4 * 4)
        hit = np.mean([len(np.unique(group)) for group in groups])
        assert hit == pytest.approx(expected_experts(16, 16, 4, 4), rel=0.06)


def test_it_writes_rows(
    oracle_dir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole command on a tiny shape: a row a case, each valid, with the bytes counted by hand; the table names them."""
    monkeypatch.setattr(ceilings, "CPU_TILES", 1 << 9)
    output = tmp_path / "new" / "step.json"
    options = (
        f"step --model {oracle_dir('tiny')} --rank-of tensor=2 --layers 2 --batch 2 --context 32 --prefill 24 --page-size 16"
    )
    with caplog.at_level(logging.INFO, logger="inkling_jax"):
        assert step.run(bench._parser().parse_args([*options.split(), "--output", str(output)])) == 0
    decode, prefill = rows.read_rows(output)
    assert decode["case"] == "nvfp4 tensor=2 layers=2 decode batch=2 context=32 steps=8"
    assert prefill["case"] == "nvfp4 tensor=2 layers=2 prefill batch=1 context=24"
    assert (decode["bench"], decode["phase"], prefill["phase"], decode["kernels"]) == ("step", "decode", "prefill", "reference")
    weights, experts, _, conv = decode_bytes(open_shard(str(oracle_dir("tiny")), "tensor=2", 2).config, 2, 2, 32)
    kv = 2 * 2 * 2 * (4 // 2) * 32 * 2 * 16  # layers, K and V, bytes, heads, width, rows, and the window at lengths 17..32
    assert (decode["weight_bytes"], decode["kv_bytes"], decode["conv_bytes"]) == (weights, kv, conv)
    assert decode["expert_bytes"] == experts == 0 and decode["bytes"] == weights + kv + conv  # both layers are dense
    assert decode["launches"] is None and decode["memory_bytes"] > decode["weight_bytes"]
    assert prefill["flops"] > 0 and prefill["tokens"] == 24
    assert decode["ratio"] == pytest.approx(decode["bytes"] / decode["ceiling_gbs"] / 1e3 / decode["time_us"], rel=0.1)
    shown = capsys.readouterr().out
    assert decode["case"] in shown and prefill["case"] in shown and "XLA reduction" in shown
    assert "2 programs to compile" in caplog.text


# Bad sizes.


def options(**changed: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{"batch": [1], "context": [64], "prefill": [], "steps_per_call": 8, "page_size": 64} | changed)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"context": [15]}, "context 15: a series decodes 16 tokens"),
        ({"context": [1 << 21]}, "context 2097152: the model's is 1048576"),
        ({"page_size": 48}, "--page-size 48: not a power of two"),
    ],
)
def test_impossible_sizes_are_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        list_cases(options(**changed), open_shard("inkling-small", "tensor=8", 3))


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    shard = open_shard("inkling", "tensor=8", None)
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 80 * 10**9})
    shard.check_memory(shard.abstract_state(shard.cache_shape(64, 8192, 8, 64)), device)  # 79 GB
    with pytest.raises(CapacityError, match=r"needs 8\d{10} bytes .* has 80000000000"):
        shard.check_memory(shard.abstract_state(shard.cache_shape(128, 8192, 8, 64)), device)


# Rows and files.


def a_row(**changed: Any) -> rows.Row:
    row = rows.make_row(
        "step", "case a", "decode", jax.devices()[0], kernels="reference", time_us=200.0, bound_us=50.0, **CEILING.fields()
    )
    return row | changed


def test_a_row_says_where_and_when() -> None:
    row = a_row()
    assert (row["ratio"], row["devices"], row["jax"], row["ceiling_gbs"]) == (0.25, 1, jax.__version__, 1.0)
    assert row["device"] == jax.devices()[0].device_kind and len(row["date"]) == 10


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"case": None}, "'case' is None; expected str"),
        ({"devices": 1.5}, "'devices' is 1.5; expected int"),
        ({"devices": True}, "'devices' is True"),
        ({"phase": "train"}, "'phase' is 'train'; expected 'decode' or 'prefill'"),
        ({"time_us": 0.0}, "'time_us' is 0.0"),
        ({"time_us": float("nan")}, "'time_us' is nan"),
        ({"ratio": 0.5}, "'ratio' is 0.5; bound_us / time_us is 0.2500"),
    ],
)
def test_bad_rows_are_named(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=f"here: {told}"):
        rows.check_row(a_row(**changed), "here")


def test_measuring_again_replaces_the_row(tmp_path: Path) -> None:
    """Same bench, case, device and kernels: replaced in its place. Anything else: kept."""
    path = tmp_path / "results" / "step.json"
    rows.save_rows(path, [a_row(), a_row(case="case b")])
    rows.save_rows(path, [a_row(time_us=100.0, ratio=0.5), a_row(kernels="sm90"), a_row(device="other")])
    kept = json.loads(path.read_text())
    assert [(row["case"], row["kernels"], row["time_us"]) for row in kept] == [
        ("case a", "reference", 100.0),
        ("case b", "reference", 200.0),
        ("case a", "sm90", 200.0),
        ("case a", "reference", 200.0),
    ]
    assert len(path.read_text().splitlines()) == len(kept) + 2, "one row a line"
    assert [file.name for file in path.parent.iterdir()] == ["step.json"]


@pytest.mark.parametrize(("text", "told"), [("{", "not a file of result rows"), ("{}", "a JSON list of rows"), ("[1]", "row 0")])
def test_other_files_are_not_overwritten(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "step.json"
    path.write_text(text)
    with pytest.raises(InputError, match=f"step.json.*{told}"):
        rows.save_rows(path, [a_row()])
    assert path.read_text() == text


# Clocks and ceilings.


@pytest.mark.parametrize(("limit_s", "series"), [(100.0, 3), (15.0, 2), (0.0, 1)])
def test_a_series_resets_and_waits(monkeypatch: pytest.MonkeyPatch, limit_s: float, series: int) -> None:
    """Each series begins with a reset outside the clock; none begins when the time is up, but one always does."""
    events: list[str] = []
    clock = iter([100, 106, 200, 209, 300, 330])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    seconds = timing.series_seconds(lambda: events.append("call"), 3, 3, lambda: events.append("reset"), limit_s)
    assert seconds == [2, 3, 10][:series]
    assert events == ["reset", "call", "call", "call"] * series


def test_kernels_of_a_trace_are_counted() -> None:
    """Events of a GPU's streams, but no copies, no host threads, no other lines."""
    text = """
      planes { name: "/device:GPU:0"
        lines { name: "Stream #13(Compute)" events { metadata_id: 1 duration_ps: 3000000 }
                events { metadata_id: 2 duration_ps: 5 } events { metadata_id: 3 duration_ps: 1000000 } }
        lines { name: "Launch Stats" events { metadata_id: 1 duration_ps: 7 } }
        event_metadata { key: 1 value { id: 1 name: "loop_fusion" } } event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } }
        event_metadata { key: 3 value { id: 3 name: "gemm" } } }
      planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 7 } }
        event_metadata { key: 1 value { id: 1 name: "loop_fusion" } } }"""
    kernels = timing._kernels(jax.profiler.ProfileData.from_text_proto(text))
    assert [seconds for _, seconds in kernels] == pytest.approx([3e-6, 1e-6])
    found = timing.Activity.of([*kernels, ("loop_fusion_12", 2e-6)])
    assert found.launches == 3 and list(found.longest) == ["loop_fusion", "gemm"]
    assert found.longest["loop_fusion"] == pytest.approx((2, 5e-6)) and found.seconds == pytest.approx(6e-6)
    assert timing.device_activity(lambda: None, jax.devices()[0]) is None


def test_a_profiler_without_kernels_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A real trace of a CPU that is said to be a GPU: the call runs, nothing is counted, and the log says so."""
    ran: list[int] = []
    assert timing.device_activity(lambda: ran.append(1), types.SimpleNamespace(platform="gpu")) is None
    assert ran == [1] and "recorded no kernels" in caplog.text


def test_the_read_kernel_reads_everything() -> None:
    """In interpret mode, with tiles that do not share out evenly; and it lowers for a GPU that is not here."""
    tiles = np.random.default_rng(0).integers(-(2**31), 2**31, (3 * STAGES + 2, *TILE), np.int32)
    sums = np.asarray(tma_read(jnp.asarray(tiles), 3, interpret=True))
    assert np.array_equal(sums, np.stack([tiles[block::3, 0].sum(0, dtype=np.int32) for block in range(3)]))
    assert int(xla_read(jnp.asarray(tiles))) == tiles.sum(dtype=np.int32)
    large = jax.ShapeDtypeStruct((ceilings.GPU_TILES, *TILE), jnp.int32)
    tma_read.trace(large, 132).lower(lowering_platforms=("cuda",))


def test_a_kernel_that_fails_leaves_the_other_ceiling(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On a device that is said to be a GPU and cannot run the kernel, the row says so."""
    monkeypatch.setattr(ceilings, "GPU_TILES", 1 << 10)
    found = read_ceiling(types.SimpleNamespace(platform="gpu", core_count=4))
    assert found.method.startswith("XLA reduction (the TMA kernel failed")
    assert found.bytes_per_second == found.xla_bytes_per_second > 0
    assert "TMA read kernel failed" in caplog.text


# The command line.


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            "--preset inkling-small --rank-of tensor=3",
            r"^error: layers\.\d\.attn\.\S+ 'kv_heads', 32 query heads on 8 key heads do not divide over 3 devices",
        ),
        ("--preset inkling-small --rank-of heads=8", "mesh 'heads=8'"),
        ("--preset inkling-small --rank-of tensor=8 --layers 99", "--layers 99: inkling-small has 42"),
        ("--preset nonesuch", "nonesuch"),
        ("--preset inkling-small --batch 1,x", "'x' is not a number above zero"),
        ("--batch 1", "one of the arguments --preset --model is required"),
    ],
)
def test_errors_are_one_line(options: str, told: str, tmp_path: Path) -> None:
    done = run_cli("step", *options.split(), "--output", str(tmp_path / "x.json"), cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert re.search(told, done.stderr), done.stderr
    assert not (tmp_path / "x.json").exists()


def test_help_shows_examples(tmp_path: Path) -> None:
    for options in ((), ("step",)):
        done = run_cli(*options, "--help", cwd=tmp_path)
        assert done.returncode == 0 and "--rank-of tensor=8 --batch 1,8,64 --context 1024,8192" in done.stdout


def run_cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[1]
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root), "XDG_CACHE_HOME": str(cwd)}
    command = [sys.executable, "-m", "inkling_jax.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=cwd)
