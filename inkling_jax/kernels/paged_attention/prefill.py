"""Prefill on Hopper: chunks of any length, with any history, over the paged cache.

A program (one a processor) takes tiles of queries in turn, each with the key tiles from its diagonal back to the first one in
sight. One warpgroup loads; two compute, half of a tile's rows each (prefill_shape.py says which); of keys in fp8 a fourth makes
bfloat16 in between. The bias is a small product too
(see bias.py): of each warp's own rows, with the rows of a table that the whole program keeps in shared memory.
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

from inkling_jax.kernels.paged_attention import prefill_device, prefill_twin
from inkling_jax.kernels.paged_attention.bias import PREFILL_TOKENS, zero_row
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
    operand,
    scaled,
    softmax_weights,
)
from inkling_jax.kernels.paged_attention.prefill_plan import IDLE_BLOCK, PrefillPlan
from inkling_jax.kernels.paged_attention.prefill_shape import CODE_STAGES, COMPUTE, GROUP, PIECE, PrefillShape
from inkling_jax.kernels.paged_attention.widen import pass_on, release_codes, widen
from inkling_jax.kernels.pages import Pages, parts


class _Tile:
    """A tile of queries of a key head. Key tiles are counted back from the diagonal. Every field is a scalar of the kernel."""

    def __init__(self, shape: PrefillShape, refs: dict[str, Any], unit: Array):
        item = lax.div(unit, int32(shape.kv_heads))
        self.head = lax.rem(unit, int32(shape.kv_heads))
        self.row = refs["row"][item]
        self.first = refs["first"][item]
        start, count, length = (refs[name][self.row] for name in ("start", "count", "length"))
        history = length - count
        self.length = length
        self.start = start + self.first - history  # token of the first query; may be another row's, or none
        self.begin = jnp.maximum(history - self.first, 0)  # queries of the tile that are this row's
        self.end = jnp.minimum(length - self.first, shape.tokens)
        keys = int32(shape.keys)
        self.diagonal = lax.div(self.first, keys)
        oldest = jnp.maximum(self.first + self.begin - shape.window + 1, 0) if shape.window else int32(0)
        self.tiles = self.diagonal - lax.div(oldest, keys) + 1
        self.oldest_page = lax.div(oldest, int32(shape.page)) * shape.page  # keys before it may be anything
        if shape.window is None:
            near = self.diagonal - lax.div(jnp.maximum(self.first - shape.extent + 1, 0), keys) + 1
        else:  # tiles whose keys are all in sight of all queries
            last = self.first + shape.tokens - 1 - shape.window
            near = self.diagonal - jnp.where(last < 0, -1, lax.div(last, keys))
        self.near = jnp.clip(near, 1, self.tiles)

    def key(self, n: Array, shape: PrefillShape) -> Array:
        """First key of a tile."""
        return (self.diagonal - n) * shape.keys


def _walk(shape: PrefillShape, refs: dict[str, Any], visit: Callable) -> None:
    """visit(tile, key tiles done before) for each tile of this program."""
    program = lax.axis_index("program")
    units = refs["live"][0] * shape.kv_heads
    turns = lax.div(units - program + (shape.programs - 1), int32(shape.programs))

    def step(turn: Array, done: Array) -> Array:
        tile = _Tile(shape, refs, turn * shape.programs + program)
        visit(tile, done)
        return done + tile.tiles

    lax.fori_loop(0, turns, step, int32(0))


def _load(shape: PrefillShape, refs: dict[str, Any], s: dict[str, Any]) -> None:
    """The loading warpgroup: every copy of the program, as far ahead as there is room."""
    plgpu.set_max_registers(40, action="decrease")
    width = refs["table"].shape[1]
    form, stages = ("_codes", CODE_STAGES) if shape.fp8 else ("", shape.stages)
    if shape.biased:
        for i in range(shape.table_copies):
            lines = pl.ds(256 * i, min(256, shape.table_rows // 4 - 256 * i))
            plgpu.copy_gmem_to_smem(refs["bias_table"].at[lines], s["table"].at[lines], s["table_full"])

    def copy_queries(tile: _Tile) -> None:
        heads, first = pl.ds(tile.head * shape.share, shape.share), tile.start + shape.before
        for group in range(COMPUTE):
            plgpu.barrier_wait(s["query_free"].at[group])
            for i in range(ROWS // GROUP):
                token = first + shape.token(group, i // 2, i % 2)
                for piece in range(shape.pieces):
                    source = refs["query"].at[pl.ds(token, shape.group_tokens), heads, pl.ds(piece * PIECE, PIECE)]
                    target = s["query_tokens"].at[group, piece, pl.ds(i * shape.group_tokens, shape.group_tokens)]
                    plgpu.copy_gmem_to_smem(source, target, s["query_full"].at[group])
            if shape.biased:
                source = refs["rel"].at[pl.ds(first, shape.tokens), heads]
                plgpu.copy_gmem_to_smem(source, s["rel"].at[group], s["query_full"].at[group])

    def visit(tile: _Tile, done: Array) -> None:
        copy_queries(tile)

        def pages(n: Array) -> list[Array]:
            first = lax.div(tile.key(n, shape), int32(shape.page))
            return [refs["table"][tile.row, lax.rem(first + i, int32(width))] for i in range(shape.page_copies)]

        def copy(which: str, name: str, n: Array, slot: Array, ids: list[Array]) -> None:
            plgpu.barrier_wait(s[f"{name}{form}_free"].at[slot])
            rows = min(shape.keys, shape.page)
            inside = pl.multiple_of(lax.rem(tile.key(n, shape), int32(shape.page)), rows)
            for i, page in enumerate(ids):
                source, target = (page, tile.head, pl.ds(inside, rows)), (slot, pl.ds(i * rows, rows))
                full = s[f"{name}{form}_full"].at[slot]
                plgpu.copy_gmem_to_smem(refs[f"{which}_pages"].at[source], s[name + form].at[target], full)
                if shape.fp8:
                    plgpu.copy_gmem_to_smem(refs[f"{which}_scale"].at[source], s[f"{name}_codes_scale"].at[target], full)

        def step(n: Array, ids: list[Array]) -> list[Array]:
            following = pages(jnp.minimum(n + 1, tile.tiles - 1))  # fetched before this tile waits
            slot = lax.rem(done + n, int32(stages))
            copy("k", "keys", n, slot, ids)
            copy("v", "values", n, slot, ids)
            return following

        lax.fori_loop(0, tile.tiles, step, pages(int32(0)))

    _walk(shape, refs, visit)
    drain(s, f"keys{form}_free", f"values{form}_free", "query_free")
    _clear_idle(shape, refs)


def _widen(shape: PrefillShape, refs: dict[str, Any], s: dict[str, Any]) -> None:
    """The warpgroup between: bfloat16 of every tile of codes, in the order in which they come."""
    plgpu.set_max_registers(40, action="decrease")
    release_codes(s, CODE_STAGES)
    make = widen(shape.keys, shape.width, shape.interpret)

    def visit(tile: _Tile, done: Array) -> None:
        def step(n: Array, _: None) -> None:
            key = tile.key(n, shape)
            codes, slot = (lax.rem(done + n, int32(stages)) for stages in (CODE_STAGES, shape.stages))
            for name in ("keys", "values"):
                pass_on(make, s, name, codes, slot, tile.oldest_page - key, tile.length - key)

        lax.fori_loop(0, tile.tiles, step, None)

    _walk(shape, refs, visit)
    drain(s, "keys_free", "values_free")


def _clear_idle(shape: PrefillShape, refs: dict[str, Any]) -> None:
    """Zero the output of tokens that no row owns."""
    heads, width = refs["out"].shape[1:]
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=1) if width == 128 else WGMMA.reduce(0)
    blocks = refs["idle_block"].shape[0]

    def clear(token: Array) -> None:
        def one(head: Array, _: None) -> None:
            refs["out"].at[token, head][...] = plgpu.layout_cast(jnp.zeros((width,), jnp.bfloat16), layout)

        lax.fori_loop(0, heads, one, None)

    def block_step(turn: Array, _: None) -> None:
        block = turn * shape.programs + lax.axis_index("program")

        @pl.when(refs["idle_block"][block] > 0)
        def _():
            def token_step(i: Array, _: None) -> None:
                token = block * IDLE_BLOCK + i
                pl.when(refs["idle"][token] > 0)(lambda: clear(token))

            lax.fori_loop(0, IDLE_BLOCK, token_step, None)

    turns = lax.div(blocks - lax.axis_index("program") + (shape.programs - 1), int32(shape.programs))
    lax.fori_loop(0, turns, block_step, None)


class _Compute:
    """One of the two multiplying warpgroups."""

    def __init__(self, shape: PrefillShape, refs: dict[str, Any], s: dict[str, Any], group: Array):
        self.shape, self.refs, self.s, self.group = shape, refs, s, group
        self.scale = LOG2E / shape.width
        self.own: Any = prefill_twin if shape.interpret else prefill_device

    def run(self) -> None:
        """All tiles of the program."""
        shape, s = self.shape, self.s
        for slot in range(shape.stages):  # all begin as free, so that the loader needs no special first round
            plgpu.barrier_arrive(s["keys_free"].at[slot])
            plgpu.barrier_arrive(s["values_free"].at[slot])
        plgpu.barrier_arrive(s["query_free"].at[self.group])
        plgpu.set_max_registers(216 if shape.fp8 else 232, action="increase")
        if shape.biased:
            plgpu.barrier_wait(s["table_full"])
        _walk(shape, self.refs, self._visit)

    def _visit(self, tile: _Tile, done: Array) -> None:
        shape, s = self.shape, self.s
        plgpu.barrier_wait(s["query_full"].at[self.group])
        if shape.interpret:
            for piece in range(shape.pieces):
                rows = plgpu.load(s["query_tokens"].at[self.group, piece]).reshape(ROWS, PIECE)
                s["query"].at[self.group, piece][...] = rows
        rel = None
        if shape.biased:  # a power of two, so exact: the product is divided by the width with q.k
            rel = self.own.read_rel(shape)(s["rel"].at[self.group], self.group) * jnp.bfloat16(shape.width)
        carry = (full((ROWS, shape.width), 0.0), full((ROWS,), NEVER), full((ROWS,), 0.0))
        attend = self._overlapped if shape.overlap else self._in_turn
        self._write(tile, attend(tile, done, rel, carry))

    def _in_turn(self, tile: _Tile, done: Array, rel: Array | None, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """The running softmax over all key tiles, one product after the other."""
        shape = self.shape

        def step(n: Array, carry: tuple[Array, ...], first: bool = False) -> tuple[Array, ...]:
            out, top, total = carry
            slot = lax.rem(done + n, int32(shape.stages))

            def product(accumulator: Any) -> Array:
                self._issue_scores(accumulator, slot)
                return accumulator[...]

            score = pl.run_scoped(product, plgpu.ACC((ROWS, shape.keys), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]  it is public
            if shape.fp8:
                score = scaled(score, self.s["keys_scale"].at[slot])
            plgpu.barrier_arrive(self.s["keys_free"].at[slot])
            weights, top, shrink, total = self._weights(tile, n, score, top, total, rel, first)
            if shape.fp8:
                plgpu.barrier_wait(self.s["values_full"].at[slot])
                weights = scaled(weights, self.s["values_scale"].at[slot])
            weights = weights.astype(jnp.bfloat16)
            weights = operand(weights, self.s["weight_operand"].at[self.group] if shape.interpret else None)
            if not shape.fp8:  # of fp8 what is none's is finite, and its scale zero
                self._await_values(tile, n, slot)
            out = accumulate(
                out * by_row(shrink, shape.width),
                lambda accumulator: plgpu.wgmma(accumulator, weights, self.s["values"].at[slot]),
                shape.interpret,
            )
            plgpu.barrier_arrive(self.s["values_free"].at[slot])
            return out, top, total

        return lax.fori_loop(1, tile.tiles, step, step(int32(0), carry, first=True))

    def _overlapped(self, tile: _Tile, done: Array, rel: Array | None, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """The same; the product with a tile's values runs beside that of the next one's keys, and beside its softmax."""
        shape, s = self.shape, self.s
        accumulator_type: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  it is public
        out, top, total = carry

        def first(accumulator: Any) -> Array:
            self._issue_scores(accumulator, lax.rem(done, int32(shape.stages)))
            return accumulator[...]

        score = pl.run_scoped(first, accumulator_type((ROWS, shape.keys), jnp.float32))
        plgpu.barrier_arrive(s["keys_free"].at[lax.rem(done, int32(shape.stages))])
        weights, top, _, total = self._weights(tile, int32(0), score, top, total, rel, True)
        weights = weights.astype(jnp.bfloat16)

        def step(n: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            out, top, total, weights = carry
            slot, before = (lax.rem(done + i, int32(shape.stages)) for i in (n, n - 1))

            def both(out_ref: Any, score_ref: Any) -> tuple[Array, ...]:
                out_ref[...] = out
                self._issue_scores(score_ref, slot)
                self._await_values(tile, n - 1, before)
                plgpu.wgmma(out_ref, weights, s["values"].at[before])
                score = plgpu.wgmma_accumulator_load(score_ref, wait_n=1)
                plgpu.barrier_arrive(s["keys_free"].at[slot])
                weight, *made = self._weights(tile, n, score, top, total, rel, False)
                made = (weight.astype(jnp.bfloat16), *made)
                summed = plgpu.wgmma_accumulator_load(out_ref, wait_n=0)
                plgpu.barrier_arrive(s["values_free"].at[before])
                return summed, *made

            sizes = ((ROWS, shape.width), (ROWS, shape.keys))
            summed, weights, top, shrink, total = pl.run_scoped(both, *(accumulator_type(a, jnp.float32) for a in sizes))
            return summed * by_row(shrink, shape.width), top, total, weights

        # One loop: were it two, one after the other, registers would move between the products and hold them up.
        out, top, total, weights = lax.fori_loop(1, tile.tiles, step, (out, top, total, weights))
        last = lax.rem(done + tile.tiles - 1, int32(shape.stages))
        self._await_values(tile, tile.tiles - 1, last)
        out = accumulate(out, lambda accumulator: plgpu.wgmma(accumulator, weights, s["values"].at[last]), False)
        plgpu.barrier_arrive(s["values_free"].at[last])
        return out, top, total

    def _issue_scores(self, accumulator: Any, slot: Array) -> None:
        shape, s = self.shape, self.s
        plgpu.barrier_wait(s["keys_full"].at[slot])
        for piece in range(shape.pieces):
            columns = s["keys"].at[slot, :, pl.ds(piece * PIECE, PIECE)]
            plgpu.wgmma(accumulator, s["query"].at[self.group, piece], columns.T)

    def _weights(
        self, tile: _Tile, n: Array, score: Array, top: Array, total: Array, rel: Array | None, first: bool
    ) -> tuple[Array, Array, Array, Array]:
        """Weights of a key tile, the new maximum, what the sums so far shrink by, and the new sum."""
        shape, own = self.shape, self.own
        distance = tile.first - tile.key(n, shape)

        def biased(score: Array) -> Array:
            row = jnp.maximum(zero_row(shape.extent) - distance, PREFILL_TOKENS + GROUP) - self.group * shape.group_step
            return own.add_bias(shape)(score, rel, self.s["table"], row)

        def masked(score: Array, causal: bool, window: bool) -> Array:
            return own.hide(shape, causal, window)(score, distance, self.group)

        def only_where(condition: Array, change: Callable, score: Array) -> Array:
            return lax.cond(condition, change, lambda score: score, score)

        local = shape.window is not None
        if rel is not None:
            score = biased(score) if local or first else only_where(n < tile.near, biased, score)
        if first:
            score = masked(score, True, shape.window is not None and shape.window < shape.keys)
        elif local:
            score = only_where(n >= tile.near, lambda score: masked(score, False, True), score)
        weights, top, shrink = softmax_weights(score, top, self.scale, masked=False)  # a row sees its own key in the first tile
        return weights, top, shrink, total * shrink + weights.sum(axis=1)

    def _await_values(self, tile: _Tile, n: Array, slot: Array) -> None:
        """Wait for a tile of values. What is none's or out of sight has the weight zero, but may be NaN."""
        shape, s = self.shape, self.s
        plgpu.barrier_wait(s["values_full"].at[slot])
        key = tile.key(n, shape)

        @pl.when((key < tile.oldest_page) | (key + shape.keys > tile.length))
        def _():
            self.own.clear_rows(shape)(s["values"].at[slot], tile.oldest_page - key, tile.length - key)
            plgpu.commit_smem()

    def _write(self, tile: _Tile, carry: tuple[Array, ...]) -> None:
        """The finished rows, by way of the queries' memory, to the output."""
        shape, s, group = self.shape, self.s, self.group
        out, _, total = carry
        out = (out * by_row(1 / total, shape.width)).astype(jnp.bfloat16)
        for piece in range(shape.pieces):
            s["query"].at[group, piece][...] = out[:, piece * PIECE : (piece + 1) * PIECE]
        plgpu.commit_smem()
        if shape.interpret:
            for piece in range(shape.pieces):
                rows = plgpu.load(s["query"].at[group, piece]).reshape(ROWS // shape.share, shape.share, PIECE)
                s["query_tokens"].at[group, piece][...] = rows
        heads = pl.ds(tile.head * shape.share, shape.share)

        def copy(index: int, token: Array, tokens: int) -> None:
            for piece in range(shape.pieces):
                source = s["query_tokens"].at[group, piece, pl.ds(index, tokens)]
                target = refs["out"].at[pl.ds(tile.start + token, tokens), heads, pl.ds(piece * PIECE, PIECE)]
                plgpu.copy_smem_to_gmem(source, target)

        refs = self.refs
        for i in range(ROWS // GROUP):
            token, index, tokens = shape.token(group, i // 2, i % 2), i * shape.group_tokens, shape.group_tokens
            whole = (token >= tile.begin) & (token + tokens <= tile.end)
            pl.when(whole)(lambda index=index, token=token: copy(index, token, shape.group_tokens))
            if tokens > 1:
                for t in range(tokens):
                    here = (token + t >= tile.begin) & (token + t < tile.end) & ~whole
                    pl.when(here)(lambda index=index + t, token=token + t: copy(index, token, 1))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(s["query_free"].at[group])


def prefill(
    q: Float[Array, "T N H"],
    rel: Float[Array, "T N r"],
    bias_table: Float[Array, "lines 64"],
    k_pages: Pages,
    v_pages: Pages,
    table: Int[Array, "B width"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    length: Int[Array, " B"],
    plan: PrefillPlan,
    shape: PrefillShape,
    interpret: Any = None,
) -> Float[Array, "T N H"]:
    """The output of every token, zero for those of no row."""
    tokens = q.shape[0]
    if shape.before:
        q, rel = (jnp.pad(a, ((shape.before, shape.before), (0, 0), (0, 0))) for a in (q, rel))
    operands = {"query": q, "rel": rel, "bias_table": bias_table} | parts(k_pages, v_pages)
    operands |= {"table": table, "start": start, "count": count, "length": length}
    plan_names = ("row", "first", "live", "idle", "idle_block")
    scratch, out_type = shape.scratch(), jax.ShapeDtypeStruct((tokens, *q.shape[1:]), q.dtype)

    def body(*args: Any) -> None:
        refs: dict[str, Any] = dict(zip((*operands, *plan_names, "out"), args, strict=False))
        s = dict(zip(scratch, args[len(refs) :], strict=True))
        if not shape.interpret:
            s["query"], s["query_tokens"] = s["query"]
        group = lax.axis_index("group")

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

    body.__name__ = f"attention_prefill{'_fp8' if shape.fp8 else ''}_{'window' if shape.window else 'global'}"
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
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
