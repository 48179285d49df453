"""The routed feed-forward for few rows an expert: one persistent launch that streams the packed weights of the experts that are
hit.

Each processor takes tiles by turns, first of gate and up, then of down. Four warpgroups multiply; a warp of a fifth copies
weights into a ring of stages in shared memory, and a sixth copies the rows of x that a slot has. A tile is 64 rows for each of
`side` warpgroups, and `split` of them share a tile's columns and add their sums at its end. The ring runs on from tile to tile
and from product to product, so that the weights of down are under way while gate and up end: only the rows wait for the hidden
values, slot by slot. Who writes the last rows of 64 output columns weighs and adds them.
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
from jaxtyping import Array, BFloat16, Float

from inkling_jax.errors import InputError
from inkling_jax.kernels.expert_matmul import device, twin
from inkling_jax.kernels.expert_matmul.group import Groups
from inkling_jax.kernels.expert_matmul.pack import BF16_LINES, BLOCK_COLUMNS, BLOCK_ROWS, Packed

WORKERS = 4  # warpgroups that multiply
SHARED_BYTES = 232448  # of a Hopper processor
MAX_STAGES = 8


@dataclasses.dataclass(frozen=True)
class Product:
    """How weights of `blocks` x `depth` blocks are cut into tiles and stages."""

    blocks: int  # of 64 rows
    depth: int  # blocks of 128 columns
    split: int  # warpgroups that share the columns of a tile
    step: int  # blocks of columns that a warpgroup takes in a stage
    lines: int  # of a block
    factor: float  # beside the scales of the weights

    @property
    def side(self) -> int:
        return WORKERS // self.split

    @property
    def tiles(self) -> int:
        return self.blocks // self.side

    @property
    def steps(self) -> int:
        return self.depth // (self.split * self.step)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that shapes the kernel."""

    up: Product
    down: Product
    tokens: int
    choices: int
    slots: int
    rows: int  # the most of a slot
    x_rows: int  # that a stage has room for
    stages: int
    behind: int  # stages that the copying of rows may lag behind before they are waited for
    processors: int

    @property
    def lines(self) -> int:
        """Of the weights of a stage, for a warpgroup."""
        return max(p.step * p.lines for p in (self.up, self.down))

    @property
    def x_columns(self) -> int:
        return max(p.split * p.step for p in (self.up, self.down)) * BLOCK_COLUMNS

    @property
    def width(self) -> int:
        return self.down.blocks * BLOCK_ROWS

    @property
    def hidden(self) -> int:
        return self.down.depth * BLOCK_COLUMNS

    @property
    def counters(self) -> int:
        return self.slots + self.down.blocks + 1


def plan_product(weight: Packed, splits: tuple[int, ...], steps: tuple[int, ...]) -> Product:
    """The first of `steps`, and of `splits`, that fits."""
    blocks, depth = weight.words.shape[1:3]
    for step in steps if weight.lines < BF16_LINES else (1,):
        for split in splits:
            if tileable(blocks, depth, step, split):
                return Product(blocks, depth, split, step, weight.lines, weight.factor)
    raise InputError(f"weights of {blocks * BLOCK_ROWS} x {depth * BLOCK_COLUMNS} fit no tile of the decode kernel")


