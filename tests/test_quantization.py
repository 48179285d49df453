"""A checkpoint in BF16 as one in NVFP4: what changes, what does not, what interrupts it; and calibration."""

from __future__ import annotations

import json
import logging
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import load, micro_checkpoint, micro_config
from modules import filled, on_one_device
from safetensors.numpy import load_file
from text_checkpoint import write_text_checkpoint

import inkling_jax
from inkling_jax.config import ModelConfig
from inkling_jax.convert import nvfp4, quantization
from inkling_jax.convert.__main__ import main
from inkling_jax.convert.destination import JOURNAL
from inkling_jax.convert.quantization import Quantization, write_quantized
from inkling_jax.convert.quantize import quantize
from inkling_jax.errors import CapacityError, CheckpointError, InklingError, InputError
from inkling_jax.layers.experts import SparseMLP
from inkling_jax.model import flat_parameters


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sparse layers 2, 3 and 4 in BF16; a draft head in a file of its own; a tokenizer's file."""
    directory = tmp_path_factory.mktemp("source") / "published"
    micro_checkpoint(directory, nvfp4=False)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def quantised(source: Path) -> Path:
    directory = source.with_name("quantised")
    write_quantized(Quantization.of(source, directory), quiet=True)
    return directory


def files_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_only_later_experts_change(source: Path, quantised: Path) -> None:
    """All other tensors and files are the same bytes, in the same files; the index and what it sums up fit."""
    before, after = load(source), load(quantised)
    stacks = {f"model.llm.layers.{i}.mlp.experts.{m}_weight" for i in (3, 4) for m in ("w13", "w2")}
    parts = ("", ".scale", ".scale2", ".original_shape")
    assert after.keys() == (before.keys() - stacks) | {name + part for name in stacks for part in parts}
    for name in before.keys() - stacks:
        assert before[name].dtype == after[name].dtype and before[name].tobytes() == after[name].tobytes()
    ours, theirs = files_of(quantised), files_of(source)
    assert ours.keys() == theirs.keys() | {"hf_quant_config.json"}
    assert all(ours[name] == theirs[name] for name in ("config.json", "tokenizer.json", "mtp.safetensors"))
    index, old = (json.loads(found["model.safetensors.index.json"]) for found in (ours, theirs))
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in after.values())
    assert index["weight_map"].keys() == after.keys()
    assert all(index["weight_map"][name] == old["weight_map"][name] for name in before)
    assert all(index["weight_map"][name + part] == old["weight_map"][name] for name in stacks for part in parts)
    assert ModelConfig.from_directory(quantised).quant_algo == "NVFP4"
    exclude = json.loads(ours["hf_quant_config.json"])["quantization"]["exclude_modules"]
    assert [name for name in exclude if name.endswith("mlp.experts")] == ["model.llm.layers.2.mlp.experts"]


