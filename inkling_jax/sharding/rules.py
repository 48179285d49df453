"""One table from the logical axes of parameters and caches to mesh axes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from inkling_jax.errors import ConfigError

# What is not routed is split over tensor and expert together; routed experts lie whole on `expert` and are sliced over `tensor`.
# Each replica, a place on `data`, has sequences and pages of its own, and all weights but for experts that are spread over them.
RULES: dict[str, tuple[str, ...]] = {
    "slots": ("data",),
    "pages": ("data",),
    "vocab": ("tensor", "expert"),
    "hidden": ("tensor", "expert"),
    "heads": ("tensor", "expert"),
    "kv_heads": ("tensor", "expert"),
    "ffn": ("tensor", "expert"),
    "experts": ("expert",),
    "all_experts": ("data", "expert"),
    "expert_ffn": ("tensor",),
}

Axes = tuple[str | None, ...]
MOST_WAYS = 64  # that an error names


def partition_spec(axes: Axes) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions carry the logical names `axes` (None: not split)."""
    return PartitionSpec(*(RULES[axis] if axis else None for axis in axes))


def ways(axis: str | None, sizes: Mapping[str, int]) -> int:
    """Over how many devices of a mesh with the given axis sizes a logical axis is split."""
    return math.prod(sizes.get(mesh_axis, 1) for mesh_axis in (RULES[axis] if axis else ()))


def local_shape(name: str, shape: tuple[int, ...], axes: Axes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one rank's shard of an array `name` on a mesh with the given axis sizes.

    Raises ConfigError naming the parameter, the axis and the numbers of devices that would do, where a dimension does not divide.
    """
    local = []
    for size, axis in zip(shape, axes, strict=True):
        over = ways(axis, sizes)
        if size % over:
            would = ", ".join(str(n) for n in range(1, min(size, MOST_WAYS) + 1) if size % n == 0)
            where = f"{over} devices ({' x '.join(RULES[axis or ''])})"
            raise ConfigError(f"{name}: dimension {axis!r} of size {size} does not divide over {where}; {would} would do")
        local.append(size // over)
    return tuple(local)
