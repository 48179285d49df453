"""A model's parameters as the tensors of the published layout: what `weight_map` does, the other way round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from inkling_jax.config import ModelConfig
from inkling_jax.convert.assemble import Assembly
from inkling_jax.convert.header import DTYPES, TensorInfo
from inkling_jax.convert.published import published_tensors
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.convert.write import write_tensors
from inkling_jax.errors import InputError

Parameters = Mapping[str, Shaped[np.ndarray, "..."]]


def publish(directory: str | Path, config: ModelConfig, parameters: Parameters, *, shards: int = 1) -> int:
    """Write `parameters`, by path as the modules declare them, as a BF16 checkpoint with config.json; returns data bytes.

    All parts that `config` has must be there: decoder, towers ("vision.", "audio.") and draft head ("draft."). Numbers are
    rounded to the dtypes of the layout. No tokenizer is written. Raises InputError for parameters that are missing, of another
    shape or not finite, and for a directory that already holds weights.
    """
    return write_tensors(directory, config, published_arrays(config, parameters), shards=shards)


def published_arrays(config: ModelConfig, parameters: Parameters) -> dict[str, np.ndarray]:
    """Each tensor of the BF16 layout, filled from the parameters that would be read from it."""
    infos = {
        name: TensorInfo(name, dtype, shape, Path("to be written"), 0, math.prod(shape) * DTYPES[dtype].itemsize)
        for name, (dtype, shape) in published_tensors(config, nvfp4=False).items()
    }
    plan = WeightPlan.build(config, Checkpoint(Path("to be written"), infos), draft=True)
    arrays = {name: np.zeros(info.shape, DTYPES[info.dtype]) for name, info in infos.items()}
    for path, source in plan.parameters.items():
        if path not in parameters:
            raise InputError(f"parameter {path} is missing")
        value = np.asarray(parameters[path])
        if value.shape != source.shape:
            raise InputError(f"parameter {path} has shape {value.shape}, expected {source.shape}")
        if not np.isfinite(value.astype(np.float32)).all():
            raise InputError(f"parameter {path} holds numbers that are not finite")
        assert isinstance(source.content, Assembly)  # of tensors that are there
        _fill(arrays, value, source.content)
    return arrays


def _fill(arrays: dict[str, np.ndarray], value: np.ndarray, assembly: Assembly) -> None:
    """Write a parameter through the views that it would be read through."""
    start = 0
    for view in assembly.views:
        flat = arrays[view.info.name].reshape(-1)[view.offset :]
        seen = np.lib.stride_tricks.as_strided(flat, view.shape, [stride * flat.itemsize for stride in view.strides])
        if not view.shape:
            seen[...] = value
            return
        end = start + view.shape[assembly.axis]
        seen[...] = value[(slice(None),) * assembly.axis + (slice(start, end),)]
        start = end
