"""The vision tower: reference features, the fold plan against plain loops, gradients, precision and memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import load
from flax import nnx
from jax.test_util import check_grads
from modules import filled
from safetensors.numpy import load_file

from inkling_jax.config import ModelConfig, VisionConfig, preset
from inkling_jax.config_vision import vision_folds
from inkling_jax.layers.vision import VisionTower, folded

RELEASED = dataclasses.replace(preset("inkling").vision, hidden_size=64)


def hashed(shape: tuple[int, ...], seed: int, std: float) -> np.ndarray:
    """The formula of tests/data/README.md: a murmur3 finaliser of each flat index, as float32 of that spread."""
    x = (np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(seed * 1000003)).astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    x ^= x >> np.uint32(16)
    return ((x / 2**32 - 0.5) * math.sqrt(12) * std).astype(np.float32).reshape(shape)


@pytest.fixture(scope="module")
def released_weights() -> dict[str, np.ndarray]:
    """Weights of the four-layer tower that expected-tower.safetensors was computed with, by path with "_" for "."."""
    weights = {"final_norm_weight": 1 + hashed((64,), 30, 0.2)}
    for i, shape in enumerate([(128, 75), (320, 512), (4800, 5120), (64, 9600)]):
        weights[f"layers_{i}_proj"] = hashed(shape, 10 + i, shape[1] ** -0.5)
        if i < 3:
            weights[f"layers_{i}_norm_weight"] = 1 + hashed((shape[0],), 20 + i, 0.2)
    return weights


def still(patches: np.ndarray) -> np.ndarray:
    """Both time slots of a still image from its first, as the answers hold it."""
    return np.repeat(patches[:, None].astype(np.float32), 2, axis=1)


def distance(got: jax.Array, want: np.ndarray) -> float:
    """Relative error in the 2-norm."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def test_features_of_a_reference_checkpoint(
    oracle_dir: Callable[..., Path], expected: Callable[..., dict[str, np.ndarray]]
) -> None:
    """One layer, as in the 0.6B release."""
    config = ModelConfig.from_directory(oracle_dir("tiny")).vision
    assert config is not None and config.num_layers == 1
    tensors, answers = load(oracle_dir("tiny")), expected("tiny")
    tower = filled(
        VisionTower(config, jnp.float32),
        layers_0_proj=tensors["model.visual.layers.linear_0.weight"],
        final_norm_weight=tensors["model.visual.final_norm.weight"],
    )
    for image in ("41x39", "40x40", "1x1", "120x81", "200x90"):
        features = tower(still(answers[f"image.{image}.patches"]))
        # The large image's patches were rounded to float16 after its features were computed.
        assert distance(features, answers[f"image.{image}.features"]) < (1e-3 if image == "200x90" else 1e-5), image


def test_features_of_the_released_tower(
    oracle_set: Callable[[str, str], Path], expected: Callable[..., dict[str, np.ndarray]], released_weights: dict
) -> None:
    """Four layers, on two images and on a patch pair whose time slots differ, all in one batch."""
    answers = load_file(oracle_set("tiny", "nvfp4") / "expected-tower.safetensors")
    patches = {name: still(expected("tiny")[f"image.{name}.patches"]) for name in ("41x39", "120x81")}
    patches["two_slots"] = hashed((2, 2, 40, 40, 3), 1, 1.0)
    assert {f"{name}.features" for name in patches} == set(answers)
    batch = np.concatenate(list(patches.values()))
    want = np.concatenate([answers[f"{name}.features"] for name in patches])
    fine, coarse = (filled(VisionTower(RELEASED, dtype), **released_weights)(batch) for dtype in (jnp.float32, jnp.bfloat16))
    np.testing.assert_allclose(fine, want, atol=2e-5)  # rows have an rms of about one
    assert coarse.dtype == jnp.bfloat16 and distance(coarse, want) < 1e-2


def test_fold_order() -> None:
    """Against plain loops: within a block the channel runs fastest, then width, height, time."""
    x = np.arange(2 * 4 * 6 * 4 * 3).reshape(2, 4, 6, 4, 3)
    got = folded(jnp.asarray(x), 2, 2)
    assert got.shape == (2, 2, 3, 2, 2 * 2 * 2 * 3)
    for n, t, h, w in np.ndindex(2, 2, 3, 2):
        flat = [x[n, 2 * t + i, 2 * h + j, 2 * w + k, c] for i in (0, 1) for j in (0, 1) for k in (0, 1) for c in (0, 1, 2)]
        assert got[n, t, h, w].tolist() == flat