def test_stacks_are_what_each_expert_quantised_is(source: Path, quantised: Path) -> None:
    """In the published dtypes and shapes (spec 7.4), and near enough to what they stand for."""
    before, after = load(source), load(quantised)
    for name in (f"model.llm.layers.{i}.mlp.experts.{m}_weight" for i in (3, 4) for m in ("w13", "w2")):
        experts, rows, columns = before[name].shape
        assert (after[name].dtype, after[name].shape) == (np.uint8, (experts, rows, columns // 2))
        assert after[name + ".scale"].dtype == ml_dtypes.float8_e4m3fn
        assert after[name + ".scale"].shape == (experts, rows, columns // 16)
        assert after[name + ".scale2"].dtype == np.float32 and after[name + ".scale2"].shape == (experts,)
        assert after[name + ".original_shape"].tolist() == [experts, rows, columns]
        for expert in range(experts):
            found = quantize(before[name][expert])
            assert np.array_equal(found.values, after[name][expert]) and found.scale2 == after[name + ".scale2"][expert]
            assert found.scale.tobytes() == after[name + ".scale"][expert].tobytes()
        numbers = nvfp4.dequantize(*(after[name + part] for part in ("", ".scale", ".scale2")))
        left = np.linalg.norm(numbers - before[name].astype(np.float32)) / np.linalg.norm(before[name].astype(np.float32))
        assert 0.07 < left < 0.09


@pytest.mark.slow
def test_reference_model(oracle_set: Callable[..., Path], tmp_path: Path) -> None:
    """Its weights are nearer than in the packed form that came with it; its logits, where tokens change experts, about as far."""
    found = oracle_set("tiny", "bf16")
    write_quantized(Quantization.of(found / "bf16", tmp_path / "ours"), quiet=True)
    packed = oracle_set("tiny", "nvfp4")
    answers, shipped = (load_file(place / f"expected-{fmt}.safetensors") for place, fmt in ((found, "bf16"), (packed, "nvfp4")))
    name = "model.llm.layers.4.mlp.experts.w13_weight"
    weight = load(found / "bf16")[name].astype(np.float32)
    errors = []
    for tensors in (load(tmp_path / "ours"), load(packed / "nvfp4")):
        numbers = nvfp4.dequantize(*(tensors[name + part] for part in ("", ".scale", ".scale2")))
        errors.append(np.linalg.norm(numbers - weight) / np.linalg.norm(weight))
    assert errors[0] < 0.083 < errors[1] < 0.1
    with inkling_jax.load(tmp_path / "ours", dtype="float32", max_context=64, slots=1, quiet=True) as llm:
        logits = llm.score(answers["len33.ids"].tolist())
    wanted = answers["len33.logits"]
    moved, theirs_moved = (np.linalg.norm(a - wanted) / np.linalg.norm(wanted) for a in (logits, shipped["len33.logits"]))
    assert 0.1 < moved < 1.2 * theirs_moved < 0.3


# What interrupts it, and what it refuses


def stop_after(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the quantiser stop as if interrupted after so many experts."""
    done = 0

    def counted(weight: np.ndarray) -> Any:
        nonlocal done
        if done == calls:
            raise KeyboardInterrupt
        done += 1
        return quantize(weight)

    monkeypatch.setattr(quantization, "quantize", counted)


@pytest.mark.parametrize("calls", [0, 4, 11])
def test_an_interrupted_run_goes_on(
    source: Path, quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Files that are done are left alone, and what comes out is what an undisturbed run writes."""
    ours = Quantization.of(source, tmp_path / "model")
    stop_after(calls, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        write_quantized(ours, quiet=True)
    assert not (tmp_path / "model").exists()
    with pytest.raises(CheckpointError, match=r"model.partial: a conversion that is not finished"):
        shutil.copy(source / "config.json", ours.place.partial)
        inkling_jax.load(ours.place.partial, quiet=True)
    entries = [json.loads(line) for line in (ours.place.partial / JOURNAL).read_text().splitlines()]
    whole = {entry["file"]: (ours.place.partial / entry["file"]).stat().st_mtime_ns for entry in entries if "file" in entry}
    assert len(whole) < 4 and (calls < 11 or whole)
    monkeypatch.undo()
    write_quantized(ours, quiet=True)
    assert files_of(tmp_path / "model") == files_of(quantised)
    assert all((tmp_path / "model" / name).stat().st_mtime_ns == when for name, when in whole.items())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_kill_between_the_rename_and_the_end(source: Path, quantised: Path, tmp_path: Path) -> None:
    shutil.copytree(quantised, tmp_path / "model")
    (tmp_path / "model" / JOURNAL).write_text("")
    write_quantized(Quantization.of(source, tmp_path / "model"), quiet=True)
    assert files_of(tmp_path / "model") == files_of(quantised)


def test_places_that_are_refused(source: Path, quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="quantised: is not empty"):
        write_quantized(Quantization.of(source, quantised), quiet=True)
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="a.partial: is no conversion under way"):
        write_quantized(Quantization.of(source, tmp_path / "a"), quiet=True)
    stop_after(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        write_quantized(Quantization.of(source, tmp_path / "b"), quiet=True)
    with pytest.raises(CheckpointError, match="b.partial: begun from other files, or with other options"):
        write_quantized(Quantization.of(source, tmp_path / "b", calibrated=True), dict, quiet=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # pyright: ignore
    with pytest.raises(CapacityError, match=r"c: \d+\.\d MB are to be written, the disk has 0.0 MB free"):
        write_quantized(Quantization.of(source, tmp_path / "c"), quiet=True)


def test_sources_that_are_refused(source: Path, quantised: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has experts in NVFP4 already"):
        Quantization.of(quantised, tmp_path / "out")
    (shutil.copytree(source, tmp_path / "converted") / "conversion.json").write_text("{}")
    with pytest.raises(CheckpointError, match="give the published one"):
        Quantization.of(tmp_path / "converted", tmp_path / "out")
    micro_checkpoint(tmp_path / "dense", nvfp4=False, dense_mlp_idx=4)
    with pytest.raises(InputError, match="no experts to quantise"):
        Quantization.of(tmp_path / "dense", tmp_path / "out")
    micro_checkpoint(tmp_path / "odd", nvfp4=False, intermediate_size=24)
    with pytest.raises(InklingError, match="the width of an expert is 24, expected a multiple of 16"):
        Quantization.of(tmp_path / "odd", tmp_path / "out")

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        name = "model.llm.layers.4.mlp.experts.w2_weight"
        tensors[name] = np.where(np.arange(3)[:, None, None] == 1, np.nan, tensors[name]).astype(ml_dtypes.bfloat16)

    micro_checkpoint(tmp_path / "nan", nvfp4=False, edit=spoil)
    with pytest.raises(CheckpointError, match=r"model.safetensors: .*layers.4.mlp.experts.w2_weight: expert 1: .* not finite"):
        write_quantized(Quantization.of(tmp_path / "nan", tmp_path / "out"), quiet=True)


# The command line, and calibration


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Signals and log handlers as they were."""
    package = logging.getLogger("inkling_jax")
    before, handlers, level = signal.getsignal(signal.SIGTERM), package.handlers[:], package.level
    yield
    signal.signal(signal.SIGTERM, before)
    package.handlers[:] = handlers
    package.setLevel(level)


def test_command(source: Path, quantised: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    destination = tmp_path / "model"
    assert main([str(source), str(destination), "--quantize", "nvfp4", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("4 expert stacks, such as 3 x 32 x 48, to NVFP4: 0.0 MB become 0.0 MB; ")
    assert "copied: config.json, tokenizer.json\n" in said and not any(tmp_path.iterdir())
    assert main([str(source), str(destination), "--quantize", "nvfp4", "--verbose"]) == 0
    assert "layers.4.mlp.experts.w2_weight: relative error 0.0" in capsys.readouterr().err
    assert files_of(destination) == files_of(quantised)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--quantize", "nvfp4", "--verify"], "--verify compares bits"),
        (["--quantize", "nvfp4", "--mesh", "tensor=2"], "--mesh with --quantize is where --calibrate runs"),
        (["--calibrate", "prompts.jsonl"], "--calibrate measures inputs for --quantize nvfp4"),
        (["--quantize", "nvfp4", "--calibrate", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
    ],
)
def test_commands_that_are_refused(
    source: Path, tmp_path: Path, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(source), str(tmp_path / "model"), *options]) == 2
    said = capsys.readouterr().err
    assert told in said and said.startswith("error: ") and said.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_largest_inputs_of_experts() -> None:
    """Of each token: of what goes into the layer, and of what the experts it chose make of it; others do not count."""
    config = micro_config().text
    rng = np.random.default_rng(0)
    layer = SparseMLP(config, frozenset(), jnp.float32)
    layer.measure_inputs = True
    shapes = {path.replace(".", "_"): leaf.get_value().shape for path, leaf in flat_parameters(layer).items()}
    values = {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    values["router_bias"][2], values["experts_w13"][2] = -10, 10 * values["experts_w13"][2]  # the largest, never chosen
    module = filled(layer, **values)
    x = rng.normal(size=(9, config.hidden_size)).astype(np.float32)

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        tape: dict[str, jax.Array] = {}
        module(x, jnp.ones(9, bool), tape)
        return tape["amax"], tape["experts"]

    amax, experts = on_one_device(run)(x)
    gate, up = np.moveaxis(np.einsum("td,egfd->tegf", x.astype(np.float64), values["experts_w13"]), 2, 0)
    hidden = np.abs(gate / (1 + np.exp(-gate)) * up).max(-1)
    np.testing.assert_allclose(amax[:, 0], np.abs(x).max(1), rtol=1e-6)
    np.testing.assert_allclose(amax[:, 1], np.take_along_axis(hidden, np.asarray(experts), 1).max(1), rtol=1e-4)
    assert (np.asarray(amax)[:, 1] < hidden.max(1) * 0.5).all() and (np.asarray(experts) < 2).all()


@pytest.mark.slow
def test_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The largest of all tokens of all prompts, in its published place; 4-bit activations load with it alone."""
    source = write_text_checkpoint(tmp_path / "source", nvfp4=False)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 2, 3, 4, 5]}\n{"messages": [{"role": "user", "content": "hello"}]}\n')
    arguments = [str(source), str(tmp_path / "model"), "--quantize", "nvfp4", "--quiet"]
    assert main([*arguments, "--calibrate", str(prompts)]) == 0, capsys.readouterr().err
    with inkling_jax.load(source, activations="measured", slots=1, max_context=64, quiet=True) as llm:
        assert llm.config.text.dense_layers == (True, False, False)
        chat = llm.chat_prompt([{"role": "user", "content": "hello"}])
        tapes = [llm.trace(prompt)["moe.1.amax"] for prompt in ([1, 2, 3, 4, 5], chat)]
    largest = np.concatenate(tapes).max(0)
    tensors = load(tmp_path / "model")
    for matrix, value in zip(("w13", "w2"), largest, strict=True):
        found = tensors[f"model.llm.layers.2.mlp.experts.{matrix}_weight.input_amax"]
        assert found.dtype == ml_dtypes.bfloat16 and found.tolist() == [float(value.astype(ml_dtypes.bfloat16))]
    with inkling_jax.load(tmp_path / "model", activations="nvfp4", slots=1, max_context=64, quiet=True) as llm:
        assert np.isfinite(llm.score([1, 2, 3])).all()
    with pytest.raises(InputError, match="whose inputs are known"):
        inkling_jax.load(tmp_path / "model", activations="measured", quiet=True)
    arguments[1] = str(tmp_path / "bare")
    assert main(arguments) == 0
    with pytest.raises(CheckpointError, match=r"missing 2 tensors: .*w13_weight.input_amax"):
        inkling_jax.load(tmp_path / "bare", activations="nvfp4", quiet=True)
    prompts.write_text('{"prompt": [1]}\n{"prompt": 3, "messages": []}\n')
    assert main([*arguments[:1], str(tmp_path / "third"), *arguments[2:], "--calibrate", str(prompts)]) == 2
    assert "prompts.jsonl: line 2: a line has either prompt or messages" in capsys.readouterr().err
