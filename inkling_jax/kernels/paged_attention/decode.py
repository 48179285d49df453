"""Decode on Hopper: a few query tokens a row against the paged cache, one pass over the keys at the speed of memory.

A program (one a processor) owns a run of key tiles that may begin and end inside an item, a (row, key head). One warpgroup
loads; two compute; of keys in fp8 a fourth makes bfloat16 in between. Query heads that share a key head, and the query
tokens of a row, are the rows of one product, 64 of them. The bias of a token is 16 more columns of the product q.k (see
bias.py), only on tiles that the extent reaches.

An item that one program does alone is written to the output; otherwise its parts go to `partial` and merge.py combines them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from inkling_jax.kernels.paged_attention.bias import EDGE_ROWS, KEY_TILE
from inkling_jax.kernels.paged_attention.decode_shape import CODE_STAGES, COMPUTE, DecodeShape
from inkling_jax.kernels.paged_attention.mosaic import (
    LOG2E,
    NEVER,
    ROWS,
    WGMMA,
    accumulate,
    by_row,
    drain,
    full,
    int32,
    iota,
    operand,
    scaled,
    softmax_weights,
)
from inkling_jax.kernels.paged_attention.plan import DecodePlan, tile_range
from inkling_jax.kernels.paged_attention.widen import pass_on, release_codes, widen
from inkling_jax.kernels.pages import Pages, parts


class _Item:
    """One (row, key head) as far as this program does it; every field is a scalar of the kernel."""

    def __init__(self, shape: DecodeShape, refs: dict[str, Any], row: Array, skip: Array, left: Array):
        self.start, self.count, self.length = refs["start"][row], refs["count"][row], refs["length"][row]
        self.first_query = self.length - self.count  # position
        first, tiles = tile_range(self.count, self.length, shape.window)
        self.first_tile = first + skip
        self.tiles = jnp.minimum(tiles - skip, left)
        self.whole = self.tiles == tiles
        self.begins = skip == 0
        if shape.window is None:  # tiles that end before the extent of the first query begins need no bias and no mask
            plain = lax.div(jnp.maximum(self.first_query - shape.extent + 1, 0), int32(KEY_TILE)) - self.first_tile
            self.plain_tiles = jnp.clip(plain, 0, self.tiles)
        else:
            self.plain_tiles = int32(0)


def _walk(shape: DecodeShape, refs: dict[str, Any], visit: Any) -> None:
    """visit(item, row, head, tiles done before, items done before) for each item of this program."""
    program = lax.axis_index("program")

    def step(state: tuple[Array, ...]) -> tuple[Array, ...]:
        row, head, skip, left, done, items = state
        item = _Item(shape, refs, row, skip, left)
        visit(item, row, head, done, items)
        last_head = head + 1 == shape.kv_heads
        row = jnp.where(last_head, refs["next_row"][row], row)
        head = jnp.where(last_head, 0, head + 1)
        return row, head, int32(0), left - item.tiles, done + item.tiles, items + 1

    begin = tuple(refs[name][program] for name in ("row", "head", "skip", "tiles"))
    lax.while_loop(lambda state: state[3] > 0, step, (*begin, int32(0), int32(0)))


def _load(shape: DecodeShape, refs: dict[str, Any], s: dict[str, Any]) -> None:
    """The loading warpgroup: every copy of the program, as far ahead as slots are free."""
    plgpu.set_max_registers(40, action="decrease")
    width = refs["table"].shape[1]
    halves = shape.page // KEY_TILE
    form, stages = ("_codes", CODE_STAGES) if shape.fp8 else ("", shape.stages)

    def copy_keys(name: str, which: str, page: Array, head: Array, inside: Any, slot: Array) -> None:
        full = s[f"{name}{form}_full"].at[slot]
        plgpu.copy_gmem_to_smem(refs[f"{which}_pages"].at[page, head, inside], s[name + form].at[slot], full)
        if shape.fp8:
            plgpu.copy_gmem_to_smem(refs[f"{which}_scale"].at[page, head, inside], s[f"{name}_codes_scale"].at[slot], full)

    def page_of(row: Array, tile: Array) -> Array:
        return refs["table"][row, lax.rem(lax.div(tile, int32(halves)), int32(width))]

    def copy_queries(item: _Item, head: Array, items: Array) -> None:
        slot = lax.rem(items, int32(shape.query_slots))
        plgpu.barrier_wait(s["query_free"].at[slot])
        for t in range(shape.queries):  # past the last token the copy fills zeros
            for name in ("query", "rel"):
                source = refs[name].at[item.start + t, pl.ds(head * shape.share, shape.share)]
                target = s[name].at[slot, pl.ds(t * shape.share, shape.share)]
                plgpu.copy_gmem_to_smem(source, target, s["query_full"].at[slot])

    def copy_bias(item: _Item, tile: Array, ring: Array) -> None:
        slot = lax.rem(ring, int32(shape.bias_slots))
        plgpu.barrier_wait(s["bias_free"].at[slot])
        for t in range(shape.queries):
            row = tile * KEY_TILE - (item.first_query + t) + (shape.extent - 1 + EDGE_ROWS)
            row = jnp.maximum(row, 0)  # further back than the extent: zeros
            shift = lax.rem(row, int32(8))
            source = refs["bias_table"].at[shift, pl.ds(pl.multiple_of(row - shift, 8), KEY_TILE)]
            plgpu.copy_gmem_to_smem(source, s["table_rows"].at[slot, t], s["bias_full"].at[slot])

    def visit(item: _Item, row: Array, head: Array, done: Array, items: Array) -> None:
        copy_queries(item, head, items)

        def tile_step(i: Array, page: Array) -> Array:
            # The next page number is fetched before this tile waits, so that its latency is hidden.
            following = page_of(row, item.first_tile + jnp.minimum(i + 1, item.tiles - 1))
            tile, ring = item.first_tile + i, done + i
            slot = lax.rem(ring, int32(stages))
            inside = pl.ds(pl.multiple_of(lax.rem(tile, int32(halves)) * KEY_TILE, KEY_TILE), KEY_TILE)
            plgpu.barrier_wait(s[f"keys{form}_free"].at[slot])
            copy_keys("keys", "k", page, head, inside, slot)
            pl.when(i >= item.plain_tiles)(lambda: copy_bias(item, tile, ring))
            plgpu.barrier_wait(s[f"values{form}_free"].at[slot])
            copy_keys("values", "v", page, head, inside, slot)
            return following

        lax.fori_loop(0, item.tiles, tile_step, page_of(row, item.first_tile))

    _walk(shape, refs, visit)
    drain(s, f"keys{form}_free", f"values{form}_free", "bias_free", "query_free")


def _widen(shape: DecodeShape, refs: dict[str, Any], s: dict[str, Any]) -> None:
    """The warpgroup between: bfloat16 of every tile of codes, in the order in which they come."""
    plgpu.set_max_registers(40, action="decrease")
    release_codes(s, CODE_STAGES)
    make = widen(KEY_TILE, shape.width, shape.interpret)

    def visit(item: _Item, row: Array, head: Array, done: Array, items: Array) -> None:
        def tile_step(i: Array, _: None) -> None:
            present = item.length - (item.first_tile + i) * KEY_TILE
            codes, slot = (lax.rem(done + i, int32(stages)) for stages in (CODE_STAGES, shape.stages))
            for name in ("keys", "values"):
                pass_on(make, s, name, codes, slot, int32(0), present)

        lax.fori_loop(0, item.tiles, tile_step, None)

    _walk(shape, refs, visit)
    drain(s, "keys_free", "values_free")


class _Compute:
    """One of the two multiplying warpgroups."""

    def __init__(self, shape: DecodeShape, refs: dict[str, Any], s: dict[str, Any], group: Array):
        self.shape, self.refs, self.s, self.group = shape, refs, s, group
        self.scale = LOG2E / shape.width

    def run(self) -> None:
        """All items of the program."""
        shape, s = self.shape, self.s
        self._release_all()
        plgpu.set_max_registers(216 if shape.fp8 else 232, action="increase")
        _walk(shape, self.refs, self._visit)
        if not shape.split_rows:
            pl.when(self.group == 1)(lambda: plgpu.barrier_wait(s["exchange_free"]))

    def _release_all(self) -> None:
        """Every slot begins as free, so that the loader needs no special first round."""
        shape, s = self.shape, self.s
        for name, slots in (("keys_free", shape.stages), ("values_free", shape.stages), ("bias_free", shape.bias_slots)):
            for slot in range(slots):
                mine = shape.split_rows or self.group == slot % COMPUTE
                pl.when(mine)(lambda name=name, slot=slot: plgpu.barrier_arrive(s[name].at[slot]))
        for slot in range(shape.query_slots):
            plgpu.barrier_arrive(s["query_free"].at[slot])
        if not shape.split_rows:
            pl.when(self.group == 0)(lambda: plgpu.barrier_arrive(s["exchange_free"]))

    def _visit(self, item: _Item, row: Array, head: Array, done: Array, items: Array) -> None:
        shape, s = self.shape, self.s
        slot = lax.rem(items, int32(shape.query_slots))
        plgpu.barrier_wait(s["query_full"].at[slot])
        query, rel = self._operands(slot)

        first = int32(0) if shape.split_rows else lax.rem(done + self.group, int32(COMPUTE))
        stride = 1 if shape.split_rows else COMPUTE

        def mine(tiles: Array) -> Array:
            return lax.div(tiles - first + (stride - 1), int32(stride))

        def tile_step(edge: bool, j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            return self._tile(item, first + j * stride, done, query, rel, edge, carry)

        carry = (full((ROWS, shape.width), 0.0), full((ROWS,), NEVER), full((ROWS,), 0.0))
        if shape.window is None:
            carry = lax.fori_loop(0, mine(item.plain_tiles), lambda j, c: tile_step(False, j, c), carry)
        carry = lax.fori_loop(mine(item.plain_tiles), mine(item.tiles), lambda j, c: tile_step(True, j, c), carry)
        if shape.split_rows:
            self._write(item, row, head, slot, carry)
            plgpu.barrier_arrive(s["query_free"].at[slot])
            return

        @pl.when(self.group == 1)
        def _give():
            plgpu.barrier_wait(s["exchange_free"])
            out, top, total = carry
            s["exchange"].at[0][...] = out
            s["top"].at[0][...] = top
            s["total"].at[0][...] = total
            plgpu.commit_smem()
            plgpu.barrier_arrive(s["exchange_full"])
            plgpu.barrier_arrive(s["query_free"].at[slot])

        @pl.when(self.group == 0)
        def _take():
            plgpu.barrier_wait(s["exchange_full"])
            self._write(item, row, head, slot, self._join(carry))
            plgpu.barrier_arrive(s["exchange_free"])
            plgpu.barrier_arrive(s["query_free"].at[slot])

    def _operands(self, slot: Array) -> tuple[Array, list[Array]]:
        """The queries, and for each query token its bias coefficients in the rows of that token and zero in others."""
        shape, s = self.shape, self.s
        rows = pl.ds(self.group * ROWS, ROWS) if shape.split_rows else pl.ds(0, ROWS)
        query = plgpu.load(s["query"].at[slot, rows], layout=WGMMA, optimized=False)
        rel = plgpu.load(s["rel"].at[slot, rows], layout=WGMMA, optimized=False)
        rel = rel * jnp.bfloat16(shape.width)  # a power of two, so exact: the product is divided by the width with q.k
        token = lax.div(iota((ROWS, shape.rank), 0) + self._first_row(), int32(shape.share))
        each = [jnp.where(token == t, rel, jnp.bfloat16(0)) if shape.queries > 1 else rel for t in range(shape.queries)]
        if not shape.interpret:
            return query, each
        scratch = s["rel_operand"]
        query = operand(query, s["query_operand"].at[self.group])
        return query, [operand(value, scratch.at[self.group, t]) for t, value in enumerate(each)]

    def _first_row(self) -> Array | int:
        return self.group * ROWS if self.shape.split_rows else 0

    def _tile(self, item: _Item, i: Array, done: Array, query: Array, rel: list[Array], edge: bool, carry: tuple) -> tuple:
        """One key tile of the running softmax. `edge`: with bias and mask."""
        shape, s = self.shape, self.s
        out, top, total = carry
        ring, first_key = done + i, (item.first_tile + i) * KEY_TILE
        slot, bias_slot = lax.rem(ring, int32(shape.stages)), lax.rem(ring, int32(shape.bias_slots))
        plgpu.barrier_wait(s["keys_full"].at[slot])

        def multiply(accumulator: Any) -> None:
            plgpu.wgmma(accumulator, query, s["keys"].at[slot].T)

        def add_bias(accumulator: Any) -> None:
            plgpu.barrier_wait(s["bias_full"].at[bias_slot])
            for t in range(shape.queries):
                plgpu.wgmma(accumulator, rel[t], s["table_rows"].at[bias_slot, t].T)

        if shape.fp8:  # the scales multiply keys and not the bias
            score = scaled(_product(multiply), s["keys_scale"].at[slot])
            score = score + _product(add_bias) if edge else score
        else:
            score = _product(multiply, *((add_bias,) if edge else ()))
        plgpu.barrier_arrive(s["keys_free"].at[slot])
        if edge:
            plgpu.barrier_arrive(s["bias_free"].at[bias_slot])
            score = jnp.where(self._visible(item, first_key), score, NEVER)
        weights, top, shrink = softmax_weights(score, top, self.scale, masked=edge)
        total = total * shrink + weights.sum(axis=1)
        if shape.fp8:
            plgpu.barrier_wait(s["values_full"].at[slot])
            weights = scaled(weights, s["values_scale"].at[slot])
        scratch = s["weight_operand"].at[self.group] if shape.interpret else None
        weights = operand(weights.astype(jnp.bfloat16), scratch)
        if not shape.fp8:
            plgpu.barrier_wait(s["values_full"].at[slot])
        if edge and not shape.fp8:  # of fp8 they are finite, and their scales zero
            pl.when(first_key + KEY_TILE > item.length)(lambda: self._clear_values(slot, item.length - first_key))
        out = accumulate(
            out * by_row(shrink, shape.width),
            lambda accumulator: plgpu.wgmma(accumulator, weights, s["values"].at[slot]),
            shape.interpret,
        )
        plgpu.barrier_arrive(s["values_free"].at[slot])
        return out, top, total

    def _visible(self, item: _Item, first_key: Array) -> Array:
        shape = self.shape
        key = iota((ROWS, KEY_TILE), 1) + first_key
        position = item.first_query
        if shape.queries > 1:
            position = position + lax.div(iota((ROWS, KEY_TILE), 0) + self._first_row(), int32(shape.share))
        visible = key <= position
        return visible if shape.window is None else visible & (key > position - shape.window)

    def _clear_values(self, slot: Array, present: Array) -> None:
        """Zero the values past the row's length: their weight is zero, but what lies there may be NaN."""
        values = self.s["values"].at[slot]
        row = iota((KEY_TILE, self.shape.width), 0)
        values[...] = jnp.where(row < present, plgpu.load(values, layout=WGMMA), jnp.bfloat16(0))
        plgpu.commit_smem()

    def _join(self, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """This warpgroup's running softmax and the other's as one."""
        s = self.s
        out, top, total = carry
        other_top = plgpu.load(s["top"].at[0], layout=WGMMA.reduce(1), optimized=False)
        other_total = plgpu.load(s["total"].at[0], layout=WGMMA.reduce(1), optimized=False)
        other = plgpu.load(s["exchange"].at[0], layout=WGMMA, optimized=False)
        joint = jnp.maximum(top, other_top)
        ours, theirs = jnp.exp2(top - joint), jnp.exp2(other_top - joint)
        out = out * by_row(ours, self.shape.width) + other * by_row(theirs, self.shape.width)
        return out, joint, total * ours + other_total * theirs

    def _write(self, item: _Item, row: Array, head: Array, slot: Array, carry: tuple[Array, ...]) -> None:
        """The finished rows to the output, or this program's part of them to the partial results."""
        shape, s, refs = self.shape, self.s, self.refs
        out, top, total = carry
        out = out * by_row(jnp.where(total > 0, 1 / total, 0.0), shape.width)
        mine = self.group if shape.split_rows else int32(0)
        rows_here = [min(ROWS, shape.rows - ROWS * g) for g in range(shape.readers)]

        @pl.when(item.whole)
        def _finished():
            first = pl.multiple_of(mine * ROWS, ROWS)
            staged = s["query"].at[slot, pl.ds(first, ROWS)]  # this item's queries are in registers by now
            staged[...] = out.astype(jnp.bfloat16)
            plgpu.commit_smem()
            for t in range(shape.queries):
                here = (mine == t * shape.share // ROWS) if shape.split_rows else True
                token_rows = s["query"].at[slot, pl.ds(t * shape.share, shape.share)]
                target = refs["out"].at[item.start + t, pl.ds(head * shape.share, shape.share)]
                copy = lambda source=token_rows, target=target: plgpu.copy_smem_to_gmem(source, target)  # noqa: E731
                pl.when((item.count > t) & here)(copy)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(~item.whole)
        def _part():
            part = jnp.where(item.begins, 1, 0)
            program = lax.axis_index("program")
            plgpu.commit_smem()  # every thread has read the other warpgroup's part before it is overwritten
            s["exchange"].at[mine][...] = out
            s["top"].at[mine][...] = jnp.where(total > 0, top + jnp.log2(jnp.maximum(total, 1e-37)), NEVER)
            plgpu.commit_smem()
            for group, rows in enumerate(rows_here):

                @pl.when(mine == group)
                def _(group: int = group, rows: int = rows):
                    target = pl.ds(group * ROWS, rows)
                    plgpu.copy_smem_to_gmem(s["exchange"].at[group, pl.ds(0, rows)], refs["partial"].at[part, program, target])
                    plgpu.copy_smem_to_gmem(s["top"].at[group, pl.ds(0, rows)], refs["weight"].at[part, program, target])

            plgpu.wait_smem_to_gmem(0)


def _product(*terms: Callable) -> Array:
    """What these add to an accumulator of scores."""

    def run(accumulator: Any) -> Array:
        for term in terms:
            term(accumulator)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, KEY_TILE), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]  it is public


