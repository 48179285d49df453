"""What a model takes of each device's memory before anything is loaded: weights, cache, what a step computes on its way.

Every size comes from where loading takes it: declared parameters and cache arrays over the one table of sharding/rules.py.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from inkling_jax.cache.paged import CacheShape
from inkling_jax.cache.sizing import CacheRequest, cache_bytes, fit_cache
from inkling_jax.config import ModelConfig, TextConfig
from inkling_jax.config_ranks import spread
from inkling_jax.engine.engine import EngineOptions
from inkling_jax.engine.pack import SCORE_CHUNK
from inkling_jax.engine.shapes import SMALLEST_CHUNK, bucket
from inkling_jax.engine.state import create_state
from inkling_jax.errors import CapacityError, ConfigError, InputError
from inkling_jax.expert_storage import spread_experts
from inkling_jax.layers.mtp import DraftHead
from inkling_jax.model import Inkling, Packed, flat_parameters
from inkling_jax.processes import of_all_processes
from inkling_jax.sharding.collectives import MODEL_AXES
from inkling_jax.sharding.mesh import AXES
from inkling_jax.sharding.rules import local_shape
from inkling_jax.towers import Towers
from inkling_jax.workspace import step_workspace

logger = logging.getLogger(__name__)

MARGIN = 0.03  # of a device's memory, left for what the allocator cannot use and the formula for a step misses
MOST_DEVICES = 64  # of a mesh that is proposed
UNLIMITED = 1 << 62

# A parameter belongs to the first kind whose pattern is found in its path.
KINDS: dict[str, str] = {
    "towers": r"^(vision|audio)\.",
    "draft head": r"^draft",
    "norms and convolutions": r"(norm|conv)\.weight$",
    "embedding": r"^embed$",
    "head": r"^unembed$",
    "attention": r"\.attn\.",
    "routed experts": r"\.mlp\.experts\.",
    "shared experts": r"\.mlp\.shared\.",
    "router": r"\.mlp\.router\.",
    "dense feed-forward": r"\.mlp\.",
}


def kind_of(path: str) -> str:
    """What a parameter is, for a table."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, path))


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, by kind."""

    weights: dict[str, int]
    cache: dict[str, int]  # keys and values of "global" and "local" layers, "conv" state
    slots: int  # the sampler's settings and counts, page tables, lengths
    media: int  # rows that the towers made, kept for the next time that their content comes
    workspace: dict[str, int]  # of one step, by program

    @property
    def step(self) -> int:
        """What a step takes on its way, whichever program it is."""
        return max(self.workspace.values())

    @property
    def without_cache(self) -> int:
        """All that is there whatever the number of pages."""
        return sum(self.weights.values()) + self.slots + self.media + self.step

    @property
    def total(self) -> int:
        """All of it."""
        return self.without_cache + sum(self.cache.values())


@dataclasses.dataclass(frozen=True)
class Layout:
    """A model as it is declared, and how it is to run."""

    config: ModelConfig
    model: Inkling
    towers: Towers
    dtype: jnp.dtype  # of activations, and of a cache that is not in fp8
    packed: Packed  # the expert weights that are NVFP4
    chunk: int  # prompt tokens a step
    media: int = 0  # bytes for rows of media
    draft: DraftHead | None = None
    experts_over_data: bool = False  # routed experts are spread over replicas
    _spread: dict[ModelConfig, Layout] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> TextConfig:
        """The decoder's part of the configuration."""
        return self.config.text

    def over(self, sizes: Mapping[str, int]) -> Layout:
        """The model as the ranks of a mesh with these axis sizes hold it, the same each time that it is asked.

        Raises ConfigError where key heads do not divide.
        """
        config = spread(self.config, math.prod(sizes.get(axis, 1) for axis in MODEL_AXES))
        if config == self.config:
            return self
        if config not in self._spread:
            model = declare_decoder(config.text, self.packed, self.dtype, self.experts_over_data)
            draft = DraftHead.of(config, self.dtype) if self.draft is not None else None
            self._spread[config] = dataclasses.replace(self, config=config, model=model, draft=draft, _spread={})
        return self._spread[config]

    @functools.cached_property
    def _declared(self) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...], int]]:
        flat = flat_parameters(self.model) | flat_parameters(self.towers)
        flat |= flat_parameters(self.draft) if self.draft is not None else {}
        return {path: (leaf.get_value().shape, leaf.axes, leaf.get_value().dtype.itemsize) for path, leaf in flat.items()}

    def weights(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Bytes of one rank's parameters by kind. Raises ConfigError naming the one that does not divide over the mesh."""
        found = dict.fromkeys(KINDS, 0)
        for path, (shape, axes, itemsize) in self.over(sizes)._declared.items():
            found[kind_of(path)] += math.prod(local_shape(path, shape, axes, sizes)) * itemsize
        return {kind: size for kind, size in found.items() if size}

    def memory(self, shape: CacheShape, sizes: Mapping[str, int]) -> Memory:
        """Bytes on one rank with a cache of this shape. Raises ConfigError where something does not divide over the mesh."""
        return Memory(
            weights=self.weights(sizes),
            cache=cache_bytes(self.over(sizes).text, shape, self.dtype, sizes),
            slots=self.over(sizes)._slot_bytes(shape, sizes),
            media=self.media,
            workspace=self._workspace(shape, sizes),
        )

    def full(self, request: CacheRequest, sizes: Mapping[str, int]) -> Memory:
        """The same where every sequence may reach the request's context."""
        return self.memory(fit_cache(self.over(sizes).text, request, UNLIMITED, self.dtype, sizes), sizes)

    def _slot_bytes(self, shape: CacheShape, sizes: Mapping[str, int]) -> int:
        none = dataclasses.replace(self.text, num_layers=0, local_layers=(), dense_layers=())
        state = jax.eval_shape(lambda: create_state(none, shape, self.dtype, sizes))
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(state))

    def _workspace(self, shape: CacheShape, sizes: Mapping[str, int]) -> dict[str, int]:
        rows = bucket(shape.slots)
        tokens, scored = (max(SMALLEST_CHUNK, bucket(size)) for size in (self.chunk, min(self.chunk, SCORE_CHUNK)))
        context = -(-shape.max_context // shape.page_size) * shape.page_size
        programs = {"prefill": (tokens, rows, rows), "decode": (rows, rows, rows), "score": (scored, 1, scored)}
        return {
            name: step_workspace(
                self.over(sizes).text,
                sizes,
                self.dtype.itemsize,
                tokens=tokens,
                rows=rows,
                context=context,
                page_size=shape.page_size,
                fp8=shape.fp8,
                logits=logits,
                packed=bool(self.packed),
                replicas=sizes.get("data", 1) if self.experts_over_data else 1,
            )
            for name, (tokens, rows, logits) in programs.items()
        }


def declare_decoder(text: TextConfig, packed: Packed, dtype: jnp.dtype, experts_over_data: bool) -> Inkling:
    """The decoder, and whether its routed experts are spread over replicas."""
    model = Inkling(text, packed, dtype)
    return spread_experts(model, dtype) if experts_over_data else model


def most_positions(options: EngineOptions) -> int:
    """`CacheRequest.max_query` of an engine: a chunk, or what the calls in flight and the next one may add."""
    return max(options.chunk, options.tokens_per_call * (options.ahead + 2))


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "40GB", "512MiB" or "1000000"."""
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([kKMGT]i?)?B?\s*", text)
    if match is None:
        raise InputError(f"size {text!r}: expected a number of bytes such as 40GB or 512MiB")
    number, unit = match.groups()
    scale = (1024 if unit.endswith("i") else 1000) ** ("KMGT".index(unit[0].upper()) + 1) if unit else 1
    return int(float(number) * scale)


def memory_of(device: Any, devices: int) -> tuple[int, int]:
    """Bytes of memory of a device, and how many of them are taken. On a CPU, whose `devices` share it: the RAM, and none."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // devices, 0
    return stats["bytes_limit"], stats["bytes_in_use"]


def _memory_everywhere(device: Any, devices: int) -> tuple[int, int]:
    """`memory_of` where least is left: it differs from host to host, and all must come to the same cache."""
    total, taken = min(of_all_processes(memory_of(device, devices)), key=lambda found: usable(found[0]) - found[1])
    return total, taken


def usable(device_memory: int) -> int:
    """Of a device's memory, what a plan may fill."""
    return int(device_memory * (1 - MARGIN))


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that fits, 0 where none does. Where one does not fit, no larger one may."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def meshes(most: int = MOST_DEVICES) -> Iterator[dict[str, int]]:
    """Meshes of one replica, those of few devices first, and among equals those with more of `tensor`."""
    for devices in range(1, most + 1):
        for expert in range(1, devices + 1):
            if devices % expert == 0:
                yield dict.fromkeys(AXES, 1) | {"tensor": devices // expert, "expert": expert}


def smallest_mesh(layout: Layout, request: CacheRequest, device_memory: int, least: int = 1) -> dict[str, int] | None:
    """The first of `meshes` of at least so many devices that the model divides over and fits; None where none does."""
    for sizes in (mesh for mesh in meshes() if math.prod(mesh.values()) >= least):
        try:
            if layout.full(request, sizes).total <= usable(device_memory):
                return sizes
        except ConfigError:  # does not divide
            continue
    return None


def choose_mesh(layout: Layout, request: CacheRequest) -> dict[str, int]:
    """A mesh of the devices here: as many of them as can be used, as few replicas as the model divides over and fits.

    One replica over all answers a request soonest and has the largest cache for it. Where experts are spread over replicas it is
    the other way round. Where none fits it is the largest that divides, so that `fit_model` tells what is lacking.
    """
    devices = len(jax.devices())
    total, taken = _memory_everywhere(jax.local_devices()[0], devices)
    few = dataclasses.replace(request, max_context=request.max_context or request.page_size)
    divided: list[dict[str, int]] = []
    for sizes in _meshes_here(devices, layout.experts_over_data):
        try:
            needed = layout.full(few, sizes)
        except ConfigError:
            continue
        divided.append(sizes)
        if needed.total <= usable(total) - taken:
            logger.info(
                "mesh auto: %s on %d of %d devices, the fewest replicas that the model divides over and fits: "
                "%d bytes a device are needed, of %d there %d can be used",
                mesh_text(sizes), math.prod(sizes.values()), devices, needed.total, total, usable(total) - taken,
            )  # fmt: skip
            return sizes
    return divided[0]


def _meshes_here(devices: int, many_replicas: bool) -> Iterator[dict[str, int]]:
    """Meshes of all devices, then, in a single process, of fewer; of few replicas first, and among equals more of `tensor`."""
    for count in range(devices, 0, -1) if jax.process_count() == 1 else (devices,):
        for data in sorted((n for n in range(1, count + 1) if count % n == 0), reverse=many_replicas):
            ranks = count // data
            for expert in (n for n in range(1, ranks + 1) if ranks % n == 0):
                yield {"data": data, "tensor": ranks // expert, "expert": expert}


def mesh_text(sizes: Mapping[str, int]) -> str:
    """A mesh as its option is written."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "tensor=1"


def fit_model(layout: Layout, request: CacheRequest, kv_memory: int | str | None, mesh: Mesh) -> CacheShape:
    """The cache that fits beside the model: within `kv_memory` bytes a device, or what is left (a quarter of the RAM on a CPU).

    Raises CapacityError with the bytes needed and those there where weights, cache and a step do not fit together, ConfigError
    naming a parameter that does not divide over the mesh.
    """
    sizes, device = dict(mesh.shape), mesh.local_devices[0]
    total, taken = _memory_everywhere(device, mesh.size)
    free = usable(total) - taken
    known, text = layout.full(request, sizes), layout.over(sizes).text
    weights = sum(known.weights.values())
    there = f"of {total} there {max(0, free)} can be used"
    if weights > free:
        few = dataclasses.replace(request, max_context=request.max_context or request.page_size)
        other = smallest_mesh(layout, few, total - taken)
        advice = f": spread them over more devices, such as mesh={mesh_text(other)!r}" if other else ""
        raise CapacityError(f"the weights take {weights} bytes a device, {there}{advice}")
    room = free - known.without_cache
    if kv_memory is None:
        if room <= 0:
            raise CapacityError(f"weights and a step take {known.without_cache} bytes a device, {there}: no room for a cache")
        memory = min(room, total // 4) if device.platform == "cpu" else room
        return fit_cache(text, request, memory, layout.dtype, sizes)
    shape = fit_cache(text, request, to_bytes(kv_memory, "kv_memory"), layout.dtype, sizes)
    needed = layout.memory(shape, sizes).total
    if needed > free:
        raise CapacityError(f"weights, cache and a step take {needed} bytes a device, {there}: lower kv_memory or max_context")
    return shape


def to_bytes(size: int | str, name: str) -> int:
    """A number of bytes, or a text that says one. Raises InputError, by the option's `name`, for anything else."""
    if isinstance(size, str):
        return parse_bytes(size)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InputError(f"{name}={size!r}: expected a number of bytes, or text such as 40GB or 512MiB")
    return size
