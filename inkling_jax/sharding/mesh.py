"""The device mesh: axes `data`, `tensor` and `expert`, all present whatever their size, so that one device is the same code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from inkling_jax.errors import InputError

AXES = ("data", "tensor", "expert")


def parse_mesh(text: str) -> dict[str, int]:
    """Axis sizes of a specification such as "tensor=8" or "tensor=2,expert=4"; axes not named have size one."""
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis.strip() not in AXES or not size.strip().isdecimal() or int(size) < 1:
            raise InputError(
                f"mesh {text!r}: {part!r} is not AXIS=SIZE with AXIS one of {', '.join(AXES)} and SIZE a positive integer"
            )
        sizes[axis.strip()] = int(size)
    return sizes


def make_mesh(sizes: Mapping[str, int] | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over `devices` (default: as many of jax.devices() as the sizes need)."""
    shape = tuple((sizes or {}).get(axis, 1) for axis in AXES)
    count = int(np.prod(shape))
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < count:
        raise InputError(f"mesh {dict(zip(AXES, shape, strict=True))} needs {count} devices, {len(devices)} are present")
    return Mesh(np.array(devices[:count]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
