"""`bench towers`: the towers of a released shape with random weights, in bfloat16, beside float32 and a bound."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from inkling_jax.benchmarks.ceilings import ReadCeiling, matmul_ceiling, read_ceiling
from inkling_jax.benchmarks.rows import Row, make_row, save_rows
from inkling_jax.benchmarks.table import print_table
from inkling_jax.benchmarks.timing import series_seconds
from inkling_jax.config import AudioConfig, ModelConfig, VisionConfig, preset
from inkling_jax.config_vision import vision_folds
from inkling_jax.errors import InputError
from inkling_jax.random_weights import random_parameters
from inkling_jax.towers import Towers

IMAGE_PATCHES = 52 * 52  # of 2048 x 2048 pixels, to which smaller images are scaled: places of 40, a column more (spec 4.1)
AUDIO_ROWS = 20 * 60  # a minute: a row is 50 ms (spec 5)
COMPARED = 256  # rows that are compared with float32: one size, since each size takes long to compile
REPEATS = 5

logger = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Measure images and minutes of audio of the preset's towers, keep the rows, and print them."""
    config, device = preset(args.preset), jax.devices()[0]
    if config.vision is None or config.audio is None:
        raise InputError(f"preset {args.preset!r} has no towers")
    ceiling, flops = read_ceiling(device), matmul_ceiling(device)
    rows = []
    for name in ("vision", "audio"):
        towers = Towers(config.vision, None, jnp.bfloat16) if name == "vision" else Towers(None, config.audio, jnp.bfloat16)
        leaves = [array for _, array in random_parameters(towers)]
        for items in args.items:
            row = measure(args.preset, config, name, towers, leaves, items, ceiling, flops)
            save_rows(Path(args.output), [row])
            logger.info("%s: %.0f us", row["case"], row["time_us"])
            rows.append(row)
        for leaf in leaves:
            leaf.delete()
    print_table(rows, {"items_per_s": "items/s", "rel_err": "error"})
    return 0


def measure(
    name: str,
    config: ModelConfig,
    tower: str,
    towers: Towers,
    leaves: list[Array],
    items: int,
    ceiling: ReadCeiling,
    flops: float,
) -> Row:
    """The row of `items` images, or minutes of audio, in one call.

    Its error is bfloat16's against float32 with these weights, in the first COMPARED rows.
    """
    values = _values(tower, config, items)
    compute = _program(towers, tower)
    features = compute(leaves, values)
    found, right = np.asarray(features[:COMPARED], np.float32), _float32(config, tower, leaves, values[:COMPARED])
    seconds = min(series_seconds(lambda: compute(leaves, values), 3, REPEATS))
    work, size = (
        _operations(tower, config) * len(values),
        sum(leaf.nbytes for leaf in leaves) + values.nbytes + features.nbytes,
    )
    what = "images 2048x2048" if tower == "vision" else "minutes"
    fields: dict[str, Any] = ceiling.fields()
    return make_row(
        "towers",
        f"{name} {tower} {what}={items}",
        "prefill",
        jax.devices()[0],
        kernels="reference",
        time_us=seconds * 1e6,
        bound_us=max(work / flops, size / ceiling.bytes_per_second) * 1e6,
        items=items,
        tokens=len(values),
        items_per_s=round(items / seconds, 1),
        rel_err=round(float(np.linalg.norm(found - right) / np.linalg.norm(right)), 6),
        flops=work,
        bytes=size,
        ceiling_tflops=round(flops / 1e12, 1),
        **fields,
    )


def _values(tower: str, config: ModelConfig, items: int) -> Array:
    """Random patches or bins as preprocessing makes them."""
    if tower == "audio":
        assert isinstance(config.audio, AudioConfig)
        return jax.random.randint(
            jax.random.key(0), (items * AUDIO_ROWS, config.audio.num_mel_bins), 0, config.audio.mel_vocab_size
        )
    assert isinstance(config.vision, VisionConfig)
    v = config.vision
    shape = (items * IMAGE_PATCHES, v.temporal_patch_size, v.patch_size, v.patch_size, v.num_channels)
    return jax.random.normal(jax.random.key(0), shape, jnp.float32)


def _operations(tower: str, config: ModelConfig) -> int:
    """Operations of one row: a multiplication and an addition are two. Audio's are additions of table rows."""
    if tower == "audio":
        assert isinstance(config.audio, AudioConfig)
        return config.audio.num_mel_bins * config.audio.hidden_size
    assert isinstance(config.vision, VisionConfig)
    v, total = config.vision, 0
    time, side = v.temporal_patch_size, v.patch_size
    for fold in vision_folds(v):
        time, side = time // fold.time, side // fold.side
        total += 2 * time * side * side * fold.inputs * fold.outputs
    return total


def _float32(config: ModelConfig, tower: str, leaves: list[Array], values: Array) -> np.ndarray:
    """The same weights' features in float32."""
    vision, audio = (config.vision, None) if tower == "vision" else (None, config.audio)
    compute = _program(Towers(vision, audio, jnp.float32), tower)
    with jax.default_matmul_precision("highest"):
        return np.asarray(compute([leaf.astype(jnp.float32) for leaf in leaves], values))


def _program(towers: Towers, tower: str) -> Callable[[list[Array], Array], Array]:
    """The jitted tower, of its leaves and what it takes."""
    graph, abstract = nnx.split(towers)
    tree = jax.tree.structure(abstract)
    return jax.jit(lambda leaves, values: getattr(nnx.merge(graph, jax.tree.unflatten(tree, leaves)), tower)(values))
