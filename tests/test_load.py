"""Weights onto a device: bit-exact or cast there, one parameter at a time in bounded memory, with progress in bytes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import Tensors, micro_checkpoint, plan_of

from inkling_jax.convert.load import load_parameters, stream_parameters
from inkling_jax.convert.progress import Progress

CPU = jax.devices("cpu")[0]
BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
MODEL_DTYPE = {"embed", "layers.0.attn.qkvr_proj", "layers.2.mlp.experts.w13", "layers.2.mlp.router.weight"}
FIXED = {"layers.3.mlp.experts.w13.values", "layers.3.mlp.experts.w2.scale", "layers.2.mlp.router.bias"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_arrive_bit_for_bit_in_the_dtype_asked_for(tmp_path: Path, dtype: str) -> None:
    micro_checkpoint(tmp_path, nvfp4=True)
    plan = plan_of(tmp_path)
    device = jax.devices("cpu")[-1]
    parameters = load_parameters(plan, dtype=dtype, device=device)
    assert parameters.keys() == plan.parameters.keys()
    assert all(parameters[path].dtype == dtype for path in MODEL_DTYPE)
    assert not any(parameters[path].dtype == "bfloat16" for path in FIXED)
    for path, array in parameters.items():
        stored = plan.assemble(path)
        wanted = plan.abstract(dtype)[path]
        assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
        assert np.asarray(array).tobytes() == stored.astype(wanted.dtype).tobytes(), path
        assert array.devices() == {device}


def test_a_float32_checkpoint_is_rounded_on_the_device(tmp_path: Path) -> None:
    def widen(tensors: Tensors) -> None:
        noise = np.random.default_rng(0)
        for name, array in tensors.items():
            tensors[name] = array.astype(F32) * (1 + noise.normal(size=array.shape) * 1e-3).astype(F32)

    micro_checkpoint(tmp_path, False, widen)
    plan = plan_of(tmp_path)
    assert plan.assemble("embed").dtype == F32
    parameters = load_parameters(plan, dtype="bfloat16", device=CPU)
    assert np.asarray(parameters["embed"]).tobytes() == plan.assemble("embed").astype(BF16).tobytes()
    assert parameters["layers.2.mlp.router.bias"].dtype == F32


def test_each_parameter_may_have_a_sharding_of_its_own(tmp_path: Path) -> None:
    micro_checkpoint(tmp_path, nvfp4=True)
    plan = plan_of(tmp_path)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",))
    specs = {path: jax.sharding.PartitionSpec() for path in plan.parameters}
    specs["embed"] = jax.sharding.PartitionSpec("tensor")
    shardings = {path: jax.sharding.NamedSharding(mesh, spec) for path, spec in specs.items()}
    parameters = load_parameters(plan, dtype="float32", device=shardings)
    assert all(parameters[path].sharding == sharding for path, sharding in shardings.items())
    assert [shard.data.shape for shard in parameters["embed"].addressable_shards] == [(36, 48)] * 2
    assert np.array_equal(parameters["embed"], plan.assemble("embed").astype(F32))


def test_no_array_outlives_its_turn_but_the_parameters(tmp_path: Path) -> None:
    micro_checkpoint(tmp_path, nvfp4=True)
    before = {id(array) for array in jax.live_arrays()}
    count = 0
    for _, array in stream_parameters(plan_of(tmp_path), dtype="float32", device=CPU):
        alive = [found for found in jax.live_arrays() if id(found) not in before]
        assert len(alive) == 1 and alive[0] is array, "what is yielded is all there is"
        del alive, array, _
        count += 1
    assert count == len(plan_of(tmp_path).parameters)


MEMORY = """
import dataclasses, json, pathlib, sys
import jax
from checkpoint_files import micro_config, plan_of
from inkling_jax.convert.load import load_parameters
from inkling_jax.convert.write import write_checkpoint

