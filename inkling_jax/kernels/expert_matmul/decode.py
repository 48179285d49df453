"""The feed-forward of a sparse layer for few rows an expert: one persistent launch that streams the packed weights of the experts
that are hit, and those of the shared experts that every token takes.

Each processor takes tiles by turns, first of gate and up, then of down. Four warpgroups multiply; a warp of a fifth copies
weights into a ring of stages in shared memory, and a sixth copies the rows of x that a slot has. A tile is 64 rows for each of
`side` warpgroups, and `split` of them share a tile's columns and add their sums at its end. The ring runs on from tile to tile
and from product to product, so that the weights of down are under way while gate and up end: only the rows wait for the hidden
values, slot by slot. Who writes the last rows of 64 output columns weighs and adds them.

Shared experts are one expert as wide as all of them, whose hidden values are weighed token by token.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from inkling_jax.kernels.expert_matmul import device, twin
from inkling_jax.kernels.expert_matmul.decode_plan import SHARED_ROWS, WORKERS, Plan, Product
from inkling_jax.kernels.expert_matmul.group import Groups
from inkling_jax.kernels.expert_matmul.pack import BLOCK_ROWS, Packed, Shared

# Of a thread: all six warpgroups begin with 80.
COPY_REGISTERS, MULTIPLY_REGISTERS = 48, 96


def decode(
    x: BFloat16[Array, "T D"],
    weights: Float[Array, "T A"],
    groups: Groups,
    w13: Packed,
    w2: Packed,
    plan: Plan,
    shared: Shared | None = None,
    launches: int = 1,
    interpret: bool = False,
) -> BFloat16[Array, "T D"]:
    """The weighted sum of the chosen experts, of rows that `group` cut into slots of `plan.up.rows`, and of the shared ones.

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
    types = {
        "hidden": jax.ShapeDtypeStruct((plan.pairs, plan.down.inner), jnp.bfloat16),
        "y": jax.ShapeDtypeStruct((plan.y_rows, plan.width), jnp.float32),
        "out": jax.ShapeDtypeStruct((plan.tokens, plan.width), jnp.bfloat16),
    }
    tables = ("count", "expert", "first", "used")
    up, hidden = ("x", "token", "w13", "up_scale"), ("hidden",)
    down = ("w2", "down_scale")
    total = ("counters", "place", "weights")
    if shared is not None and plan.shared_down is not None:
        operands |= {"shared_weights": shared.weights, "shared_w13": _flat(shared.w13), "shared_w2": _flat(shared.w2)}
        types["shared_hidden"] = jax.ShapeDtypeStruct((plan.tokens, plan.shared_down.inner), jnp.bfloat16)
        up, down = (*up, "shared_weights", "shared_w13"), (*down, "shared_w2")
        hidden = ("hidden", "shared_hidden")
    made = {name: types[name] for name in hidden}
    results = {"y": types["y"], "out": types["out"]}
    if launches == 1:
        return _launch(plan, interpret, operands, (*tables, *up, *down, *total), made | results)["out"]
    operands |= _launch(plan, interpret, operands, (*tables, *up), made)
    if launches == 2:
        return _launch(plan, interpret, operands, (*tables, *down, *total, *hidden), results)["out"]
    y = _launch(plan, interpret, operands, (*tables, *down, *hidden), {"y": types["y"]})["y"]
    return weigh(y, groups.place, weights, y[plan.pairs :] if shared is not None else None).astype(x.dtype)


def weigh(
    y: Float[Array, "R D"], place: Array, weights: Float[Array, "T A"], rest: Float[Array, "T D"] | None = None
) -> Float[Array, "T D"]:
    """sum_a weights[t, a] * y[place[t, a]] in the order of a, and `rest`, in float32; a negative place contributes nothing."""
    total = jnp.zeros((place.shape[0], y.shape[1]), jnp.float32)
    for a in range(place.shape[1]):
        row = jnp.take(y, jnp.maximum(place[:, a], 0), axis=0).astype(jnp.float32)
        total += jnp.where(place[:, a, None] < 0, 0, weights[:, a, None].astype(jnp.float32) * row)
    return total if rest is None else total + rest.astype(jnp.float32)


