"""The cache of all sequences: paged keys and values in two geometries, and the short convolutions' state by slot.

A frozen value: each step takes one and returns the next, its buffers donated. Global layers keep every page; local layers keep
the window, so their page table is a ring: absolute page a lives in column a % width, and pages behind the window are used again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from inkling_jax.cache.ragged import Ragged
from inkling_jax.config import TextConfig
from inkling_jax.errors import InputError
from inkling_jax.kernels.pages import Fp8Pages, Pages, write
from inkling_jax.sharding.rules import Axes, local_shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What one decoder layer remembers. Keys are stored after convolution and norm, so they do not depend on position.

    All are None where nothing is remembered (`keep_nothing`).
    """

    k_pages: Pages  # [pages, K, P, H]
    v_pages: Pages
    k_conv: Float[Array, "slots m K H"]
    v_conv: Float[Array, "slots m K H"]
    attn_conv: Float[Array, "slots m D"]
    mlp_conv: Float[Array, "slots m D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """All layers, and the page tables that they share by kind. An unset table entry holds the number of pages of its pool."""

    layers: tuple[LayerCache, ...]
    global_table: Int[Array, "slots global_width"]
    local_table: Int[Array, "slots local_width"]

    def table(self, local: bool) -> Int[Array, "slots width"]:
        """The page table of one kind of layer."""
        return self.local_table if local else self.global_table


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Sizes that the operator or the planner chooses, and the form of pages.

    One slot more than `slots` exists: the last is reserved for padding.
    """

    slots: int
    page_size: int
    global_pages: int
    local_pages: int
    max_context: int  # longest sequence, in tokens
    max_query: int  # most positions of a row, behind its window or ahead, that a local table must hold at once
    fp8: bool = False  # pages are Fp8Pages

    def table_width(self, window: int | None) -> int:
        """Columns of a page table: all pages of the longest sequence, or for a window the pages that one step can touch."""
        everything = -(-self.max_context // self.page_size)
        if window is None:
            return everything
        return min(everything, (window - 1 + self.max_query + self.page_size - 2) // self.page_size + 1)


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array of a cache: its global shape and logical axes."""

    shape: tuple[int, ...]
    axes: Axes
    dtype: jnp.dtype

    def local(self, name: str, sizes: Mapping[str, int] | None) -> jax.ShapeDtypeStruct:
        """One rank's part on a mesh with axis sizes `sizes` (None: one device). Raises ConfigError as local_shape."""
        return jax.ShapeDtypeStruct(local_shape(name, self.shape, self.axes, sizes or {}), self.dtype)


def is_fp8(kv_dtype: str | None) -> bool:
    """Whether pages are Fp8Pages: "fp8"; None: they are of the dtype of activations. Raises InputError for anything else."""
    if kv_dtype not in (None, "fp8"):
        raise InputError(f"kv_dtype={kv_dtype!r}: expected None (the dtype that is computed in) or 'fp8'")
    return kv_dtype == "fp8"


def layer_arrays(config: TextConfig, shape: CacheShape, layer: int, dtype: jnp.dtype) -> dict[str, Any]:
    """What one layer's cache stores, by the fields of LayerCache; pages in fp8 are two arrays. `dtype`: of activations."""
    attention = config.attention(layer)
    pages = shape.local_pages if config.local_layers[layer] else shape.global_pages
    size, axes = (pages, attention.num_kv_heads, shape.page_size, attention.head_dim), (None, "kv_heads", None, None)
    kv: Any = Stored(size, axes, dtype)
    if shape.fp8:
        parts = (Stored(size, axes, jnp.dtype(jnp.uint8)), Stored(size[:-1], axes[:-1], jnp.dtype(jnp.float32)))
        kv = Fp8Pages(*parts)  # pyright: ignore[reportArgumentType]  in the form of what it describes
    slots, kept = shape.slots + 1, config.conv_width - 1
    heads = Stored((slots, kept, attention.num_kv_heads, attention.head_dim), (None, None, "kv_heads", None), dtype)
    wide = Stored((slots, kept, config.hidden_size), (None, None, None), dtype)
    return {"k_pages": kv, "v_pages": kv, "k_conv": heads, "v_conv": heads, "attn_conv": wide, "mlp_conv": wide}


def create_cache(config: TextConfig, shape: CacheShape, dtype: jnp.dtype, sizes: Mapping[str, int] | None = None) -> Cache:
    """An empty cache for one rank of a mesh with axis sizes `sizes` (default: one device). Each array is its own buffer."""

    def zeros(name: str, stored: Stored) -> Array:
        local = stored.local(name, sizes)
        return jnp.zeros(local.shape, local.dtype)

    layers = []
    for layer in range(config.num_layers):
        stored = layer_arrays(config, shape, layer, jnp.dtype(dtype))
        names = {name: functools.partial(zeros, f"cache of layer {layer}, {name}") for name in stored}
        layers.append(LayerCache(**{name: jax.tree.map(names[name], arrays) for name, arrays in stored.items()}))
    rows = shape.slots + 1
    return Cache(
        layers=tuple(layers),
        global_table=jnp.full((rows, shape.table_width(None)), shape.global_pages, jnp.int32),
        local_table=jnp.full((rows, shape.table_width(config.local_attention.window)), shape.local_pages, jnp.int32),
    )


def keep_nothing(layers: int) -> Cache:
    """What stands for the cache of so many layers where every sequence is whole within one step, as in training."""
    nothing: Any = None
    layer = LayerCache(*(nothing,) * len(dataclasses.fields(LayerCache)))
    return Cache((layer,) * layers, *(jnp.zeros((1, 1), jnp.int32),) * 2)


def append(pages: Pages, new: Float[Array, "T K H"], table: Int[Array, "B width"], ragged: Ragged) -> Pages:
    """Pages with each valid token's keys or values written at its position; padding and unset pages drop the write."""
    page_size = pages.shape[2]
    page = table[ragged.row, (ragged.position // page_size) % table.shape[1]]
    page = jnp.where(ragged.valid, page, pages.shape[0])
    return write(pages, (page, slice(None), ragged.position % page_size), new)
