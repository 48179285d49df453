"""`group.group` in one launch on Hopper: a counting sort by one warpgroup, for the few rows of a decode step.

Each warp takes a share of the tokens and choices in order and counts them by expert in its own line of shared memory, 32 at a
time: those of one expert among the 32 find each other, and their order there gives their rank. Counts of the warps before, and of
the experts before, are then added to the ranks, so the sort is stable and the same on every run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Int32

from inkling_jax.kernels import mlir as m
from inkling_jax.kernels.expert_matmul.group import Groups, rows_needed, slots_needed
from inkling_jax.kernels.mlir import Value

MAX_ENTRIES = 8192  # above, more processors sort faster than this one
_THREADS = 128
_WARPS = 4


@dataclasses.dataclass(frozen=True)
class Sorting:
    """What `group.group` is asked for."""

    tokens: int
    choices: int
    experts: int
    rows: int
    counters: int
    align: int = 1

    @property
    def total(self) -> int:
        return self.tokens * self.choices

    def results(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The fields of Groups, `place` in one dimension."""
        slots = slots_needed(self.tokens, self.choices, self.experts, self.rows)
        token = rows_needed(self.tokens, self.choices, self.experts, self.align)
        sizes = {"token": token, "place": self.total} | dict.fromkeys(("expert", "first", "used"), slots)
        sizes |= {"count": 1, "counters": self.counters}
        return {name: jax.ShapeDtypeStruct((size,), jnp.int32) for name, size in sizes.items()}

    def scratch(self) -> list[Any]:
        """Shared memory."""
        return [plgpu.SMEM((_WARPS, self.experts), jnp.int32), plgpu.SMEM((3, _padded(self.experts)), jnp.int32)]

    def groups(self, made: dict[str, Array]) -> Groups:
        """From what was made of `results`."""
        return Groups(**made | {"place": made["place"].reshape(self.tokens, self.choices)})