def _flat(weight: Packed) -> Array:
    """[E * O / 64, I / 128 * lines, 128]: what a stage copies of a block row is then one box."""
    experts, blocks, depth = weight.words.shape[:3]
    return weight.words.reshape(experts * blocks, depth * weight.lines, 128)


def _launch(plan: Plan, interpret: bool, operands: dict, names: tuple[str, ...], results: dict) -> dict[str, Array]:
    body = _Body(plan, twin if interpret else device, (*names, *results))
    name = "expert_" + "_".join(n for n in results if n in ("hidden", "out"))
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


@dataclasses.dataclass(frozen=True)
class _Task:
    """A processor's tiles of one product."""

    name: str  # of the product's barriers
    product: Product
    is_up: bool
    shared: bool
    base: Any  # stages before it
    mine: Any  # tiles
    first: Any  # of those


class _Slot(NamedTuple):
    """Rows of one expert."""

    expert: Any
    row: Any  # among the hidden values
    used: Any


class _Body:
    """The kernel: called with references to operands and results, and the shared memory."""

    def __init__(self, plan: Plan, ops: ModuleType, names: tuple[str, ...]) -> None:
        self.plan, self.ops, self.names = plan, ops, names
        self.has_up, self.has_down, self.has_sum = "w13" in names, "w2" in names, "out" in names

    def _products(self) -> list[tuple[str, Product, bool, bool]]:
        """Name, product, whether it is gate and up, and of shared experts, in the order of `Plan.products`."""
        p = self.plan
        every = [
            ("shared_up", p.shared_up, True, True),
            ("up", p.up, True, False),
            ("down", p.down, False, False),
            ("shared_down", p.shared_down, False, True),
        ]
        return [
            (name, product, is_up, shared)
            for name, product, is_up, shared in every
            if product is not None and (self.has_up if is_up else self.has_down)
        ]

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        p = self.plan
        found: dict[str, Any] = {
            "w_ring": plgpu.SMEM((p.stages, WORKERS, p.lines, 128), jnp.int32),
            "x_ring": plgpu.SMEM((p.stages, p.x_elements), jnp.bfloat16),
            "handed": plgpu.SMEM((p.handed_elements,), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=WORKERS + 1, num_barriers=p.stages),
            "empty": plgpu.Barrier(num_arrivals=WORKERS, num_barriers=p.stages),
        }
        for name, product, _is_up, _shared in self._products():
            if product.handed:
                found[f"{name}_put"] = plgpu.Barrier(num_arrivals=product.handed, num_barriers=product.turns)
                found[f"{name}_got"] = plgpu.Barrier(num_arrivals=product.side, num_barriers=product.turns)
        return found

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        self.r = dict(zip(self.names, refs, strict=True)) | scratch
        warpgroup = lax.axis_index("warpgroup")
        self.tasks = self._tasks()

        @pl.when(warpgroup == WORKERS)
        def _() -> None:
            self.ops.set_registers(-COPY_REGISTERS)

            @plgpu.warp_map
            def _(warp: Array) -> None:
                pl.when(warp == 0)(self._copy_weights)

        @pl.when(warpgroup == WORKERS + 1)
        def _() -> None:
            self.ops.set_registers(-COPY_REGISTERS)
            self._copy_rows()

        @pl.when(warpgroup < WORKERS)
        def _() -> None:
            self.ops.set_registers(MULTIPLY_REGISTERS)
            for task in self.tasks:
                self._multiply(warpgroup, task)
            if self.has_sum and not self.plan.shared:
                self._sum_nothing(warpgroup)

    def _tasks(self) -> list[_Task]:
        g = self.plan.processors
        me, slots = lax.axis_index("processor"), self.r["count"][0]
        found, base, done = [], jnp.int32(0), jnp.int32(0)
        total = jnp.int32(0)
        for name, product, is_up, shared in self._products():
            first = me + done * g - total
            total = total + (jnp.int32(self.plan.shared_slots) if shared else slots) * product.tiles
            mine = lax.max(lax.div(total - me + (g - 1), g) - done, 0)
            found.append(_Task(name, product, is_up, shared, base, mine, first))
            base, done = base + mine * product.steps, done + mine
        return found

    def _tile(self, task: _Task, t: Array) -> tuple[Array, Array]:
        """Slot, and tile of it."""
        tile = task.first + t * self.plan.processors
        return lax.div(tile, task.product.tiles), lax.rem(tile, task.product.tiles)

    def _slot(self, task: _Task, slot: Array) -> _Slot:
        if not task.shared:
            return _Slot(self.r["expert"][slot], self.r["first"][slot], self.r["used"][slot])
        row = slot * SHARED_ROWS
        return _Slot(jnp.int32(0), row, lax.min(jnp.int32(SHARED_ROWS), self.plan.tokens - row))

    def _reserve(self, i: Array) -> Array:
        """The place in the ring of stage i, once it is free."""
        stage = lax.rem(i, self.plan.stages)

        @pl.when(i >= self.plan.stages)
        def _() -> None:
            plgpu.barrier_wait(self.r["empty"].at[stage])

        return stage

    def _drain(self) -> None:
        """Wait for the last stages to be freed: the interpreter wants every phase of a barrier seen by who waits on it."""
        last = self.tasks[-1]
        total = last.base + last.mine * last.product.steps

        @pl.loop(lax.max(total - self.plan.stages, 0), total)
        def _(i: Array) -> None:
            plgpu.barrier_wait(self.r["empty"].at[lax.rem(i, self.plan.stages)])

    def _copy_weights(self) -> None:
        for task in self.tasks:
            product = task.product
            source = self.r[("shared_" if task.shared else "") + ("w13" if task.is_up else "w2")]

            @pl.loop(0, task.mine)
            def _(t: Array, task=task, product=product, source=source) -> None:
                slot, tile = self._tile(task, t)
                row = self._slot(task, slot).expert * product.blocks + tile * product.side

                @pl.loop(0, product.steps)
                def _(k: Array) -> None:
                    stage = self._reserve(task.base + t * product.steps + k)
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
        for task in self.tasks:
            product = task.product
            source = self.r["x" if task.is_up else "shared_hidden" if task.shared else "hidden"]
            gather = task.is_up and not task.shared
            token = self.r["token" if gather else "first"]
            load = self.ops.load_rows(product.x_columns, product.x_rows, source.shape[1], gather)

            @pl.loop(0, task.mine)
            def _(t: Array, task=task, product=product, source=source, token=token, load=load) -> None:
                slot, _tile = self._tile(task, t)
                _expert, row, used = self._slot(task, slot)
                if self.has_up and not task.is_up:
                    made = p.shared_up if task.shared else p.up
                    assert made is not None
                    index = slot + p.slots if task.shared else slot
                    self.ops.await_count(self.r["counters"], index, jnp.int32(made.blocks))

                @pl.loop(0, product.steps)
                def _(k: Array) -> None:
                    i = t * product.steps + k
                    stage = self._reserve(task.base + i)
                    load(source, token, self.r["x_ring"].at[stage], row, used, k * product.x_columns)

                    @pl.when(i >= p.behind)
                    def _() -> None:
                        self.ops.await_rows(p.behind)
                        plgpu.barrier_arrive(self.r["full"].at[lax.rem(task.base + i - p.behind, p.stages)])

            # All are announced before the next product's rows are waited for, which other processors make from ours.
            self.ops.await_rows(0)
            total = task.base + task.mine * product.steps

            @pl.loop(lax.max(total - p.behind, task.base), total)
            def _(i: Array) -> None:
                plgpu.barrier_arrive(self.r["full"].at[lax.rem(i, p.stages)])

        self._drain()

    def _multiply(self, me: Array, task: _Task) -> None:
        p, product = self.plan, task.product
        n, q = lax.rem(me, product.side), lax.div(me, product.side)
        multiply = self.ops.multiply_unit(product)
        add_handed = self.ops.add_handed(product.rows)

        @pl.loop(0, task.mine)
        def _(t: Array) -> None:
            slot, tile = self._tile(task, t)

            def step(k: Array, acc: Array) -> Array:
                stage = lax.rem(task.base + t * product.steps + k, p.stages)
                plgpu.barrier_wait(self.r["full"].at[stage])
                words = self.r["w_ring"].at[stage, me, pl.ds(0, product.step * product.lines)]
                acc = multiply(acc, words, self.r["x_ring"].at[stage], q)
                plgpu.barrier_arrive(self.r["empty"].at[stage])
                return acc

            acc = lax.fori_loop(0, product.steps, step, self._zeros(product.rows))
            block = tile * product.side + n
            if product.split == 1:
                self._store(acc, task, slot, block)
                return
            put, got = self.r[f"{task.name}_put"], self.r[f"{task.name}_got"]
            turn = lax.rem(t, product.turns)

            def place(i: Any) -> Any:
                size = BLOCK_ROWS * product.rows
                return self.r["handed"].at[pl.ds((turn * product.handed + i) * size, size)]

            @pl.when(q > 0)
            def _() -> None:
                @pl.when(t >= product.turns)
                def _() -> None:
                    plgpu.barrier_wait(got.at[turn])

                self.ops.put_handed(acc, place((q - 1) * product.side + n))
                plgpu.barrier_arrive(put.at[turn])

            @pl.when(q == 0)
            def _() -> None:
                plgpu.barrier_wait(put.at[turn])
                total = acc
                for i in range(product.split - 1):
                    total = add_handed(total, place(i * product.side + n))
                plgpu.barrier_arrive(got.at[turn])
                self._store(total, task, slot, block)

        if product.split > 1:
            # Then all that was handed over has been taken, and the next product may use the room.
            @pl.when(q > 0)
            def _() -> None:
                @pl.loop(lax.max(task.mine - product.turns, 0), task.mine)
                def _(t: Array) -> None:
                    plgpu.barrier_wait(self.r[f"{task.name}_got"].at[lax.rem(t, product.turns)])

    def _zeros(self, rows: int) -> Array:
        zeros = jnp.zeros((BLOCK_ROWS, rows), jnp.float32)
        return zeros if self.ops is twin else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)

    def _store(self, acc: Array, task: _Task, slot: Array, block: Array) -> None:
        p, r = self.plan, self.r
        expert, row, used = self._slot(task, slot)
        if task.is_up:
            if task.shared:
                assert p.shared_down is not None
                store = self.ops.store_shared_hidden(p.shared_down.inner, p.shared)
                store(acc, r["shared_hidden"], row, used, block, r["shared_weights"])
            else:
                gate_scale, up_scale = (r["up_scale"][expert, i] * p.up.factor for i in (0, 1))
                store = self.ops.store_hidden(p.down.inner)
                store(acc, r["hidden"], row, used, block, gate_scale, up_scale)
            if self.has_down:
                self.ops.announce(r["counters"], slot + p.slots if task.shared else slot)
            return
        row, scale = (row + p.pairs, jnp.float32(1)) if task.shared else (row, r["down_scale"][expert] * p.down.factor)
        self.ops.store_rows(p.width)(acc, r["y"], row, used, block * BLOCK_ROWS, scale)
        if self.has_sum:
            combine = self.ops.combine(p)
            combine(r["counters"], block * BLOCK_ROWS, r["count"][0], r["y"], r["place"], r["weights"], r["out"])

    def _sum_nothing(self, me: Array) -> None:
        p, r = self.plan, self.r
        worker = lax.axis_index("processor") * WORKERS + me

        @pl.when((r["count"][0] == 0) & (worker < p.down.blocks))
        def _() -> None:
            self.ops.combine_nothing(p)(worker * BLOCK_ROWS, r["y"], r["place"], r["weights"], r["out"])
