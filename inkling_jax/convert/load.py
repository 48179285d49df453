"""Weights from a checkpoint onto a device, one parameter at a time, so that neither side holds a second copy of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from inkling_jax.convert.progress import Progress
from inkling_jax.convert.weight_map import WeightPlan


def load_parameters(plan: WeightPlan, *, dtype: Any, device: Any, progress: Progress | None = None) -> dict[str, jax.Array]:
    """Every parameter of `plan` on `device`, with `dtype` where the parameter's is the model's.

    `device` is a device, a sharding, or a mapping from path to either.
    `progress` hears of the bytes read. Host memory peaks at the parameter being read and what its assembly needs beside it,
    device memory at the parameters so far and one tensor as stored. Raises CheckpointError for content that is refused.
    """
    parameters = {}
    for path, wanted in plan.abstract(dtype).items():
        parameters[path] = _place(plan, path, wanted, device[path] if isinstance(device, Mapping) else device)
        if progress is not None:
            progress.advance(plan.parameters[path].nbytes)
    return parameters


def _place(plan: WeightPlan, path: str, wanted: jax.ShapeDtypeStruct, device: Any) -> jax.Array:
    """One parameter, transferred as stored (half the bytes of a cast one) and waited for, so that its host copy can go."""
    stored = jax.block_until_ready(jax.device_put(plan.assemble(path), device))
    if stored.dtype == wanted.dtype:
        return stored
    # Donating would not help, since a buffer of another width cannot be reused: drop it as soon as the cast is done.
    cast = jax.block_until_ready(jax.lax.convert_element_type(stored, wanted.dtype))
    stored.delete()
    return cast