def tileable(blocks: int, depth: int, step: int = 1, split: int | None = None) -> bool:
    """Whether such tiles cover so many blocks exactly; by default whether any do."""
    splits = (1, 2, 4) if split is None else (split,)
    return any(blocks % (WORKERS // s) == 0 and depth % (s * step) == 0 for s in splits)


def plan(
    w13: Packed,
    w2: Packed,
    tokens: int,
    choices: int,
    slots: int,
    rows: int,
    processors: int,
    steps: tuple[int, ...] = (2, 3, 1),
    splits: tuple[int, ...] = (),
    behind: int = 1,
) -> Plan:
    """Tiles for so many tokens, of at most `rows` (8 or 16) to a slot: the fewer experts can be hit, the narrower the tiles, so
    that every processor has some.
    """
    splits = splits or ((4, 2, 1) if slots <= 12 else (2, 1, 4))
    up, down = (plan_product(w, splits, steps) for w in (w13, w2))
    x_rows = min(rows, 1 << (tokens - 1).bit_length())
    result = Plan(up, down, tokens, choices, slots, rows, x_rows, 1, behind, processors)
    stage = WORKERS * result.lines * 128 * 4 + x_rows * result.x_columns * 2
    partial = sum(_partials(p) * 256 * rows for p in (up, down))
    stages = min(MAX_STAGES, (SHARED_BYTES - partial - 1024) // stage)
    return dataclasses.replace(result, stages=stages, behind=min(behind, stages - 1))


def _partials(product: Product) -> int:
    """Accumulators that warpgroups hand over at the end of a tile, twice, so that the next tile need not wait."""
    return 2 * max(1, (product.split - 1) * product.side)


def decode(
    x: BFloat16[Array, "T D"],
    weights: Float[Array, "T A"],
    groups: Groups,
    w13: Packed,
    w2: Packed,
    plan: Plan,
    launches: int = 1,
    interpret: bool = False,
) -> BFloat16[Array, "T D"]:
    """The weighted sum of the chosen experts, of rows that `group` cut into slots of `plan.rows`.

    `launches`: 1, or 2 with a launch each for gate-and-up and for down, or 3 with the sum apart too, which is what the
    interpreter runs.
    """
    operands = dict(groups._asdict()) | {
        "x": x,
        "weights": weights.astype(jnp.float32),
        "w13": _flat(w13),
        "w2": _flat(w2),
        "up_scale": w13.scale2.astype(jnp.float32),
        "down_scale": w2.scale2.astype(jnp.float32),
    }
    rows = plan.tokens * plan.choices
    types = {
        "hidden": jax.ShapeDtypeStruct((rows, plan.hidden), jnp.bfloat16),
        "y": jax.ShapeDtypeStruct((rows, plan.width), jnp.float32),
        "out": jax.ShapeDtypeStruct((plan.tokens, plan.width), jnp.bfloat16),
    }
    tables = ("count", "expert", "first", "used")
    up = ("x", "token", "w13", "up_scale")
    down = ("w2", "down_scale")
    total = ("counters", "place", "weights")
    if launches == 1:
        return _launch(plan, interpret, operands, (*tables, *up, *down, *total), types)["out"]
    made = _launch(plan, interpret, operands, (*tables, *up), {"hidden": types["hidden"]})
    operands |= made
    if launches == 2:
        results = {"y": types["y"], "out": types["out"]}
        return _launch(plan, interpret, operands, (*tables, *down, *total, "hidden"), results)["out"]
    y = _launch(plan, interpret, operands, (*tables, *down, "hidden"), {"y": types["y"]})["y"]
    return weigh(y, groups.place, weights).astype(x.dtype)


def weigh(y: Float[Array, "R D"], place: Array, weights: Float[Array, "T A"]) -> Float[Array, "T D"]:
    """sum_a weights[t, a] * y[place[t, a]] in the order of a, in float32; a negative place contributes nothing."""
    total = jnp.zeros((place.shape[0], y.shape[1]), jnp.float32)
    for a in range(place.shape[1]):
        row = jnp.take(y, jnp.maximum(place[:, a], 0), axis=0).astype(jnp.float32)
        total += jnp.where(place[:, a, None] < 0, 0, weights[:, a, None].astype(jnp.float32) * row)
    return total


def _flat(weight: Packed) -> Array:
    """[E * O / 64, I / 128 * lines, 128]: what a stage copies of a block row is then one box."""
    experts, blocks, depth = weight.words.shape[:3]
    return weight.words.reshape(experts * blocks, depth * weight.lines, 128)


def _launch(plan: Plan, interpret: bool, operands: dict, names: tuple[str, ...], results: dict) -> dict[str, Array]:
    body = _Body(plan, twin if interpret else device, (*names, *results))
    name = "expert_" + "_".join(n for n in results if n != "y")
    kernel = plgpu.kernel(
        body,
        out_type=tuple(results.values()),
        scratch_types=body.scratch(),
        grid=(plan.processors,),
        grid_names=("processor",),
        num_threads=WORKERS + 2,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    return dict(zip(results, kernel(*(operands[n] for n in names)), strict=True))


class _Body:
    """The kernel: called with references to operands and results, and the shared memory."""

    def __init__(self, plan: Plan, ops: ModuleType, names: tuple[str, ...]) -> None:
        self.plan, self.ops, self.names = plan, ops, names
        self.has_up, self.has_down, self.has_sum = "w13" in names, "w2" in names, "out" in names

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        p = self.plan
        products = {"up": p.up} if self.has_up else {}
        products |= {"down": p.down} if self.has_down else {}
        found: dict[str, Any] = {
            "w_ring": plgpu.SMEM((p.stages, WORKERS, p.lines, 128), jnp.int32),
            "x_ring": plgpu.SMEM((p.stages, p.x_rows, p.x_columns), jnp.bfloat16),
            "full": plgpu.Barrier(num_arrivals=WORKERS + 1, num_barriers=p.stages),
            "empty": plgpu.Barrier(num_arrivals=WORKERS, num_barriers=p.stages),
        }
        for name, product in products.items():
            partials = max(1, (product.split - 1) * product.side)
            found[f"{name}_partial"] = plgpu.SMEM((2, partials, BLOCK_ROWS * p.rows), jnp.float32)
            found[f"{name}_put"] = plgpu.Barrier(num_arrivals=partials, num_barriers=2)
            found[f"{name}_got"] = plgpu.Barrier(num_arrivals=product.side, num_barriers=2)
        return found

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        self.r = dict(zip(self.names, refs, strict=True)) | scratch
        warpgroup = lax.axis_index("warpgroup")
        self.work = self._work()

        @pl.when(warpgroup == WORKERS)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: Array) -> None:
                pl.when(warp == 0)(self._copy_weights)

        pl.when(warpgroup == WORKERS + 1)(self._copy_rows)

        @pl.when(warpgroup < WORKERS)
        def _() -> None:
            for base, mine, first, product, is_up in self.work:
                self._multiply(warpgroup, base, mine, first, product, is_up)
            if self.has_sum:
                self._sum_nothing(warpgroup)

    def _work(self) -> list[tuple[Any, Any, Any, Product, bool]]:
        """For each product: stages before it, this processor's tiles, the first, the product, whether it is gate and up."""
        p, g = self.plan, self.plan.processors
        me, slots = lax.axis_index("processor"), self.r["count"][0]
        found, base, done = [], jnp.int32(0), jnp.int32(0)
        total = jnp.int32(0)
        for product, is_up, here in ((p.up, True, self.has_up), (p.down, False, self.has_down)):
            if here:
                first = me + done * g - total
                total = total + slots * product.tiles
                mine = lax.max(lax.div(total - me + (g - 1), g) - done, 0)
                found.append((base, mine, first, product, is_up))
                base, done = base + mine * product.steps, done + mine
        return found

    def _tile(self, first: Array, t: Array, product: Product) -> tuple[Array, Array]:
        tile = first + t * self.plan.processors
        return lax.div(tile, product.tiles), lax.rem(tile, product.tiles)

    def _reserve(self, i: Array) -> Array:
        """The place in the ring of stage i, once it is free."""
        stage = lax.rem(i, self.plan.stages)

        @pl.when(i >= self.plan.stages)
        def _() -> None:
            plgpu.barrier_wait(self.r["empty"].at[stage])

        return stage

    def _drain(self) -> None:
        """Wait for the last stages to be freed: the interpreter wants every phase of a barrier seen by who waits on it."""
        base, mine, _first, product, _is_up = self.work[-1]
        total = base + mine * product.steps

        @pl.loop(lax.max(total - self.plan.stages, 0), total)
        def _(i: Array) -> None:
            plgpu.barrier_wait(self.r["empty"].at[lax.rem(i, self.plan.stages)])

    def _copy_weights(self) -> None:
        for base, mine, first, product, is_up in self.work:
            source = self.r["w13" if is_up else "w2"]

            @pl.loop(0, mine)
            def _(t: Array, base=base, first=first, product=product, source=source) -> None:
                slot, tile = self._tile(first, t, product)
                row = self.r["expert"][slot] * product.blocks + tile * product.side

                @pl.loop(0, product.steps)
                def _(k: Array) -> None:
                    stage = self._reserve(base + t * product.steps + k)
                    for unit in range(WORKERS):
                        n, q = unit % product.side, unit // product.side
                        lines = product.step * product.lines
                        plgpu.copy_gmem_to_smem(
                            source.at[row + n, pl.ds((k * product.split + q) * lines, lines)],
                            self.r["w_ring"].at[stage, unit, pl.ds(0, lines)],
                            self.r["full"].at[stage],
                        )

        self._drain()

    def _copy_rows(self) -> None:
        p = self.plan
        for base, mine, first, product, is_up in self.work:
            source = self.r["x" if is_up else "hidden"]
            columns = product.split * product.step * BLOCK_COLUMNS
            load = self.ops.load_rows(columns, p.x_rows, p.x_columns, source.shape[1], is_up)

            @pl.loop(0, mine)
            def _(
                t: Array, base=base, first=first, product=product, is_up=is_up, source=source, columns=columns, load=load
            ) -> None:
                slot, _column = self._tile(first, t, product)
                row, used = self.r["first"][slot], self.r["used"][slot]
                if self.has_up and not is_up:
                    self.ops.await_count(self.r["counters"], slot, jnp.int32(p.up.blocks))

                @pl.loop(0, product.steps)
                def _(k: Array) -> None:
                    i = t * product.steps + k
                    stage = self._reserve(base + i)
                    token = self.r["token"] if is_up else self.r["first"]
                    load(source, token, self.r["x_ring"].at[stage], row, used, k * columns)

                    @pl.when(i >= p.behind)
                    def _() -> None:
                        self.ops.await_rows(p.behind)
                        plgpu.barrier_arrive(self.r["full"].at[lax.rem(base + i - p.behind, p.stages)])

            # All are announced before the next product's rows are waited for, which other processors make from ours.
            self.ops.await_rows(0)
            total = base + mine * product.steps

            @pl.loop(lax.max(total - p.behind, base), total)
            def _(i: Array) -> None:
                plgpu.barrier_arrive(self.r["full"].at[lax.rem(i, p.stages)])

        self._drain()

    def _multiply(self, me: Array, base: Array, mine: Array, first: Array, product: Product, is_up: bool) -> None:
        p, name = self.plan, "up" if is_up else "down"
        n, q = lax.rem(me, product.side), lax.div(me, product.side)
        multiply = self.ops.multiply_unit(product.step, product.lines, p.rows, p.x_rows, p.x_columns)
        put, got = self.r[f"{name}_put"], self.r[f"{name}_got"]
        add_partial, columns = self.ops.add_partial(p.rows), product.step * BLOCK_COLUMNS

        @pl.loop(0, mine)
        def _(t: Array) -> None:
            slot, tile = self._tile(first, t, product)

            def step(k: Array, acc: Array) -> Array:
                stage = lax.rem(base + t * product.steps + k, p.stages)
                plgpu.barrier_wait(self.r["full"].at[stage])
                words = self.r["w_ring"].at[stage, me, pl.ds(0, product.step * product.lines)]
                acc = multiply(acc, words, self.r["x_ring"].at[stage, :, pl.ds(q * columns, columns)])
                plgpu.barrier_arrive(self.r["empty"].at[stage])
                return acc

            acc = lax.fori_loop(0, product.steps, step, self._zeros())
            block = tile * product.side + n
            if product.split == 1:
                self._store(acc, slot, block, is_up)
                return
            partial, turn = self.r[f"{name}_partial"], lax.rem(t, 2)

            @pl.when(q > 0)
            def _() -> None:
                @pl.when(t >= 2)
                def _() -> None:
                    plgpu.barrier_wait(got.at[turn])

                self.ops.put_partial(acc, partial.at[turn, (q - 1) * product.side + n])
                plgpu.barrier_arrive(put.at[turn])

            @pl.when(q == 0)
            def _() -> None:
                plgpu.barrier_wait(put.at[turn])
                total = acc
                for i in range(product.split - 1):
                    total = add_partial(total, partial.at[turn, i * product.side + n])
                plgpu.barrier_arrive(got.at[turn])
                self._store(total, slot, block, is_up)

        if product.split > 1:

            @pl.when(q > 0)
            def _() -> None:
                @pl.loop(lax.max(mine - 2, 0), mine)
                def _(t: Array) -> None:
                    plgpu.barrier_wait(got.at[lax.rem(t, 2)])

    def _zeros(self) -> Array:
        zeros = jnp.zeros((BLOCK_ROWS, self.plan.rows), jnp.float32)
        return zeros if self.ops is twin else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)

    def _store(self, acc: Array, slot: Array, block: Array, is_up: bool) -> None:
        p, r = self.plan, self.r
        expert, row, used = r["expert"][slot], r["first"][slot], r["used"][slot]
        if is_up:
            store = self.ops.store_hidden(p.hidden)
            gate_scale, up_scale = (r["up_scale"][expert, i] * p.up.factor for i in (0, 1))
            store(acc, r["hidden"], row, used, block, gate_scale, up_scale)
            if self.has_down:
                self.ops.announce(r["counters"], slot)
            return
        self.ops.store_rows(p.width)(acc, r["y"], row, used, block * BLOCK_ROWS, r["down_scale"][expert] * p.down.factor)
        if self.has_sum:
            combine = self.ops.combine(p.tokens, p.choices, p.width, p.slots)
            combine(r["counters"], block * BLOCK_ROWS, r["count"][0], r["y"], r["place"], r["weights"], r["out"])

    def _sum_nothing(self, me: Array) -> None:
        p, r = self.plan, self.r
        nothing = self.ops.combine_nothing(p.tokens, p.choices, p.width)
        worker = lax.axis_index("processor") * WORKERS + me

        @pl.when((r["count"][0] == 0) & (worker < p.down.blocks))
        def _() -> None:
            nothing(worker * BLOCK_ROWS, r["y"], r["place"], r["weights"], r["out"])
