"""One table from the logical axes of parameters and caches to mesh axes."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from inkling_jax.errors import ConfigError

# What is not routed is split over tensor and expert together; routed experts lie whole on `expert` and are sliced over `tensor`.
RULES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor", "expert"),
    "hidden": ("tensor", "expert"),
    "heads": ("tensor", "expert"),
    "kv_heads": ("tensor", "expert"),
    "ffn": ("tensor", "expert"),
    "experts": ("expert",),
    "expert_ffn": ("tensor",),
}

Axes = tuple[str | None, ...]


def partition_spec(axes: Axes) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions carry the logical names `axes` (None: not split)."""
    return PartitionSpec(*(RULES[axis] if axis else None for axis in axes))


def local_shape(name: str, shape: tuple[int, ...], axes: Axes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one rank's shard of an array `name` on a mesh with the given axis sizes.

    Raises ConfigError naming the parameter and the axis where a dimension does not divide.
    """
    local = []
    for size, axis in zip(shape, axes, strict=True):
        ways = 1
        for mesh_axis in RULES[axis] if axis else ():
            ways *= sizes.get(mesh_axis, 1)
        if size % ways:
            raise ConfigError(f"{name}: dimension {axis!r} of size {size} does not divide over {ways} devices")
        local.append(size // ways)
    return tuple(local)
