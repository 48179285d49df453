"""One rank's part of a model, alone on a device: its collectives run over axes of size one, everything else is as on the mesh."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from inkling_jax.cache.paged import Cache, CacheShape, is_fp8
from inkling_jax.config import ModelConfig, TextConfig, preset
from inkling_jax.config_ranks import spread_text
from inkling_jax.engine.engine import Engine, EngineOptions
from inkling_jax.engine.sampler import SamplerState
from inkling_jax.engine.shapes import Shapes
from inkling_jax.engine.state import EngineState, create_state
from inkling_jax.engine.steps import Programs, state_specs
from inkling_jax.errors import CapacityError, InputError
from inkling_jax.expert_storage import choose_kernels, repack, use_kernels
from inkling_jax.model import Inkling
from inkling_jax.random_weights import local_leaves, packed_experts, random_array, random_leaves, random_parameters
from inkling_jax.sharding.mesh import make_mesh, mesh_sizes

DTYPE = jnp.bfloat16  # of the releases

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A rank's share of a model with random weights, NVFP4 where the releases are."""

    name: str  # of the model, the mesh and what is cut away, as cases spell it
    mesh: str  # such as "tensor=8"
    config: TextConfig
    sizes: dict[str, int]  # of that mesh
    kernels: bool = False  # weights as the kernels want them
    deterministic: bool = False  # as in `load`
    fp8: bool = False  # keys and values are

    @functools.cached_property
    def model(self) -> Inkling:
        """The whole model, declared without memory."""
        return Inkling(self.config, packed_experts(self.config), DTYPE)

    @functools.cached_property
    def programs(self) -> Programs:
        """The engine's programs, on one device."""
        return Programs(self._model_that_runs, make_mesh(), DTYPE)

    @functools.cached_property
    def _model_that_runs(self) -> Inkling:
        model = Inkling(self.config, packed_experts(self.config), DTYPE)
        return use_kernels(model, self.deterministic) if self.kernels else model

    @property
    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the parameters that programs take."""
        return list(local_leaves(self._model_that_runs, self.sizes).values())

    @functools.cached_property
    def leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of this rank's parameters by path, as stored."""
        return local_leaves(self.model, self.sizes)

    @property
    def weight_bytes(self) -> int:
        """Memory of this rank's parameters."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves.values())

    def random_leaves(self) -> list[jax.Array]:
        """This rank's parameters on the device."""
        if not self.kernels:
            return random_leaves(self.model, sizes=self.sizes)
        made = dict(repack(random_parameters(self.model, sizes=self.sizes)))
        return [made[path] for path in local_leaves(self._model_that_runs, self.sizes)]

    def abstract_state(self, shape: CacheShape) -> EngineState:
        """The engine's state for this rank, without memory."""
        return jax.eval_shape(lambda: create_state(self.config, shape, DTYPE, self.sizes))

    def random_state(self, shape: CacheShape) -> EngineState:
        """A state in which every slot owns all pages of its tables, shuffled, and caches hold random numbers. No slot is live."""
        abstract = self.abstract_state(shape)
        layers, form = jax.tree.flatten_with_path(abstract.cache.layers)
        return EngineState(
            cache=Cache(
                layers=jax.tree.unflatten(form, [_random_part(jax.tree_util.keystr(path), a) for path, a in layers]),
                global_table=_shuffled_table(shape.slots, shape.global_pages),
                local_table=_shuffled_table(shape.slots, shape.local_pages),
            ),
            sampler=SamplerState.create(shape.slots, abstract.sampler.prompt_seen.shape[1]),
            last_token=jnp.zeros(shape.slots + 1, jnp.int32),
            length=jnp.zeros(shape.slots + 1, jnp.int32),
            live=jnp.zeros(shape.slots + 1, bool),
        )

    def engine(self, leaves: list[jax.Array], shape: CacheShape, options: EngineOptions, shapes: Shapes | None = None) -> Engine:
        """An engine over this rank's parameters with an empty cache; it knows the ids that the rank's rows of the head have."""
        create = functools.partial(create_state, self.config, shape, DTYPE, self.sizes)
        mesh, abstract = self.programs.mesh, jax.eval_shape(create)
        placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs(abstract))
        vocab = min(abstract.sampler.prompt_seen.shape[1], self.config.usable_vocab_size)
        config = dataclasses.replace(self.config, usable_vocab_size=vocab)
        shapes = shapes or Shapes.of(shape, options.chunk, bounded=not self.kernels, single=options.deterministic)
        return Engine(self.programs, leaves, jax.jit(create, out_shardings=placed), config, shape, options=options, shapes=shapes)

    def cache_shape(self, slots: int, context: int, queries: int, page_size: int) -> CacheShape:
        """Sizes of a cache in which `slots` sequences reach `context` tokens, `queries` of them a step."""
        empty = CacheShape(slots, page_size, 0, 0, context, queries, self.fp8)
        return dataclasses.replace(
            empty,
            global_pages=slots * empty.table_width(None),
            local_pages=slots * empty.table_width(self.config.local_attention.window),
        )

    def check_memory(self, state: EngineState, device: Any) -> None:
        """Raise CapacityError with both numbers where weights and `state` cannot fit the device; no limit is known of a CPU."""
        limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
        needed = self.weight_bytes + sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(state))
        if limit is not None and needed > limit:
            raise CapacityError(
                f"{self.name} needs {needed} bytes for weights and cache, the device has {limit}: split it over more ranks "
                f"(--rank-of), or take a smaller batch, context or number of layers"
            )