def brute_force_plan(vision: VisionConfig) -> list[tuple[int, int, int]]:
    """Scales of the rule in spec 4.2, for a patch of 40 x 40 x 2: the ascending choice of least total distance, by trying all."""
    scales = [(1, 1, 3), (1, 5, 128), (1, 10, 320), (1, 20, 1216), (1, 40, 4800), (2, 40, 9600)]
    sizes = [math.log(t * s * s) for t, s, _ in scales]
    targets = np.linspace(0, math.log(40 * 40 * 2 * 3), vision.num_layers + 1)
    if vision.num_layers >= len(scales):
        picks = [int(np.argmin(np.abs(np.array(sizes) - target))) for target in targets]
    else:
        picks = list(min(combinations(range(6), len(targets)), key=lambda p: sum(abs(np.array(sizes)[list(p)] - targets))))
    picks[0], picks[-1] = 0, 5
    return [scales[i] for i in picks]


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6, 9, 24])
def test_plan_of_any_depth(layers: int) -> None:
    """The folds follow the scales, and together fold the whole patch."""
    vision = dataclasses.replace(RELEASED, num_layers=layers)
    scales = brute_force_plan(vision)
    folds = vision_folds(vision)
    assert [(f.time, f.side) for f in folds] == [(b[0] // a[0], b[1] // a[1]) for a, b in zip(scales, scales[1:], strict=False)]
    assert [f.inputs for f in folds] == [f.time * f.side**2 * a[2] for f, a in zip(folds, scales, strict=False)]
    assert [f.outputs for f in folds] == [*[b[2] for b in scales[1:-1]], 64]


def test_deep_tower_against_loops() -> None:
    """Seven layers on a small patch, some of which fold nothing, against float64 loops over blocks."""
    config = VisionConfig(hidden_size=5, patch_size=6, temporal_patch_size=2, num_channels=2, num_layers=7, use_norm=True)
    folds = vision_folds(config)
    assert (1, 1) in [(f.time, f.side) for f in folds]
    rng = np.random.default_rng(0)
    weights = {"final_norm_weight": rng.standard_normal(5)}
    for i, fold in enumerate(folds):
        weights[f"layers_{i}_proj"] = rng.standard_normal((fold.outputs, fold.inputs)) / math.sqrt(fold.inputs)
        if i < 6:
            weights[f"layers_{i}_norm_weight"] = 1 + rng.standard_normal(fold.outputs) / 8
    patch = rng.standard_normal((2, 6, 6, 2))
    x = patch
    for i, (time, side, _, outputs) in enumerate(folds):
        grid = (x.shape[0] // time, x.shape[1] // side, x.shape[2] // side)
        y = np.empty((*grid, outputs))
        for t, h, w in np.ndindex(grid):
            block = x[t * time : (t + 1) * time, h * side : (h + 1) * side, w * side : (w + 1) * side]
            y[t, h, w] = weights[f"layers_{i}_proj"] @ block.ravel()
            if i < 6:
                normed = y[t, h, w] / np.sqrt(np.mean(y[t, h, w] ** 2) + 1e-6) * weights[f"layers_{i}_norm_weight"]
                y[t, h, w] = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in normed]
        x = y
    row = x[0, 0, 0]
    normed = row / np.sqrt(np.mean(row**2) + 1e-6) * weights["final_norm_weight"]
    assert distance(filled(VisionTower(config, jnp.float32), **weights)(patch[None])[0], normed) < 1e-5
    plain = {name: value for name, value in weights.items() if name != "final_norm_weight"}
    bare = filled(VisionTower(dataclasses.replace(config, use_norm=False), jnp.float32), **plain)
    assert distance(bare(patch[None])[0], row) < 1e-5


def test_gradients() -> None:
    """Through the whole tower, to patches and to weights, against finite differences."""
    config = VisionConfig(hidden_size=16, patch_size=6, temporal_patch_size=2, num_channels=1, num_layers=3, use_norm=True)
    rng = np.random.default_rng(1)
    graph, state = nnx.split(VisionTower(config, jnp.float32))
    leaves, tree = jax.tree.flatten(state)
    values = [jnp.asarray(rng.standard_normal(leaf.shape) / math.sqrt(leaf.shape[-1]), jnp.float32) for leaf in leaves]
    patches, out = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 2, 6, 6, 1), (2, 16)))

    @jax.jit
    def loss(values: list[jax.Array], patches: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graph, jax.tree.unflatten(tree, values))(patches) * out)

    check_grads(loss, (values, patches), order=1, modes=["rev"], atol=1e-2, rtol=1e-2, eps=1e-3)


def test_memory_a_patch() -> None:
    """What the docstring promises, at two batch sizes: nothing grows faster than the batch."""
    for dtype, kib in ((jnp.float32, 128), (jnp.bfloat16, 96)):
        graph, state = nnx.split(VisionTower(preset("inkling-small").vision, dtype))
        leaves, tree = jax.tree.flatten(state)

        def run(leaves: list[jax.Array], patches: jax.Array, graph=graph, tree=tree) -> jax.Array:
            return nnx.merge(graph, jax.tree.unflatten(tree, leaves))(patches)

        for patches in (32, 128):
            shape = jax.ShapeDtypeStruct((patches, 2, 40, 40, 3), jnp.float32)
            memory = jax.jit(run).lower(leaves, shape).compile().memory_analysis()
            assert memory.temp_size_in_bytes <= patches * kib * 1024
