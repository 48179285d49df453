"""What the device reaches in this run when it does nothing but read, or nothing but multiply: the bounds of other rows."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp

from inkling_jax.benchmarks.timing import best_seconds
from inkling_jax.kernels.read_bandwidth import STAGES, TILE, tma_read, xla_read

GPU_TILES, CPU_TILES = 1 << 17, 1 << 13  # 4 GB, far beyond any cache, and 256 MB
GPU_MATRIX, CPU_MATRIX = 8192, 1024

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ReadCeiling:
    """Bytes a second of the fastest read, how it read, and what XLA's reduction reached."""

    bytes_per_second: float
    method: str
    xla_bytes_per_second: float

    def fields(self) -> dict[str, float | str]:
        """The ceiling as a row names it."""
        return {
            "ceiling": self.method,
            "ceiling_gbs": round(self.bytes_per_second / 1e9, 1),
            "xla_read_gbs": round(self.xla_bytes_per_second / 1e9, 1),
        }


def read_ceiling(device: Any) -> ReadCeiling:
    """The best of a TMA read kernel, on Hopper GPUs, and an XLA reduction over the same array, which is freed afterwards."""
    count = CPU_TILES if device.platform == "cpu" else GPU_TILES
    tiles = jax.jit(lambda: jax.lax.broadcasted_iota(jnp.int32, (count, *TILE), 0))()
    xla = tiles.nbytes / best_seconds(lambda: xla_read(tiles))
    if device.platform == "cpu":
        return ReadCeiling(xla, "XLA reduction", xla)
    try:
        tma = tiles.nbytes / _tma_seconds(tiles, device)
    except Exception as error:  # whatever stops the kernel on this device, XLA's figure is left, and the row says which it is
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        logger.warning("the TMA read kernel failed, so bounds come from an XLA reduction: %s", reason)
        return ReadCeiling(xla, f"XLA reduction (the TMA kernel failed: {reason[:80]})", xla)
    return ReadCeiling(max(tma, xla), "TMA read" if tma >= xla else "XLA reduction", xla)


def matmul_ceiling(device: Any) -> float:
    """Operations a second of XLA's largest bfloat16 matrix product: a multiplication and an addition are two."""
    size = CPU_MATRIX if device.platform == "cpu" else GPU_MATRIX
    matrix = jnp.full((size, size), 0.01, jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / best_seconds(lambda: product(matrix, matrix))


def _tma_seconds(tiles: jax.Array, device: Any) -> float:
    blocks = min(getattr(device, "core_count", 132), tiles.shape[0] // STAGES)
    sums = tma_read(tiles, blocks)
    expected = jnp.stack([tiles[block::blocks, 0].sum(0) for block in (0, blocks - 1)])
    if not bool((sums[jnp.array([0, blocks - 1])] == expected).all()):
        raise ValueError("it did not read what lies in memory")
    return best_seconds(lambda: tma_read(tiles, blocks))
