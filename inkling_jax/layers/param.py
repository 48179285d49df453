"""Declaration of parameters: shape, dtype and logical axes, without memory. The loader supplies the arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from inkling_jax.sharding.rules import Axes


def param(shape: tuple[int, ...], dtype: jnp.dtype, axes: Axes) -> nnx.Param:
    """An abstract parameter. `axes` names each dimension for sharding/rules.py; they live in metadata of our own,
    because Flax's own sharding names would place arrays eagerly and know nothing of our logical names."""
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes)
