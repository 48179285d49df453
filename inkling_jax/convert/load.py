"""Weights from a checkpoint onto a device, one parameter at a time, so that neither side holds a second copy of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_jax.convert.progress import Progress
from inkling_jax.convert.weight_map import WeightPlan

SLICE_BYTES = 1 << 24  # of a large tensor that are on their way to a device at once


def stream_parameters(
    plan: WeightPlan, *, dtype: Any, device: Any, progress: Progress | None = None
) -> Iterator[tuple[str, jax.Array]]:
    """Every parameter of `plan` in turn, by path, on `device` and with `dtype` where the parameter's is the model's.

    `device` is a device, a sharding, or a mapping from path to either. `progress` hears of the bytes read. Host memory peaks at
    the parameter being read and what its assembly needs beside it, device memory at the parameters so far and one tensor as
    stored (onto one GPU, some slices of it). Raises CheckpointError for content that is refused.
    """
    for path, wanted in plan.abstract(dtype).items():
        array = _place(plan, path, wanted, device[path] if isinstance(device, Mapping) else device)
        if progress is not None:
            progress.advance(plan.parameters[path].nbytes)
        yield path, array


def load_parameters(plan: WeightPlan, *, dtype: Any, device: Any, progress: Progress | None = None) -> dict[str, jax.Array]:
    """All that `stream_parameters` yields."""
    return dict(stream_parameters(plan, dtype=dtype, device=device, progress=progress))


def _place(plan: WeightPlan, path: str, wanted: jax.ShapeDtypeStruct, device: Any) -> jax.Array:
    """One parameter, transferred as stored (half the bytes of a cast one) and waited for, so that its host copy can go.

    Onto a single device that is not the CPU a large one goes slice by slice: a transfer is staged through pinned host memory that
    is kept for the next, so a whole tensor at once would cost its size twice more.
    """
    array = plan.assemble(path)
    devices = getattr(device, "device_set", {device})
    if array.nbytes > SLICE_BYTES and len(devices) == 1 and next(iter(devices)).platform != "cpu":
        return _place_slices(array, wanted.dtype, device)
    stored = jax.block_until_ready(jax.device_put(array, device))
    if stored.dtype == wanted.dtype:
        return stored
    # Donating would not help, since a buffer of another width cannot be reused: drop it as soon as the cast is done.
    cast = jax.block_until_ready(jax.lax.convert_element_type(stored, wanted.dtype))
    stored.delete()
    return cast


def _place_slices(array: np.ndarray, dtype: Any, device: Any) -> jax.Array:
    """The array, filled in and cast on the device in slices of its first axis; the last overlaps the one before if it must."""
    length = len(array)
    rows = min(length, max(1, SLICE_BYTES // (array.nbytes // length)))
    whole = jnp.zeros(array.shape, dtype, device=device)
    for start in range(0, length, rows):
        start = min(start, length - rows)
        part = jax.device_put(array[start : start + rows], device)
        whole = jax.block_until_ready(_fill(whole, part, start))
        part.delete()
    return whole


@partial(jax.jit, donate_argnums=0)
def _fill(whole: jax.Array, part: jax.Array, start: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), start, axis=0)
