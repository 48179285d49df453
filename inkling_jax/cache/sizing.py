"""How large a cache fits in the memory at hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from inkling_jax.cache.paged import CacheShape, layer_arrays
from inkling_jax.config import TextConfig
from inkling_jax.errors import CapacityError, InputError


@dataclasses.dataclass(frozen=True)
class CacheRequest:
    """What the operator asks of a cache."""

    slots: int  # sequences at once
    page_size: int  # a power of two
    max_query: int  # see CacheShape
    max_context: int | None  # None: as long as memory allows
    fp8: bool = False  # keys and values in fp8


def cache_bytes(
    config: TextConfig, shape: CacheShape, dtype: jnp.dtype, sizes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Bytes on one device of a cache, by kind: "global", "local" (KV pages, scales included) and "conv" (state by slot)."""
    total = {"global": 0, "local": 0, "conv": 0}
    for layer in range(config.num_layers):
        for name, stored in layer_arrays(config, shape, layer, dtype).items():
            kind = "conv" if name.endswith("conv") else "local" if config.local_layers[layer] else "global"
            for array in jax.tree.leaves(stored):
                local = array.local(f"cache of layer {layer}, {name}", sizes)
                total[kind] += local.dtype.itemsize * math.prod(local.shape)
    return total


def fit_cache(
    config: TextConfig, request: CacheRequest, memory: int, dtype: jnp.dtype, sizes: Mapping[str, int] | None = None
) -> CacheShape:
    """The largest useful cache within `memory` bytes a device: local pages for every slot's window, global pages from the rest.

    `dtype`: of activations.

    Raises CapacityError with both numbers where not even one page a slot, or not the context asked for, fits.
    """
    page = request.page_size
    if page < 1 or page & (page - 1):
        raise InputError(f"page_size {page} is not a power of two")
    if request.max_context is not None and not 1 <= request.max_context <= config.max_context:
        raise InputError(f"max_context {request.max_context} is not from 1 to the model's {config.max_context}")
    context = request.max_context or config.max_context
    window = config.local_attention.window

    def shape(global_pages: int, context: int) -> CacheShape:
        empty = CacheShape(request.slots, page, 0, 0, context, request.max_query, request.fp8)
        return dataclasses.replace(empty, global_pages=global_pages, local_pages=request.slots * empty.table_width(window))

    fixed = cache_bytes(config, shape(0, context), dtype, sizes)
    a_page = cache_bytes(config, shape(1, context), dtype, sizes)["global"]
    wanted = request.slots * -(-context // page)
    pages = wanted if not a_page else min(wanted, (memory - sum(fixed.values())) // a_page)
    needed = -(-context // page) if request.max_context is not None else request.slots
    if pages < needed:
        need = sum(fixed.values()) + needed * a_page
        what = (
            f"a context of {context} tokens"
            if request.max_context is not None
            else f"one page for each of {request.slots} sequences"
        )
        raise CapacityError(
            f"the cache needs {need} bytes for {what}, {memory} are left: lower max_context or slots, or raise kv_memory"
        )
    return shape(pages, min(context, pages * page))
