"""Simulated 4-bit inputs of packed experts (spec 7.4), against numpy's and ml_dtypes' own rounding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import micro_config

import inkling_jax
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.write import write_checkpoint
from inkling_jax.errors import CheckpointError, InputError
from inkling_jax.kernels.expert_matmul import Calibrated, Nvfp4, expert_matmul
from inkling_jax.kernels.expert_matmul.nvfp4 import quantize_activations

E, D, F, T, A = 5, 64, 48, 24, 3
OPTIONS = {"dtype": "float32", "max_context": 64, "quiet": True}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def rounded(x: np.ndarray, amax: float) -> np.ndarray:
    """What 4-bit inputs stand for: q * s * unit; unit = amax / 2688, s = e4m3(block max / 6 / unit), q = e2m1(x / (s * unit)).

    A code is the nearest of a table. In float64.
    """
    unit = amax / 2688
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, 16)
    scale = np.minimum(np.abs(blocks).max(-1, keepdims=True) / 6 / unit, 448)
    scale = scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    ratio = np.divide(np.abs(blocks), scale * unit, out=np.zeros_like(blocks), where=scale > 0)
    code = np.abs(ratio[..., None] - E2M1).argmin(-1)
    return (np.sign(blocks) * E2M1[code] * scale * unit).reshape(x.shape)


@pytest.mark.parametrize("amax", [0.5, 3.0, 4.375, 400.0, 3e4, 1e7])
def test_values(amax: float) -> None:
    """From a calibration that most blocks exceed to one that leaves them subnormal scales, or none; exact in bfloat16 too."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((40, 96)) * 10 ** rng.uniform(-3, 1, (40, 1))).astype(np.float32)
    x[3], x[4, :16] = 0, 0
    q, unit = jax.jit(quantize_activations)(x, np.full(40, amax, np.float32))
    np.testing.assert_allclose(np.asarray(q) * np.asarray(unit)[:, None], rounded(x, amax), rtol=3e-7)
    assert np.array_equal(q, q.astype(jnp.bfloat16))


@pytest.mark.parametrize(("amax", "unit"), [(2688.0, 1.0), (4.375, 0.0016276042), (2960.0, 1.1011905)])
def test_input_scale(amax: float, unit: float) -> None:
    assert np.isclose(quantize_activations(jnp.ones((1, 16)), jnp.array([amax]))[1], unit, rtol=1e-7)


def test_ties_and_the_largest() -> None:
    """Every midpoint goes to the even code; a value that is not a number stays seen."""
    x = np.array([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0], np.float32)
    q, _ = quantize_activations(jnp.asarray(x[None]), jnp.array([2688.0]))  # block scale 1, unit 1
    assert q[0].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 0]
    assert np.isnan(quantize_activations(jnp.where(x == 6, np.nan, x)[None], jnp.array([2688.0]))[0]).any()


