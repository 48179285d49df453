"""The routed feed-forward for many rows an expert: each product a persistent launch whose tensor cores take weights from
registers, decoded there, and rows from shared memory.

The rows of each expert lie together, in slots of up to `rows`, and every slot's product is as wide as its rows need. A tile is 64
rows of weights for each of `workers` warpgroups; one more copies weights into a ring, a block of 128 columns a stage, and rows
into another, half as many. While one half of a block multiplies the next is decoded. With `cluster` two processors take
neighbouring tiles and share the rows that they read.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int32

from inkling_jax.errors import InputError
from inkling_jax.kernels.expert_matmul import batch_device, batch_twin
from inkling_jax.kernels.expert_matmul.decode import weigh
from inkling_jax.kernels.expert_matmul.decode_plan import SHARED_BYTES
from inkling_jax.kernels.expert_matmul.group import Groups
from inkling_jax.kernels.expert_matmul.pack import BLOCK_COLUMNS, BLOCK_ROWS, Packed, Shared

ALIGN = 8  # rows: copies into the layout that tensor cores read start at a multiple
SIZES = {32: (8, 16, 32), 64: (16, 32, 64), 256: (64, 128, 192, 256)}  # of products, by the most rows of a slot
MAX_STAGES = 8
# Of a thread. With two warpgroups that multiply all begin with 168, with four with 96.
COPY_REGISTERS, MULTIPLY_REGISTERS = 40, {2: 232, 4: 104}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that shapes the kernel of one product."""

    blocks: int  # of 64 rows of weights
    depth: int  # of 128 columns
    lines: int  # of a block
    factor: float  # beside the scales of the weights
    paired: bool
    workers: int
    rows: int
    w_stages: int  # blocks of weights in flight
    x_stages: int  # halves of blocks of rows in flight
    processors: int
    cluster: int

    @property
    def width(self) -> int:
        """Of the result."""
        return self.blocks * BLOCK_ROWS // (2 if self.paired else 1)

    @property
    def tiles(self) -> int:
        """Of a slot, each for the processors of a cluster."""
        return self.blocks // (self.workers * self.cluster)


def plan(weight: Packed, rows: int, processors: int, cluster: int = 1) -> Plan:
    """Tiles for slots of at most `rows`, one of SIZES."""
    blocks, depth = weight.words.shape[1:3]
    fitting = [w for w in ((4, 2) if rows <= 64 else (2,)) if blocks % w == 0]
    if not fitting:
        raise InputError(f"weights of {blocks * BLOCK_ROWS} x {depth * BLOCK_COLUMNS} fit no tile: an odd number of blocks")
    workers = fitting[0]
    cluster = cluster if blocks % (workers * cluster) == 0 and processors % cluster == 0 else 1
    w, x = workers * weight.lines * 128 * 4, rows * BLOCK_COLUMNS
    room = SHARED_BYTES - workers * batch_device.STAGING_BYTES - 1024
    # As many blocks of weights as leave room for nearly as many of rows.
    w_stages = next(n for n in range(MAX_STAGES, 0, -1) if (room - n * w) // x >= max(2, 2 * n - 3))
    x_stages = min(2 * w_stages, (room - w_stages * w) // x)
    return Plan(blocks, depth, weight.lines, weight.factor, weight.paired, workers, rows, w_stages, x_stages, processors, cluster)


def batch(
    x: BFloat16[Array, "T D"],
    weights: Float[Array, "T A"],
    groups: Groups,
    w13: Packed,
    w2: Packed,
    plans: tuple[Plan, Plan],
    rest: Float[Array, "T D"] | None = None,
    interpret: bool = False,
) -> BFloat16[Array, "T D"]:
    """The weighted sum of the chosen experts, of rows that `group` cut into slots of the plans' rows, aligned to ALIGN, plus
    `rest`.
    """
    rows = gather(x, groups.token, plans[0].rows)
    hidden = multiply(rows, groups, w13, plans[0], interpret=interpret)
    y = multiply(hidden, groups, w2, plans[1], interpret=interpret)
    return weigh(y, groups.place, weights, rest).astype(x.dtype)


def batch_shared(
    x: BFloat16[Array, "T D"], shared: Shared, plans: tuple[Plan, Plan], interpret: bool = False
) -> BFloat16[Array, "T D"]:
    """The weighted sum of the experts that every token takes."""
    tokens, most = x.shape[0], plans[0].rows
    first = jnp.arange(0, tokens, most, dtype=jnp.int32)
    every = Groups(
        token=jnp.arange(tokens, dtype=jnp.int32),
        place=jnp.zeros((0, 0), jnp.int32),
        expert=jnp.zeros_like(first),
        first=first,
        used=jnp.minimum(most, tokens - first),
        count=jnp.array([first.shape[0]], jnp.int32),
        counters=jnp.zeros(0, jnp.int32),
    )
    rows = gather(x, every.token, most)
    hidden = multiply(rows, every, shared.w13, plans[0], shared.weights, interpret)
    return multiply(hidden, every, shared.w2, plans[1], interpret=interpret)[:tokens]


def gather(x: BFloat16[Array, "T D"], token: Int32[Array, " R"], beyond: int) -> BFloat16[Array, "R+beyond D"]:
    """Rows of x by token, columns c, j, kh, lo/hi of every 64 in the order j, kh, c, lo/hi; and rows that a copy may run into."""
    pairs = lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 4, 4, 2, 2), jnp.int32)
    pairs = pairs.transpose(0, 1, 3, 4, 2).reshape(x.shape[0], -1)
    rows = jnp.take(pairs, jnp.pad(token, (0, beyond + -token.shape[0] % ALIGN)), axis=0, mode="clip")
    return lax.bitcast_convert_type(rows, jnp.bfloat16).reshape(rows.shape[0], x.shape[1])


