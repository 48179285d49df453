"""Sizes of a decode kernel: rows of its products, what it keeps in shared memory, and the barriers between its warpgroups."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_jax.kernels.paged_attention.bias import KEY_TILE
from inkling_jax.kernels.paged_attention.mosaic import ROWS, SHARED_MEMORY, smem_bytes, tiled_smem
from inkling_jax.kernels.paged_attention.widen import code_barriers, code_smem

MOST_QUERIES = 9  # tokens a row: one, and a draft of eight
COMPUTE = 2  # warpgroups that multiply; one more loads
CODE_STAGES = 4  # key tiles in flight that are still fp8


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Static sizes of a decode kernel."""

    queries: int  # most query tokens of a row
    share: int  # query heads of a key head, a power of two >= 4
    kv_heads: int
    width: int  # of a head
    rank: int  # columns of the bias product
    extent: int
    page: int
    window: int | None
    programs: int
    interpret: bool = False
    fp8: bool = False  # keys and values: one more warpgroup makes bfloat16 of them
    overlap_merge: bool = True  # merge.py starts while this kernel runs, and waits for its end inside

    @property
    def rows(self) -> int:
        """Rows of the product that hold a query."""
        return self.queries * self.share

    @property
    def split_rows(self) -> bool:
        """Whether the two warpgroups halve the rows of every tile. Otherwise they take alternate tiles: less work in all."""
        return self.rows > ROWS

    @property
    def readers(self) -> int:
        """Warpgroups that read a tile."""
        return COMPUTE if self.split_rows else 1

    @property
    def stages(self) -> int:
        """Key tiles in flight, of fp8 those that are bfloat16 by now.

        Barrier phases are counted per warpgroup, so with alternate tiles a slot belongs to one: even.
        """
        if self.fp8:
            return 1 if self.split_rows else 2
        return 3 if self.split_rows else 4

    @property
    def warpgroups(self) -> int:
        """Of a program."""
        return COMPUTE + 1 + self.fp8

    @property
    def bias_slots(self) -> int:
        """Bias tiles in flight: as many as keys where they are small."""
        if self.split_rows:
            return 1
        return self.stages if self.queries <= 2 else 2

    @property
    def query_slots(self) -> int:
        """Items whose queries are held: the next one's are loaded ahead where there is room."""
        return 2 if self.queries <= 4 and not self.split_rows else 1

    @property
    def product_rows(self) -> int:
        """Rows of both warpgroups' products."""
        return ROWS * self.readers

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        bf16, slots = jnp.bfloat16, self.query_slots
        arrays = {
            "keys": tiled_smem((self.stages, KEY_TILE, self.width), bf16),
            "values": tiled_smem((self.stages, KEY_TILE, self.width), bf16),
            "table_rows": tiled_smem((self.bias_slots, self.queries, KEY_TILE, self.rank), bf16),
            "query": plgpu.SMEM((slots, self.product_rows, self.width), bf16),
            "rel": plgpu.SMEM((slots, self.product_rows, self.rank), bf16),
            "exchange": plgpu.SMEM((self.readers, ROWS, self.width), jnp.float32),
            "top": plgpu.SMEM((self.readers, ROWS), jnp.float32),
            "total": plgpu.SMEM((self.readers, ROWS), jnp.float32),
        }
        if self.fp8:
            arrays |= code_smem(CODE_STAGES, KEY_TILE, self.width, self.stages)
        used = sum(-(-smem_bytes(array) // 1024) * 1024 for array in arrays.values())
        if used > SHARED_MEMORY - 2048:
            raise ValueError(f"a decode kernel for {self} would take {used} bytes of shared memory of {SHARED_MEMORY}")
        if self.interpret:
            arrays["query_operand"] = tiled_smem((COMPUTE, ROWS, self.width), bf16)
            arrays["rel_operand"] = tiled_smem((COMPUTE, self.queries, ROWS, self.rank), bf16)
            arrays["weight_operand"] = tiled_smem((COMPUTE, ROWS, KEY_TILE), bf16)
        barriers = {
            "keys_full": plgpu.Barrier(num_barriers=self.stages),
            "values_full": plgpu.Barrier(num_barriers=self.stages),
            "keys_free": plgpu.Barrier(num_barriers=self.stages, num_arrivals=self.readers),
            "values_free": plgpu.Barrier(num_barriers=self.stages, num_arrivals=self.readers),
            "bias_full": plgpu.Barrier(num_barriers=self.bias_slots, num_arrivals=self.queries),
            "bias_free": plgpu.Barrier(num_barriers=self.bias_slots, num_arrivals=self.readers),
            "query_full": plgpu.Barrier(num_barriers=slots, num_arrivals=2 * self.queries),
            "query_free": plgpu.Barrier(num_barriers=slots, num_arrivals=COMPUTE),
            "exchange_full": plgpu.Barrier(),
            "exchange_free": plgpu.Barrier(),
        }
        if self.fp8:
            barriers |= code_barriers(CODE_STAGES, 1)
        return arrays | barriers
