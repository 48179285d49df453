"""Several processes with one model: who is who, what is refused, what each reads, and the tokens that they make together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_files import micro_checkpoint, plan_of
from jax.sharding import NamedSharding, PartitionSpec
from text_checkpoint import write_text_checkpoint

import inkling_jax
from inkling_jax import InputError, SamplingParams, generate, processes
from inkling_jax.convert.load import bytes_to_read
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.errors import InklingError
from inkling_jax.processes import LOST_S, Place, check_processes, find_place, of_all_processes, only_first_speaks, together
from inkling_jax.sharding.mesh import make_mesh

ROOT = Path(__file__).resolve().parents[1]
EIGHT = {"num_attention_heads": 8, "swa_num_attention_heads": 8, "dense_intermediate_size": 32, "intermediate_size": 32}
EIGHT |= {"n_routed_experts": 4}  # so that tensor=2,expert=4 divides it
TWO_LAYERS = {"num_hidden_layers": 2, "local_layer_ids": [0]}  # dense and local, sparse and global: few seconds to compile
MESH = "tensor=2,expert=4"
SRUN = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}


def start(
    count: int,
    options: Sequence[str],
    launcher: dict[str, str] | None = None,
    devices: int = 4,
    program: Sequence[str] = ("-m", "inkling_jax.generate"),
) -> list[subprocess.Popen[str]]:
    """So many processes with the same options, told of each other by options or by a launcher's variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_COORDINATOR_PORT": str(port),
    }
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = []
    for index in range(count):
        place = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count), "--process-id", str(index)]
        environment = dict(common)
        if launcher is not None:
            place, environment = [], environment | launcher
            environment |= dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), str(index)) if "SLURM_JOB_ID" in launcher else {}
            environment |= dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), str(index))
        command = [sys.executable, *program, *options, *place]
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes))
    return started


def ended(started: Sequence[subprocess.Popen[str]], timeout: float = 300) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of each. None outlives the test."""
    try:
        return [(one.wait(timeout), *one.communicate()) for one in started]
    finally:
        for one in started:
            one.kill()


def test_places_by_options() -> None:
    assert find_place("node1:12355", 4, 2, {}) == Place(2, 4, "node1:12355")
    assert find_place("[::1]:12355", 2, 0, SRUN) == Place(0, 2, "[::1]:12355")  # options go first
    assert find_place(None, None, None, {}) is None
    assert find_place("node1:12355", 1, 0, {}) is None  # nobody to wait for
    for options, told in (
        (("node1:12355", 2, None), "--process-id is missing"),
        ((None, 2, 0), "--coordinator is missing"),
        (("node1:12355", 0, 0), "--num-processes 0: at least one"),
        (("node1:12355", 2, 2), "--process-id 2: of 2 processes the first is 0 and the last 1"),
        (("node1:12355", 2, -1), "--process-id -1"),
        (("node1", 2, 0), "--coordinator 'node1': expected HOST:PORT"),
        (("node1:0", 2, 0), "expected HOST:PORT"),
        (("node1:65536", 2, 0), "expected HOST:PORT"),
    ):
        with pytest.raises(InputError, match=told):
            find_place(*options, {})


def test_places_by_launchers() -> None:
    """Variables as srun and mpirun set them; a shell of an allocation, or a batch script, runs alone whatever the job's size."""
    assert find_place(None, None, None, SRUN | {"SLURM_PROCID": "1"}) == Place(1, 2, None)
    assert find_place(None, None, None, {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "7"}) == Place(7, 8, None)
    for alone in (
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
        SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ):
        assert find_place(None, None, None, alone) is None


def spread(monkeypatch: pytest.MonkeyPatch, *devices: int) -> None:
    """Let jax have so many devices in each of several processes."""
    found = [types.SimpleNamespace(process_index=index) for index, count in enumerate(devices) for _ in range(count)]
    monkeypatch.setattr(jax, "process_count", lambda: len(devices))
    monkeypatch.setattr(jax, "devices", lambda: found)


def test_a_mesh_takes_every_device_of_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    check_processes({"data": 1, "tensor": 2, "expert": 1})  # a lone process may leave some
    spread(monkeypatch, 4, 4)
    check_processes({"data": 1, "tensor": 2, "expert": 4})
    for size in (1, 4, 16):
        with pytest.raises(InputError, match=rf"mesh 'tensor={size}' is for {size} devices, 2 processes have 8.*tensor=8"):
            check_processes({"tensor": size})
    spread(monkeypatch, 4, 2)
    with pytest.raises(InputError, match="the 2 processes have 4, 2 devices"):
        check_processes({"tensor": 6})