def status(field):
    return int(pathlib.Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

def peak(work):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = status("VmRSS")
    result = work()
    return result, status("VmHWM") - before

directory, fmt, dtype, width = sys.argv[1:]
if dtype == "write":
    width = int(width)
    size = {"hidden_size": width, "intermediate_size": width, "dense_intermediate_size": 2 * width, "vocab_size": 8192}
    config = micro_config(**size, unpadded_vocab_size=8192, n_routed_experts=24 if fmt == "nvfp4" else 12)
    config = dataclasses.replace(config, mtp=None, audio=None, vision=None)
    total, host = peak(lambda: write_checkpoint(directory, config, nvfp4=fmt == "nvfp4"))
    print(json.dumps({"total": total, "host": host}))
else:
    device = jax.devices()[0]
    jax.block_until_ready(jax.lax.convert_element_type(jax.device_put(jax.numpy.ones(4, "bfloat16"), device), "float32"))
    plan = plan_of(pathlib.Path(directory))
    largest = max(info.nbytes for info in plan.checkpoint.tensors.values())
    parameters, host = peak(lambda: load_parameters(plan, dtype=dtype, device=device))
    held = sum(array.nbytes for array in parameters.values())
    if device.platform == "cpu":
        host -= held
    stats = device.memory_stats() or {"peak_bytes_in_use": 0, "bytes_in_use": 0}
    on_device = stats["peak_bytes_in_use"] - stats["bytes_in_use"]  # the allocator rounds: a little more than `held` is in use
    print(json.dumps({"largest": largest, "held": held, "host": host, "device": on_device}))
"""


def measure(directory: Path, fmt: str, work: str, platform: str, width: int = 1024) -> dict[str, int]:
    """Bytes that writing (a model so wide), or loading as a dtype, holds at its peak beyond what it returns."""
    imports = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    environment = {**os.environ, "JAX_PLATFORMS": platform, "XLA_FLAGS": "", "PYTHONPATH": imports}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the process that runs the tests has most of a GPU already
    command = [sys.executable, "-c", MEMORY, str(directory), fmt, work, str(width)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize(("fmt", "dtype"), [("bf16", "float32"), ("nvfp4", "bfloat16")])
def test_memory_peaks_below_three_times_the_largest_tensor(tmp_path: Path, fmt: str, dtype: str) -> None:
    written = measure(tmp_path / "large", fmt, "write", "cpu")
    assert written["total"] > 300e6 and written["host"] < 80e6, written
    loaded = measure(tmp_path / "large", fmt, dtype, "cpu")
    assert loaded["held"] > 300e6 and loaded["host"] <= 3 * loaded["largest"], loaded


@pytest.mark.gpu(bytes=2 * 10**9)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_a_gpu_peaks_one_tensor_above_the_weights(tmp_path: Path, dtype: str) -> None:
    # tensors of 200 MB: pinned buffers for transfers and the driver's own memory are of fixed size, and no part of the bound
    measure(tmp_path / "large", "bf16", "write", "cpu", width=2048)
    loaded = measure(tmp_path / "large", "bf16", dtype, "cuda")
    assert loaded["host"] <= 3 * loaded["largest"], loaded
    assert 0 <= loaded["device"] <= loaded["largest"], loaded


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_come_at_once_then_every_few_seconds_then_with_the_total() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(4_000_000_000, label="reading", stream=stream, clock=clock) as progress:
        assert stream.getvalue() == "reading: 4.00 GB to go\n"
        for _ in range(40):
            clock.now += 0.5
            progress.advance(100_000_000)
    lines = stream.getvalue().splitlines()
    assert lines[1] == "reading: 25%, 1.00 GB of 4.00 GB, 0.20 GB/s"
    assert lines[-1] == "reading: 4.00 GB in 20.0 s, 0.20 GB/s"
    assert len(lines) == 1 + 4 + 1


def test_a_failed_read_claims_no_total() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyError), Progress(100, label="reading", stream=stream) as progress:
        progress.advance(50)
        raise KeyError
    assert stream.getvalue() == "reading: 0.0 MB to go\n"


def test_a_terminal_gets_a_bar_with_bytes_and_rate() -> None:
    stream = Terminal()
    with Progress(2_000_000, label="reading", stream=stream) as progress:
        progress.advance(1_000_000)
        progress.advance(1_000_000)
    shown = stream.getvalue()
    assert "reading" in shown and "2.0/2.0 MB" in shown and "/s" in shown and "to go" not in shown


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_quiet_says_nothing(stream: io.StringIO) -> None:
    with Progress(10, label="reading", quiet=True, stream=stream) as progress:
        progress.advance(10)
    assert stream.getvalue() == "" and progress.done == 10


def test_progress_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, label="reading"):
        pass
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("reading: ")


def test_a_load_reports_the_bytes_it_reads(oracle_dir: Callable[..., Path]) -> None:
    plan = plan_of(oracle_dir("wide"))
    with Progress(plan.total_bytes, label="reading", quiet=True) as progress:
        load_parameters(plan, dtype="bfloat16", device=CPU, progress=progress)
    assert progress.done == plan.total_bytes