def stack(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Nvfp4, np.ndarray]:
    """A packed weight and its numbers."""
    *lead, rows, columns = shape
    codes = rng.integers(0, 16, shape, np.uint8)
    scale = rng.uniform(0.1, 2, (*lead, rows, columns // 16)).astype(ml_dtypes.float8_e4m3fn)
    scale2 = rng.uniform(0.02, 0.06, lead).astype(np.float32)
    numbers = (
        np.where(codes >= 8, -1, 1) * E2M1[codes & 7] * np.repeat(scale.astype(np.float32), 16, -1) * scale2[..., None, None]
    )
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return Nvfp4(*map(jnp.asarray, (packed, scale, scale2))), numbers


@pytest.mark.parametrize("quantized", ["w13", "w2", "w13 w2"])
def test_product(quantized: str) -> None:
    """Token by token in numpy; the calibration is 100 times the largest value, where a scale without 1/2688 shows."""
    rng = np.random.default_rng(1)
    (w13, n13), (w2, n2) = stack((E, 2, F, D), rng), stack((E, D, F), rng)
    x = rng.standard_normal((T, D)).astype(np.float32)
    experts = np.stack([rng.permutation(E)[:A] for _ in range(T)]).astype(np.int32)
    gates = rng.uniform(0.5, 1.5, (T, A)).astype(np.float32)
    amax13, amax2 = 100 * float(np.abs(x).max()), 100 * 40.0

    def loops(amax13: float | None, amax2: float | None) -> np.ndarray:
        out = np.zeros((T, D))
        for t in range(T):
            for e, gate in zip(experts[t], gates[t], strict=True):
                a, b = n13[e] @ (x[t] if amax13 is None else rounded(x[t], amax13))
                hidden = (a / (1 + np.exp(-a)) * b).astype(np.float32)
                assert np.abs(hidden).max() < 40
                out[t] += gate * (n2[e] @ (hidden if amax2 is None else rounded(hidden, amax2)))
        return out

    def found(factor: float) -> np.ndarray:
        first = Calibrated(w13, jnp.full(E, amax13 * factor)) if "w13" in quantized else w13
        second = Calibrated(w2, jnp.full(E, amax2 * factor)) if "w2" in quantized else w2
        return np.asarray(jax.jit(expert_matmul)(x, experts, gates, first, second))

    def error(y: np.ndarray, right: np.ndarray) -> float:
        return float(np.linalg.norm(y - right) / np.linalg.norm(right))

    right = loops(amax13 if "w13" in quantized else None, amax2 if "w2" in quantized else None)
    # where float32 sums differ in order, a value between two codes may take the other
    assert error(found(1), right) < (1e-5 if quantized == "w13" else 5e-3)
    plain = loops(None, None)
    assert 0.05 < error(found(1), plain) < 0.25 and error(found(2688), plain) > 0.7


def test_one_calibration_for_all_experts(oracle_dir: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    """What a file holds for a layer reaches every expert of it, on every rank."""
    directory = oracle_dir("tiny")
    tensors = Checkpoint.open(directory)
    with caplog.at_level(logging.WARNING), inkling_jax.load(directory, activations="nvfp4", mesh="expert=2", **OPTIONS) as llm:
        held = {path: array for path, array in llm.parameters.items() if path.endswith("input_amax")}
        assert held
        for path, array in held.items():
            layer, name = path.split(".")[1], path.split(".")[-2]
            stored = tensors.read(f"model.llm.layers.{layer}.mlp.experts.{name}_weight.input_amax").astype(np.float32)
            assert np.array_equal(array, np.repeat(stored, llm.config.text.num_experts))
    assert not caplog.records  # amounts above 1 are nothing to warn of


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A small checkpoint with packed experts, and one without."""
    made = {packed: tmp_path_factory.mktemp("fp4") / "checkpoint" for packed in (True, False)}
    for packed, directory in made.items():
        write_checkpoint(directory, micro_config(num_hidden_layers=2, local_layer_ids=[0], dense_mlp_idx=0), nvfp4=packed)
    return made


def test_logits_are_those_of_rounded_inputs(checkpoints: dict[bool, Path]) -> None:
    """They move by what 4 bits cost, in the layer that is packed alone."""
    ids, traces = list(range(20)), {}
    for activations in (None, "nvfp4"):
        with inkling_jax.load(checkpoints[True], activations=activations, **OPTIONS) as llm:
            traces[activations] = llm.trace(ids)
    plain, rough = traces[None], traces["nvfp4"]
    assert np.array_equal(plain["hidden.1"], rough["hidden.1"])
    assert 1e-3 < np.linalg.norm(plain["hidden.2"] - rough["hidden.2"]) / np.linalg.norm(plain["hidden.2"]) < 0.3


@pytest.mark.parametrize(
    ("packed", "options", "message"),
    [
        (True, {"kernels": "sm90", "activations": "nvfp4"}, "kernels='sm90': activations='nvfp4' are of the reference path"),
        (True, {"activations": "fp8"}, "activations='fp8': expected None .*, 'nvfp4' or 'measured'"),
        (True, {"activations": "nvfp4", "weights": "random"}, "has no experts in NVFP4"),
        (False, {"activations": "nvfp4"}, "has no experts in NVFP4"),
    ],
)
def test_refused(packed: bool, options: dict[str, str], message: str, checkpoints: dict[bool, Path]) -> None:
    with pytest.raises(InputError, match=message):
        inkling_jax.load(checkpoints[packed], **OPTIONS, **options)


def test_a_conversion_has_no_calibration(checkpoints: dict[bool, Path], tmp_path: Path) -> None:
    (tmp_path / "conversion.json").write_text("{}")
    (tmp_path / "config.json").write_bytes((checkpoints[True] / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="a conversion has no input_amax"):
        inkling_jax.load(tmp_path, activations="nvfp4", **OPTIONS)
