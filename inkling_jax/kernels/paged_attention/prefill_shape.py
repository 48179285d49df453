"""Sizes of a prefill kernel: which rows of its products are which queries, what it keeps in shared memory, its barriers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_jax.kernels.paged_attention.bias import TABLE_LANES
from inkling_jax.kernels.paged_attention.mosaic import ROWS, SHARED_MEMORY, smem_bytes, tiled_smem
from inkling_jax.kernels.paged_attention.widen import code_barriers, code_smem

COMPUTE = 2  # warpgroups that multiply; one more loads
CODE_STAGES = 2  # key tiles in flight that are still fp8
GROUP = 8  # rows of a product that lie together, the heads of one or two tokens
PIECE = 64  # columns of a head that one copy takes: what a swizzled row of shared memory holds
MOST_SHARE = 8  # query heads of a key head: a group holds whole tokens


def tile_tokens(share: int) -> int:
    """Tokens whose heads of one key head are a tile of queries."""
    return COMPUTE * ROWS // share


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """Static sizes of a prefill kernel.

    A tile of queries is 128 rows, 64 a warpgroup. Row 16w + 8h + i of warpgroup g is head i % share of token
    `token(g, w, h) + i // share` of the tile. Rows 8 apart are so tokens 8 apart: their biases are the same fragments, 8 keys on.
    """

    share: int  # query heads of a key head, 4 or 8
    kv_heads: int
    width: int  # of a head
    extent: int
    page: int
    window: int | None
    programs: int
    table_rows: int  # of the bias table
    keys: int = 128  # of a tile
    stages: int = 2  # key tiles in flight
    overlap: bool = False  # the product of a tile's keys runs beside that of the last one's values
    biased: bool = True
    interpret: bool = False
    fp8: bool = False  # keys and values: one more warpgroup makes bfloat16 of them, a tile at a time

    @property
    def warpgroups(self) -> int:
        """Of a program."""
        return COMPUTE + 1 + self.fp8

    @property
    def tokens(self) -> int:
        """Of a tile."""
        return tile_tokens(self.share)

    @property
    def group_tokens(self) -> int:
        """Tokens whose heads are 8 rows."""
        return GROUP // self.share

    def token(self, group: Any, warp: Any, half: Any) -> Any:
        """First token, within a tile, of the rows 16 warp + 8 half of a warpgroup."""
        return group * self.group_step + warp * self.group_tokens + half * GROUP

    @property
    def group_step(self) -> int:
        """Tokens from the first of one warpgroup to the first of the other."""
        return 4 if self.share == 8 else 16

    @property
    def before(self) -> int:
        """Tokens to add around the queries: a copy from outside them is zeros, but with the interpreter moves inside."""
        return self.tokens if self.interpret else 0

    @property
    def pieces(self) -> int:
        """Copies that the columns of a head take."""
        return self.width // PIECE

    @property
    def page_copies(self) -> int:
        """Copies that a tile of keys takes."""
        return max(1, self.keys // self.page)

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        if self.fp8 and self.overlap:
            raise ValueError("of keys and values in fp8 products do not overlap")
        bf16 = jnp.bfloat16
        query = tiled_smem((COMPUTE, self.pieces, ROWS, PIECE), bf16)
        # The same memory by tokens: rows of 128 bytes, swizzled alike, so what a copy writes in one is read in the other.
        tokens = plgpu.SMEM(
            (COMPUTE, self.pieces, ROWS // self.share, self.share, PIECE),
            bf16,
            transforms=(plgpu.TilingTransform((self.share, PIECE)), plgpu.SwizzleTransform(128)),  # pyright: ignore[reportAbstractUsage]
        )
        arrays = {
            "keys": tiled_smem((self.stages, self.keys, self.width), bf16),
            "values": tiled_smem((self.stages, self.keys, self.width), bf16),
            "rel": plgpu.SMEM((COMPUTE, self.tokens, self.share, 16), bf16),
            "table": plgpu.SMEM((self.table_rows // 4, TABLE_LANES), bf16),
            "query": query,
        }
        if self.fp8:
            arrays |= code_smem(CODE_STAGES, self.keys, self.width, self.stages)
        used = sum(-(-smem_bytes(array) // 1024) * 1024 for array in arrays.values())
        if used > SHARED_MEMORY - 2048:
            raise ValueError(f"a prefill kernel for {self} would take {used} bytes of shared memory of {SHARED_MEMORY}")
        if self.interpret:
            arrays["query_tokens"] = tokens
            arrays["weight_operand"] = tiled_smem((COMPUTE, ROWS, self.keys), bf16)
        else:
            arrays["query"] = plgpu.RefUnion(query, tokens)
        copies, arrivals = ROWS // GROUP * self.pieces, 1 if self.fp8 else self.page_copies
        barriers = {
            "keys_full": plgpu.Barrier(num_barriers=self.stages, num_arrivals=arrivals),
            "values_full": plgpu.Barrier(num_barriers=self.stages, num_arrivals=arrivals),
            "keys_free": plgpu.Barrier(num_barriers=self.stages, num_arrivals=COMPUTE),
            "values_free": plgpu.Barrier(num_barriers=self.stages, num_arrivals=COMPUTE),
            "query_full": plgpu.Barrier(num_barriers=COMPUTE, num_arrivals=copies + self.biased),
            "query_free": plgpu.Barrier(num_barriers=COMPUTE),
            "table_full": plgpu.Barrier(num_arrivals=self.table_copies if self.biased else 1),
        }
        if self.fp8:
            barriers |= code_barriers(CODE_STAGES, self.page_copies)
        return arrays | barriers

    @property
    def table_copies(self) -> int:
        """Copies that the bias table takes: of at most 256 lines of 128 bytes."""
        return -(-(self.table_rows // 4) // 256)
