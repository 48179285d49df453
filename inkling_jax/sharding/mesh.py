"""The device mesh: axes `data`, `tensor` and `expert`, all present whatever their size, so that one device is the same code."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from inkling_jax.errors import InputError

AXES = ("data", "tensor", "expert")


def mesh_sizes(mesh: str | Mapping[str, int] | None) -> dict[str, int]:
    """Axis sizes of a mesh given as "tensor=2,expert=4" or {"tensor": 2, "expert": 4}; axes not named have size one.

    Raises InputError naming what is no axis or no size.
    """
    if isinstance(mesh, str):
        given = [(axis.strip(), size.strip()) for axis, _, size in (part.partition("=") for part in mesh.split(",") if part)]
    elif mesh is None or isinstance(mesh, Mapping):
        given = [(axis, str(size)) for axis, size in (mesh or {}).items()]
    else:
        raise InputError(f"mesh {mesh!r}: expected axis sizes such as 'tensor=8' or {{'tensor': 8}}")
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for axis, size in given:
        if axis not in AXES or not re.fullmatch("0*[1-9][0-9]{0,8}", size):
            part = f"{axis}={size}" if size else axis
            raise InputError(
                f"mesh {mesh!r}: {part!r} is not AXIS=SIZE with AXIS one of {', '.join(AXES)} and SIZE a positive integer"
            )
        if [name for name, _ in given].count(axis) > 1:
            raise InputError(f"mesh {mesh!r}: {axis} has more than one size")
        sizes[axis] = int(size)
    return sizes


def make_mesh(sizes: Mapping[str, int] | None = None) -> Mesh:
    """A mesh over as many of jax.devices() as the sizes need."""
    shape = tuple((sizes or {}).get(axis, 1) for axis in AXES)
    count, devices = math.prod(shape), jax.devices()
    if len(devices) < count:
        raise InputError(f"mesh {dict(zip(AXES, shape, strict=True))} needs {count} devices, {len(devices)} are present")
    return Mesh(np.array(devices[:count]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