def group_on_device(chosen: Int32[Array, "T A"], experts: int, rows: int, counters: int, align: int = 1) -> Groups:
    """See `group.group`."""
    tokens, choices = chosen.shape
    wanted = Sorting(tokens, choices, experts, rows, counters, align)
    results = wanted.results()
    ref = plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(ref,) * 10, return_type=())
    def run(_: Any, *refs: Value) -> tuple[()]:
        sort(wanted, *(mgpu.utils.memref_ptr(r) for r in refs))
        return ()

    def body(*refs: Any) -> None:
        run(*refs)  # pyright: ignore[reportCallIssue]  jax passes the first argument

    kernel = plgpu.kernel(
        body,
        out_type=tuple(results.values()),
        scratch_types=wanted.scratch(),
        grid=(1,),
        grid_names=("processor",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="expert_group",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return wanted.groups(dict(zip(results, kernel(chosen.reshape(-1).astype(jnp.int32)), strict=True)))


def _padded(experts: int) -> int:
    return -(-experts // _THREADS) * _THREADS


def sort(
    wanted: Sorting,
    chosen: Value,
    token: Value,
    place: Value,
    expert: Value,
    first: Value,
    used: Value,
    count: Value,
    zeros: Value,
    counts: Value,
    sums: Value,
) -> None:
    """Sort by one warpgroup: pointers to what was chosen, to the results in the order of Groups, and to shared memory."""
    experts, rows, total = wanted.experts, wanted.rows, wanted.total
    me, width = m.thread(), _padded(experts)
    _each(_WARPS * experts, lambda i: _put(counts, i, 0))
    _each(wanted.counters, lambda i: _put(zeros, i, 0))
    mgpu.utils.warpgroup_barrier()
    share = -(-total // (_WARPS * 32)) * 32
    begin, line = m.multiply(m.shift(me, -5), share), m.multiply(m.shift(me, -5), experts)
    within = m.both(me, 31)

    def rank(i: Value, expert_of: Value, here: Value) -> None:
        peers = mgpu.utils.inline_ptx(
            "match.any.sync.b32 $0, $1, 0xffffffff;", expert_of, result_types=m.i32(), has_side_effects=True, convergent=True
        )
        before = m.both(peers, arith.subi(arith.shli(m.as_int(1), within), m.as_int(1)))
        mine, all_of_us = _ones(before), _ones(peers)
        with mgpu.utils.when(here):
            slot = m.add(line, expert_of)
            base = _get(counts, slot)
            _put(place, i, m.add(base, mine))
        # Every peer must have read before one of them writes.
        mgpu.utils.warp_barrier()
        with mgpu.utils.when(arith.andi(here, arith.cmpi(arith.CmpIPredicate.eq, mine, m.as_int(0)))):
            slot = m.add(line, expert_of)
            _put(counts, slot, m.add(_get(counts, slot), all_of_us))
        mgpu.utils.warp_barrier()

    _share(chosen, begin, share, total, experts, rank)
    mgpu.utils.warpgroup_barrier()
    _each(width, lambda e: _add_warps(counts, sums, e, experts))
    mgpu.utils.warpgroup_barrier()
    with mgpu.utils.when(m.less(me, 32)):
        _scan(sums, width, rows, wanted.align, count)
    mgpu.utils.warpgroup_barrier()

    def slots_of(e: Value) -> None:
        size, row, slot = (_get(sums, m.add(e, part * width)) for part in range(3))
        bound = arith.divui(m.add(size, rows - 1), m.as_int(rows))

        @mgpu.utils.fori(bound, [])
        def _(j: Value, _carry: list) -> list:
            at = m.add(slot, j)
            _put(expert, at, e)
            _put(first, at, m.add(row, m.multiply(j, rows)))
            _put(used, at, arith.minsi(m.as_int(rows), arith.subi(size, m.multiply(j, rows))))
            return []

    _each(experts, slots_of)

    def settle(i: Value, expert_of: Value, here: Value) -> None:
        with mgpu.utils.when(here):
            row = m.add(_get(place, i), _get(counts, m.add(line, expert_of)), _get(sums, m.add(expert_of, width)))
            _put(place, i, row)
            _put(token, row, arith.divui(i, m.as_int(wanted.choices)))
        nowhere = arith.andi(m.less(i, total), arith.cmpi(arith.CmpIPredicate.eq, expert_of, m.as_int(experts)))
        with mgpu.utils.when(nowhere):
            _put(place, i, -1)

    _share(chosen, begin, share, total, experts, settle)


def _get(pointer: Value, index: Value) -> Value:
    return llvm.load(m.i32(), m.at(pointer, index, m.i32()), alignment=4)


def _put(pointer: Value, index: Value, value: m.Operand) -> None:
    llvm.store(m.as_int(value), m.at(pointer, index, m.i32()), alignment=4)


def _ones(bits: Value) -> Value:
    return mgpu.utils.inline_ptx("popc.b32 $0, $1;", bits, result_types=m.i32())


def _each(number: int, work: Any) -> None:
    """work(i) for every i below `number`, spread over the warpgroup."""
    bound = arith.constant(m.i32(), -(-number // _THREADS))

    @mgpu.utils.fori(bound, [])
    def _(step: Value, _carry: list) -> list:
        i = m.add(m.shift(step, 7), m.thread())
        with mgpu.utils.when(m.less(i, number)):
            work(i)
        return []


def _share(chosen: Value, begin: Value, share: int, total: int, experts: int, work: Any) -> None:
    """work(i, expert, whether it is held) for the entries of this warp, 32 at a time; `experts` stands for any not held."""
    bound = arith.constant(m.i32(), share // 32)

    @mgpu.utils.fori(bound, [])
    def _(step: Value, _carry: list) -> list:
        i = m.add(begin, m.shift(step, 5), m.both(m.thread(), 31))
        exists = m.less(i, total)
        found = _get(chosen, arith.minsi(i, m.as_int(total - 1)))
        held = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.ult, found, m.as_int(experts)))
        work(i, arith.select(held, found, m.as_int(experts)), held)
        return []


def _add_warps(counts: Value, sums: Value, e: Value, experts: int) -> None:
    """Turn each warp's count of an expert into what the warps before it counted, and keep the sum."""
    _put(sums, e, 0)  # also past the last expert, up to whole lines
    with mgpu.utils.when(m.less(e, experts)):
        total: Value = m.as_int(0)
        for warp in range(_WARPS):
            index = m.add(e, warp * experts)
            number = _get(counts, index)
            _put(counts, index, total)
            total = m.add(total, number)
        _put(sums, e, total)


def _scan(sums: Value, width: int, rows: int, align: int, count: Value) -> None:
    """First row and first slot of each expert, from their sizes: by one warp, each lane a run of experts."""
    each = width // 32
    lane = m.both(m.thread(), 31)
    start = m.multiply(lane, each)
    sizes = [_get(sums, m.add(start, i)) for i in range(each)]
    slots = [arith.divui(m.add(size, rows - 1), m.as_int(rows)) for size in sizes]
    room = [m.multiply(arith.divui(m.add(size, align - 1), m.as_int(align)), align) for size in sizes]
    for part, numbers in ((1, room), (2, slots)):
        own = m.add(*numbers)
        total = own
        for distance in (1, 2, 4, 8, 16):
            below = mgpu.utils.inline_ptx(
                f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;",
                total,
                result_types=m.i32(),
                has_side_effects=True,
                convergent=True,
            )
            total = m.add(total, arith.select(m.less(lane, distance), m.as_int(0), below))
        running = arith.subi(total, own)
        for i, number in enumerate(numbers):
            _put(sums, m.add(start, part * width + i), running)
            running = m.add(running, number)
    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, m.as_int(31))):
        _put(count, m.as_int(0), running)
