"""Random weights made on the device, sized so that activations stay of order one: for benchmarks and trials without files.

Each parameter is one small jitted program of its own shape, so memory peaks at the weights and one tensor. Parameters of equal
shape share a program, and what a parameter holds depends on the seed and its path alone.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Shaped, UInt32

from inkling_jax.config import TextConfig
from inkling_jax.model import Inkling, Packed, flat_parameters
from inkling_jax.sharding.rules import local_shape, partition_spec

SCALE_BYTES = (0x68, 16)  # first E4M3 byte and number of bytes that block scales are drawn from: 64 to 240, no NaN, no negative
_CODE_RMS = math.sqrt(sum(x * x for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)  # of E2M1 codes, all equally likely
_SCALE_RMS = math.sqrt(sum((1 + m / 8) ** 2 * 4.0**e for e in (6, 7) for m in range(8)) / 16)  # of the bytes above


def packed_experts(config: TextConfig) -> Packed:
    """The expert weights that NVFP4 releases pack: those of every sparse layer but the first (spec 7.4)."""
    sparse = [i for i, dense in enumerate(config.dense_layers) if not dense]
    return frozenset((layer, name) for layer in sparse[1:] for name in ("w13", "w2"))


def local_leaves(model: nnx.Module, sizes: Mapping[str, int]) -> dict[str, jax.ShapeDtypeStruct]:
    """What one rank of a mesh with axis sizes `sizes` holds, by path, in the order of the model's flat state.

    Raises ConfigError naming the parameter where a dimension does not divide.
    """
    return {
        path: jax.ShapeDtypeStruct(local_shape(path, leaf.get_value().shape, leaf.axes, sizes), leaf.get_value().dtype)
        for path, leaf in flat_parameters(model).items()
    }


def random_leaves(
    model: nnx.Module, *, mesh: Mesh | None = None, sizes: Mapping[str, int] | None = None, seed: int = 0
) -> list[Array]:
    """Random parameters in the order of the model's flat state.

    With `mesh` they are spread over it. With `sizes` they have the shapes of one rank's shard of a mesh with these axis sizes and
    lie on the default device: what a benchmark of one rank needs. With neither they lie on the default device, whole.
    Raises ConfigError naming the parameter where a dimension does not divide.
    """
    return jax.block_until_ready([array for _, array in random_parameters(model, mesh=mesh, sizes=sizes, seed=seed)])


def random_parameters(
    model: nnx.Module, *, mesh: Mesh | None = None, sizes: Mapping[str, int] | None = None, seed: int = 0
) -> Iterator[tuple[str, Array]]:
    """The same one by one, each with its path."""
    if mesh is not None:
        local_leaves(model, mesh.shape)
    flat = flat_parameters(model)
    shapes = {path: leaf.get_value().shape for path, leaf in flat.items()}
    divisor = model.logits_divisor if isinstance(model, Inkling) else 1.0
    for path, local in local_leaves(model, sizes or {}).items():
        sharding = NamedSharding(mesh, partition_spec(flat[path].axes)) if mesh is not None else None
        moments = _moments(path, shapes, divisor)
        yield path, random_array(path, local.shape, local.dtype, *moments, seed=seed, sharding=sharding)


def random_array(
    name: str,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    seed: int = 0,
    sharding: NamedSharding | None = None,
) -> Shaped[Array, "*shape"]:
    """An array that `seed` and `name` decide: numbers of this mean and spread, or for a packed dtype any valid bytes."""
    make = _maker(tuple(shape), jnp.dtype(dtype), sharding)
    return make(np.uint32(seed % 2**32), np.uint32(zlib.crc32(name.encode())), mean, std)


@functools.cache
def _maker(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding | None) -> Callable[..., Array]:
    """The jitted program that draws an array: packed codes (uint8), block scales (float8_e4m3fn) or numbers, nearly normal."""

    def make(seed: Array, place: Array, mean: Array, std: Array) -> Array:
        bits = _random_bits(seed, place, shape)
        if dtype == jnp.uint8:
            return (bits >> 24).astype(jnp.uint8)
        if dtype == jnp.float8_e4m3fn:
            return jax.lax.bitcast_convert_type((SCALE_BYTES[0] + bits % SCALE_BYTES[1]).astype(jnp.uint8), dtype)
        # The sum of four random bytes is close to normal, and everything here is one element-wise loop: no float32 array exists.
        total = sum(((bits >> shift) & 0xFF).astype(jnp.float32) for shift in (0, 8, 16, 24))
        return (mean + std * (total - 510) * (4 * (256**2 - 1) / 12) ** -0.5).astype(dtype)

    return jax.jit(make) if sharding is None else jax.jit(make, out_shardings=sharding)


def _random_bits(seed: UInt32[Array, ""], place: UInt32[Array, ""], shape: tuple[int, ...]) -> UInt32[Array, "*shape"]:
    """A hash of each element's place. A sampler's generator would take a second to compile for each of some 25 shapes."""
    row = jnp.uint32(0)
    for axis, size in enumerate(shape[:-1]):
        row = row * size + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    column = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) if shape else jnp.uint32(0)
    return _mix(_mix(row ^ _mix(place ^ _mix(seed))) ^ column)  # rows apart from columns: places may not fit 32 bits


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32 bits in which every bit of the input reaches every bit of the output (the end of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _moments(path: str, shapes: Mapping[str, tuple[int, ...]], logits_divisor: float) -> tuple[float, float]:
    """Mean and spread of a parameter by its role; matrices get 1 / sqrt(inputs), of the whole matrix and not of a shard."""
    parent, _, name = path.rpartition(".")
    if "norm" in parent.rpartition(".")[2]:
        return 1.0, 0.1
    if name == "scale2":
        scale = (2 * shapes[parent + ".values"][-1]) ** -0.5 / (_CODE_RMS * _SCALE_RMS)
        return scale, 0.1 * scale
    if name == "bias":
        return 0.0, 0.01  # of the router: small beside the spread of the scores (0.2), so that all experts are chosen alike
    if name == "global_scale":
        return (0.3 if parent.endswith("router") else 1.0), 0.02
    if name == "embed":
        return 0.0, 1.0
    gain = logits_divisor if name == "unembed" else 1.0
    return 0.0, gain * shapes[path][-1] ** -0.5