def open_shard(
    source: str, rank_of: str, layers: int | None, kernels: str = "auto", page_size: int = 64, kv_dtype: str | None = None
) -> Shard:
    """The shard of a preset or of the shape in a checkpoint directory (its tensors are not read), cut to its first `layers`.

    `rank_of` names the mesh, such as "tensor=8". kernels, page_size, kv_dtype: as in `load`. Raises ConfigError for what does
    not divide over the mesh, InputError for bad values.
    """
    directory = Path(source)
    config = (ModelConfig.from_directory(directory) if directory.is_dir() else preset(source)).text
    sizes = mesh_sizes(rank_of)
    config = spread_text(config, sizes["tensor"] * sizes["expert"])
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "tensor=1"
    name = f"{directory.resolve().name if directory.is_dir() else source} {mesh}"
    if layers is not None:
        if not 1 <= layers <= config.num_layers:
            raise InputError(f"--layers {layers}: {source} has {config.num_layers}")
        local, dense = config.local_layers[:layers], config.dense_layers[:layers]
        config = dataclasses.replace(config, num_layers=layers, local_layers=local, dense_layers=dense)
        name += f" layers={layers}"
    fp8 = is_fp8(kv_dtype)
    name += " kv=fp8" if fp8 else ""
    _ = Shard(name, mesh, config, sizes, False).leaves  # all that must divide, does
    chosen = choose_kernels(kernels, config, DTYPE, jax.devices()[0].device_kind, sizes, page_size, fp8)
    return Shard(name, mesh, config, sizes, chosen, fp8=fp8)


def _random_part(name: str, array: jax.ShapeDtypeStruct) -> jax.Array:
    """Numbers of a part of a cache; e4m3 codes are any but NaN, up to 1 in size, whose scales are near 1."""
    if array.dtype == jnp.uint8:
        return random_array(name, array.shape, array.dtype) & 0xB7
    return random_array(name, array.shape, array.dtype, *((1.0, 0.1) if array.dtype == jnp.float32 else ()))


def _shuffled_table(slots: int, pages: int) -> jax.Array:
    """Page tables [slots + 1, pages / slots] that share out all pages at random; the last slot, for padding, has none."""
    table = np.full((slots + 1, pages // slots), pages, np.int32)
    table[:slots] = np.random.default_rng(0).permutation(pages).reshape(slots, -1)
    return jnp.asarray(table)