def multiply(
    rows: BFloat16[Array, "R K"],
    groups: Groups,
    weight: Packed,
    plan: Plan,
    weights: Float[Array, "T J"] | None = None,
    interpret: bool = False,
) -> BFloat16[Array, "R N"]:
    """Each slot's rows times its expert's weights, and SwiGLU of gate and up if they are paired; `weights` of J experts side by
    side multiply what their gate and up make.
    """
    experts, shared = weight.words.shape[0], 0 if weights is None else weights.shape[1]
    kernel = plgpu.kernel(
        _Body(plan, batch_twin if interpret else batch_device, shared),
        out_type=jax.ShapeDtypeStruct((rows.shape[0], plan.width), jnp.bfloat16),
        scratch_types=_scratch(plan),
        grid=(plan.processors // plan.cluster,),
        grid_names=("processor",),
        **({"cluster": (plan.cluster,), "cluster_names": ("peer",)} if plan.cluster > 1 else {}),
        num_threads=plan.workers + 1,
        thread_name="warpgroup",
        kernel_name="expert_batch_up" if plan.paired else "expert_batch_down",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    words = weight.words.reshape(experts * plan.blocks, plan.depth * plan.lines, 128)
    scale = weight.scale2.astype(jnp.float32).reshape(-1)
    tables = (groups.expert, groups.first, groups.used, groups.count)
    return kernel(rows, words, scale, *tables, *(() if weights is None else (weights.astype(jnp.float32),)))


def _scratch(plan: Plan) -> dict[str, Any]:
    """Shared memory and barriers."""
    # jax leaves a method of theirs to a protocol, which pyright takes for abstract
    transforms = (
        plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    barriers: dict[str, Any] = {
        f"{ring}_full": plgpu.Barrier(num_arrivals=n, num_barriers=stages) for ring, n, stages in _rings(plan)
    }
    for ring, _, stages in _rings(plan):
        if ring == "x" and plan.cluster > 1:
            empty = plgpu.ClusterBarrier(collective_axes=("peer",), num_arrivals=plan.workers, num_barriers=stages)
        else:
            empty = plgpu.Barrier(num_arrivals=plan.workers, num_barriers=stages)
        barriers[f"{ring}_empty"] = empty
    return barriers | {
        "w_ring": plgpu.SMEM((plan.w_stages, plan.workers, plan.lines, 128), jnp.int32),
        "x_ring": plgpu.SMEM((plan.x_stages, plan.rows, BLOCK_COLUMNS // 2), jnp.bfloat16, transforms=transforms),
        "staging": plgpu.SMEM((plan.workers, batch_device.STAGING_BYTES // 4), jnp.int32),
    }


def _rings(plan: Plan) -> tuple[tuple[str, int, int], ...]:
    """Name, copies into a stage and stages."""
    return ("w", plan.workers, plan.w_stages), ("x", 1, plan.x_stages)


class _Body:
    """The kernel: called with references to operands and the result, and the shared memory."""

    def __init__(self, plan: Plan, ops: ModuleType, shared: int) -> None:
        self.plan, self.ops, self.shared = plan, ops, shared

    def __call__(
        self, x: Any, words: Any, scale: Any, expert: Any, first: Any, used: Any, count: Any, *more: Any, **scratch: Any
    ) -> None:
        p = self.plan
        *self.weights, out = more
        self.x, self.words, self.scale, self.out, self.s = x, words, scale, out, scratch
        self.expert, self.first, self.used = expert, first, used
        warpgroup, me = lax.axis_index("warpgroup"), lax.axis_index("processor")
        self.peer = lax.axis_index("peer") if p.cluster > 1 else 0
        processors = p.processors // p.cluster
        self.mine = lax.max(lax.div(count[0] * p.tiles - me + (processors - 1), processors), 0)

        @pl.when(warpgroup == p.workers)
        def _() -> None:
            self.ops.set_registers(-COPY_REGISTERS)

            @plgpu.warp_map
            def _(warp: Array) -> None:
                pl.when(warp == 0)(self._copy)

        @pl.when(warpgroup < p.workers)
        def _() -> None:
            self.ops.set_registers(MULTIPLY_REGISTERS[p.workers])
            self._each_tile(lambda *tile: self._tile(warpgroup, *tile))

    def _each_tile(self, work: Any) -> None:
        """work(first stage, slot, first block, width of the product) for every tile of this processor."""
        p = self.plan
        sizes = SIZES[p.rows]

        @pl.loop(0, self.mine)
        def _(t: Array) -> None:
            tile = lax.axis_index("processor") + t * (p.processors // p.cluster)
            slot, tile = lax.div(tile, p.tiles), lax.rem(tile, p.tiles)
            used = self.used[slot]
            for least, most in zip((0, *sizes[:-1]), sizes, strict=True):

                @pl.when((used > least) & (used <= most))
                def _(most: int = most) -> None:
                    work(t * p.depth, slot, (tile * p.cluster + self.peer) * p.workers, most)

    def _copy(self) -> None:
        p = self.plan

        def tile(base: Array, slot: Array, block: Array, size: int) -> None:
            row = lax.div(self.first[slot], ALIGN) * ALIGN  # says that it is a multiple
            block = self.expert[slot] * p.blocks + block

            @pl.loop(0, p.depth)
            def _(k: Array) -> None:
                stage = self._reserve("w", base + k)
                for worker in range(p.workers):
                    plgpu.copy_gmem_to_smem(
                        self.words.at[block + worker, pl.ds(k * p.lines, p.lines)],
                        self.s["w_ring"].at[stage, worker],
                        self.s["w_full"].at[stage],
                    )
                for half in (0, 1):
                    stage = self._reserve("x", 2 * (base + k) + half)
                    plgpu.copy_gmem_to_smem(
                        self.x.at[pl.ds(row, size), pl.ds(k * BLOCK_COLUMNS + 64 * half, 64)],
                        self.s["x_ring"].at[stage, pl.ds(0, size)],
                        self.s["x_full"].at[stage],
                        collective_axes="peer" if p.cluster > 1 else None,
                    )

        self._each_tile(tile)

        # The interpreter wants every phase of a barrier seen by who waits on it, and a peer must be done with us before we end.
        for ring, total, stages in (("w", self.mine * p.depth, p.w_stages), ("x", 2 * self.mine * p.depth, p.x_stages)):

            @pl.loop(lax.max(total - stages, 0), total)
            def _(i: Array, ring: str = ring, stages: int = stages) -> None:
                plgpu.barrier_wait(self.s[f"{ring}_empty"].at[lax.rem(i, stages)])

    def _reserve(self, ring: str, i: Array) -> Array:
        """The place in a ring of its stage i, once it is free."""
        stages = self.plan.w_stages if ring == "w" else self.plan.x_stages
        stage = lax.rem(i, stages)

        @pl.when(i >= stages)
        def _() -> None:
            plgpu.barrier_wait(self.s[f"{ring}_empty"].at[stage])

        return stage

    def _tile(self, me: Array, base: Array, slot: Array, block: Array, size: int) -> None:
        p = self.plan
        acc = self.ops.product(self.s, me, base, size, p)
        expert = self.expert[slot]
        if p.paired:
            scales = [self.scale[2 * expert + i] * p.factor for i in (0, 1)]
        else:
            scales = [self.scale[expert] * p.factor] * 2
        store = self.ops.store_tile(p.width, p.paired, self.shared)
        store(acc, self.s["staging"].at[me], self.out, self.first[slot], self.used[slot], block + me, *scales, *self.weights)