def test_others_than_the_first_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for index in (1, 0):
        with pytest.raises(ZeroDivisionError), only_first_speaks(Place(index, 2, None)):
            print(f"{index} to stdout")
            print(f"{index} to stderr", file=sys.stderr)
            _ = 1 / 0
    assert capfd.readouterr() == ("0 to stdout\n", "0 to stderr\n")


def test_a_step_that_fails_between_processes_is_told_on_a_line() -> None:
    class JaxRuntimeError(RuntimeError):
        """As jax's is called."""

    with pytest.raises(InklingError, match="^process 1 of 2: .* another has ended or is late: INTERNAL: closed$"):
        with together(Place(1, 2, None)):
            raise JaxRuntimeError("INTERNAL: closed\nby peer")
    for place, error in ((None, JaxRuntimeError("a")), (Place(1, 2, None), JaxRuntimeError("RESOURCE_EXHAUSTED: b"))):
        with pytest.raises(JaxRuntimeError), together(place):  # memory has a message of its own
            raise error


@pytest.mark.parametrize("options", [["--chat"], ["--input", "-", "--output", "b"], []])
def test_what_processes_cannot_do_alike_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before they wait for each other."""
    place = ["--coordinator", "localhost:1", "--num-processes", "2", "--process-id", "1"]
    assert generate.main(["--model", "nowhere/at all", *options, *place]) == 2
    assert "process" in capsys.readouterr().err


def test_a_lone_process_has_its_own_numbers() -> None:
    assert of_all_processes([1 << 40, -3]) == [[1 << 40, -3]]


def test_a_progress_bar_ends_at_what_the_process_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """embed is [72, 48] of two bytes over four devices, of which two are here; w2 of layer 1 [48, 28], whole on each."""
    micro_checkpoint(tmp_path, nvfp4=True)
    plan, mesh = plan_of(tmp_path), make_mesh({"tensor": 4})
    kept = {path: plan.parameters[path] for path in ("embed", "layers.1.mlp.w2")}
    plan = WeightPlan(plan.checkpoint, kept, plan.packed, plan.towers, (), ())
    device = {"embed": NamedSharding(mesh, PartitionSpec("tensor")), "layers.1.mlp.w2": NamedSharding(mesh, PartitionSpec())}
    assert bytes_to_read(plan, device) == 72 * 48 * 2 + 48 * 28 * 2
    every, here = NamedSharding.addressable_devices_indices_map, set(mesh.devices.flat[1:3])
    monkeypatch.setattr(
        NamedSharding,
        "addressable_devices_indices_map",
        lambda self, shape: {device: index for device, index in every(self, shape).items() if device in here},
    )
    assert bytes_to_read(plan, device) == 72 * 48 * 2 // 2 + 48 * 28 * 2


def test_two_processes_make_the_tokens_of_one(tmp_path: Path) -> None:
    """Four devices each, against one process of eight. The first prints its object and nothing else, the second nothing."""
    model = write_text_checkpoint(tmp_path / "model", **EIGHT, **TWO_LAYERS)
    options = ["--model", str(model), "--dtype", "float32", "--max-context", "64", "--json", "--ids", "1,2,3,4,5"]
    options += ["--seed", "3", "--max-tokens", "12", "--mesh", MESH, "--quiet"]
    first, second = ended(start(2, options))
    assert (first[0], second[0]) == (0, 0), (first[2], second[2])
    assert second[1] == "" and [line for line in second[2].splitlines() if not line.startswith("[Gloo]")] == []
    with inkling_jax.load(model, dtype="float32", max_context=64, mesh=MESH, slots=1, tokens_per_call=1, quiet=True) as llm:
        alone = llm.generate([[1, 2, 3, 4, 5]], SamplingParams(seed=3, max_tokens=12))[0]
    assert json.loads(first[1])["token_ids"] == list(alone.token_ids)
    assert len(set(alone.token_ids)) > 6


JOINING = """
import jax
from inkling_jax.processes import find_place, first_on_host, join, of_all_processes
join(find_place(None, None, None))
print(jax.process_count(), jax.device_count(), of_all_processes([7 * jax.process_index(), -1 << 40]), first_on_host())
"""
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_VERSION": "4.1.6", "OMPI_MCA_orte_hnp_uri": "77.0;tcp://127.0.0.1:1"}


@pytest.mark.parametrize("launcher", [SRUN, MPIRUN], ids=["srun", "mpirun"])
def test_launchers_say_which_process_is_which(launcher: dict[str, str]) -> None:
    """With the variables that they set: two processes of two devices, on one host."""
    first, second = ended(start(2, [], launcher, devices=2, program=["-c", JOINING]), 120)
    assert (first[0], second[0]) == (0, 0), (first[2], second[2])
    both = f"2 4 [[0, {-1 << 40}], [7, {-1 << 40}]]"
    assert (first[1], second[1]) == (f"{both} True\n", f"{both} False\n")


@pytest.mark.slow
def test_launched_by_srun_without_a_seed(tmp_path: Path) -> None:
    """A picture, and noise that all draw alike: had they not, they would have chosen different tokens and parted."""
    from PIL import Image

    model = write_text_checkpoint(tmp_path / "model", **EIGHT)
    pixels = np.random.default_rng(0).integers(0, 255, (40, 80, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    options = ["--model", str(model), "--dtype", "float32", "--max-context", "128", "--image", str(tmp_path / "a.png")]
    options += ["--prompt", "Hello", "--max-tokens", "24", "--mesh", MESH, "--ignore-eos"]
    first, second = ended(start(2, options, launcher=SRUN))
    assert (first[0], second[0]) == (0, 0), (first[2], second[2])
    assert first[1] and "24 tokens made" in first[2] and f"loading weights on {socket.gethostname()}" in first[2]
    assert second[1] == "" and [line for line in second[2].splitlines() if not line.startswith("[Gloo]")] == []


@pytest.mark.slow
def test_a_batch_of_two_processes_is_that_of_one(tmp_path: Path) -> None:
    """Of a file with a record, a repeated id and a bad line; a replica on each process, so that each has requests of its own."""
    model = write_text_checkpoint(tmp_path / "model", **EIGHT, **TWO_LAYERS)
    lines = [json.dumps({"id": str(n), "prompt": [n + 1, 2, 3], "max_tokens": 3 + 5 * (n % 3)}) for n in range(9)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, lines[0], '{"id": "bad", "prompt": [999]}']))
    found = []
    for count, mesh in ((1, "tensor=4"), (2, "data=2,tensor=2,expert=2")):
        output = tmp_path / f"{count}.jsonl"
        if found:  # the second process must not take this line for one without a record
            output.write_text(found[0][0] + "\n")
        options = ["--model", str(model), "--dtype", "float32", "--max-context", "64", "--mesh", mesh, "--slots", "2", "--quiet"]
        codes = ended(start(count, [*options, "--input", str(tmp_path / "in.jsonl"), "--output", str(output)]))
        assert [code for code, *_ in codes] == [0] * count, codes
        found.append(output.read_text().splitlines())
    assert len(found[0]) == 11 and sorted(found[0]) == sorted(found[1])


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_ends_all(tmp_path: Path) -> None:
    model = write_text_checkpoint(tmp_path / "model", **EIGHT, **TWO_LAYERS)
    found = ended(start(2, ["--model", str(model), "--ids", "1", "--mesh", "tensor=4"]), 120)
    for code, output, errors in found:
        assert code == 2 and output == ""
        assert "error: mesh 'tensor=4' is for 4 devices, 2 processes have 8: give a mesh that takes them all" in errors
        assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_other(tmp_path: Path, victim: int) -> None:
    """Killed while they load and compile: jax ends the other within the time that it waits for a sign of life."""
    model = write_text_checkpoint(tmp_path / "model", **EIGHT, **TWO_LAYERS)
    options = ["--model", str(model), "--ids", "1", "--mesh", MESH, "--max-tokens", "400", "--ignore-eos"]
    started = start(2, options)
    assert started[0].stderr is not None
    for line in started[0].stderr:
        if "sequence" in line:  # of the line that says what is loaded
            break
    started[victim].send_signal(signal.SIGKILL)
    begun = time.monotonic()
    code, _, errors = ended(started, 2 * LOST_S + 30)[1 - victim]
    assert time.monotonic() - begun < 2 * LOST_S
    assert code == -signal.SIGABRT and "another task died" in errors


def test_a_failed_process_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert processes.leave(2) == 2 and left == []  # alone
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert processes.leave(0) == 0 and left == []
    processes.leave(2)
    assert left == [2]
