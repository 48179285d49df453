"""A model's draft head from its checkpoint onto the mesh: with the model, or when it is first asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from inkling_jax.config import ModelConfig
from inkling_jax.config_ranks import spread
from inkling_jax.convert.converted import open_weights
from inkling_jax.convert.load import load_parameters
from inkling_jax.convert.progress import Progress
from inkling_jax.convert.spread import spread_plan
from inkling_jax.engine.draft import DraftRunner
from inkling_jax.engine.steps import Programs
from inkling_jax.errors import CapacityError, InputError
from inkling_jax.layers.mtp import DraftHead
from inkling_jax.memory import memory_of, usable
from inkling_jax.model import flat_parameters
from inkling_jax.random_weights import local_leaves, random_leaves
from inkling_jax.sharding.collectives import MODEL_AXES
from inkling_jax.sharding.rules import partition_spec


def check_draft_mesh(sizes: Mapping[str, int]) -> None:
    """Raise InputError for a mesh that the draft head does not run on."""
    if sizes["data"] > 1:
        raise InputError(f"mesh data={sizes['data']}: the draft head runs on a mesh of one replica, use tensor and expert")


@dataclasses.dataclass(frozen=True)
class DraftSource:
    """Where a model's draft head comes from: the checkpoint in `directory`, or without one random numbers by `seed`."""

    config: ModelConfig
    directory: Path | None
    dtype: jnp.dtype
    seed: int
    quiet: bool

    def declare(self, config: ModelConfig | None = None) -> DraftHead:
        """The head without its weights, or that of `config` instead. Raises InputError where the configuration has none."""
        head = DraftHead.of(config or self.config, self.dtype)
        if head is None:
            raise InputError("this model has no draft head: its config.json has no mtp_config")
        return head

    def open(self, programs: Programs) -> DraftRunner:
        """The head on the mesh of `programs`, those of its decoder.

        Raises InputError where there is none, CapacityError where a device has no memory left for it.
        """
        mesh = programs.mesh
        check_draft_mesh(mesh.shape)
        config = spread(self.config, math.prod(mesh.shape[axis] for axis in MODEL_AXES))
        head, layers = self.declare(config), config.draft_layers
        assert layers is not None
        needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in local_leaves(head, mesh.shape).values())
        total, taken = memory_of(mesh.local_devices[0], mesh.size)
        if needed > (free := usable(total) - taken):
            raise CapacityError(
                f"the draft head takes {needed} bytes a device, {max(0, free)} are left: load the model with draft=True, "
                "which plans for it, or with less kv_memory"
            )
        return DraftRunner(head, self._leaves(head, mesh), layers, programs)

    def _leaves(self, head: DraftHead, mesh: Mesh) -> list[jax.Array]:
        if self.directory is None:
            return random_leaves(head, mesh=mesh, seed=self.seed)
        plan = open_weights(self.config, self.directory, draft=True)
        if not plan.draft:
            raise InputError(f"{self.directory}: holds no draft head, not one tensor of model.mtp.*")
        declared = flat_parameters(head)
        plan = dataclasses.replace(plan, parameters={path: plan.parameters[path] for path in declared})
        plan = spread_plan(plan, {path: leaf.get_value().shape for path, leaf in declared.items()})
        shardings = {path: NamedSharding(mesh, partition_spec(leaf.axes)) for path, leaf in declared.items()}
        with Progress(plan.total_bytes, label="loading the draft head", quiet=self.quiet) as progress:
            arrays = load_parameters(plan, dtype=self.dtype, device=shardings, progress=progress)
        return [jax.block_until_ready(arrays[path]) for path in declared]
