"""Parameters of a checkpoint, published or converted, spread over a mesh."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from inkling_jax.config import ModelConfig
from inkling_jax.convert.converted import open_weights
from inkling_jax.convert.load import load_parameters
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.layers.mtp import DraftHead
from inkling_jax.model import Inkling, flat_parameters
from inkling_jax.sharding.mesh import make_mesh, mesh_sizes
from inkling_jax.sharding.rules import partition_spec
from inkling_jax.towers import Towers


def shardings_of(config: ModelConfig, plan: WeightPlan, sizes: dict[str, int]) -> dict[str, NamedSharding]:
    """Where each parameter of a model lies on a mesh."""
    mesh, dtype = make_mesh(sizes), jnp.dtype("float32")
    modules = [Inkling(config.text, plan.packed, dtype), Towers(config.vision, config.audio, dtype)]
    if plan.draft:
        modules.append(DraftHead.of(config, dtype))
    leaves = {path: leaf for module in modules for path, leaf in flat_parameters(module).items()}
    return {path: NamedSharding(mesh, partition_spec(leaves[path].axes)) for path in plan.parameters}


def divides(shape: tuple[int, ...], sharding: NamedSharding) -> bool:
    """Whether an array can be spread so: the two key heads of a global layer cannot, over four devices."""
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def open_weights_of(directory: Path) -> WeightPlan:
    """How to read all of it, as its own configuration says."""
    return open_weights(ModelConfig.from_directory(directory), directory, draft=True)


def held(directory: Path, mesh: str = "") -> dict[str, bytes]:
    """The bytes of every parameter, loaded onto a mesh."""
    config, plan = ModelConfig.from_directory(directory), open_weights_of(directory)
    shardings = shardings_of(config, plan, mesh_sizes(mesh))
    kept = {path: made for path, made in plan.parameters.items() if divides(made.shape, shardings[path])}
    plan = WeightPlan(plan.checkpoint, kept, plan.packed, plan.towers, (), (), plan.draft)
    arrays = load_parameters(plan, dtype="bfloat16", device=shardings)
    for path, array in arrays.items():
        assert array.sharding == shardings[path]
    return {path: np.asarray(array).tobytes() for path, array in arrays.items()}