def decode(
    q: Float[Array, "T N H"],
    rel: Float[Array, "T N r"],
    bias_table: Float[Array, "8 rows r"],
    k_pages: Pages,
    v_pages: Pages,
    table: Int[Array, "B width"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    length: Int[Array, " B"],
    plan: DecodePlan,
    shape: DecodeShape,
    interpret: Any = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "2 W M H"], Float[Array, "2 W M"]]:
    """Output of whole items (the rest is unwritten), and the parts of split ones with the log2 of their softmax sums.

    Part [0, c] continues the item that program c-1 was in, part [1, c] begins the item that program c+1 goes on with.
    """
    operands = {"query": q, "rel": rel, "bias_table": bias_table} | parts(k_pages, v_pages)
    operands |= {"table": table, "start": start, "count": count, "length": length}
    plan_names = ("row", "head", "skip", "tiles", "next_row")
    outputs = ("out", "partial", "weight")
    scratch = shape.scratch()

    def body(*args: Any) -> None:
        refs: dict[str, Any] = dict(zip((*operands, *plan_names, *outputs), args, strict=False))
        s = dict(zip(scratch, args[len(refs) :], strict=True))
        group = lax.axis_index("group")
        if shape.overlap_merge:
            plgpu.griddepcontrol_launch_dependents()

        @pl.when(group < COMPUTE)
        def _():
            _Compute(shape, refs, s, group).run()

        @pl.when(group == COMPUTE)
        def _():
            _load(shape, refs, s)

        if shape.fp8:

            @pl.when(group == COMPUTE + 1)
            def _():
                _widen(shape, refs, s)

    body.__name__ = f"attention_decode{'_fp8' if shape.fp8 else ''}_q{shape.queries}"
    halves = (2, shape.programs, shape.rows)
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((*halves, shape.width), jnp.float32),
            jax.ShapeDtypeStruct(halves, jnp.float32),
        ),
        scratch_types=list(scratch.values()),
        grid=(shape.programs,),
        grid_names=("program",),
        num_threads=shape.warpgroups,
        thread_name="group",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    planned = [getattr(plan, name) for name in plan_names]
    return kernel(*operands.values(), *planned)
