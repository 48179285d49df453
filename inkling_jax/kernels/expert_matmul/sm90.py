"""The routed feed-forward on Hopper from packed weights: the same signature as the reference, the kernel chosen by shape."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from inkling_jax.errors import InputError
from inkling_jax.kernels.expert_matmul import batch, decode, grouping
from inkling_jax.kernels.expert_matmul.group import Groups, group, slots_needed
from inkling_jax.kernels.expert_matmul.pack import Packed, fits

# The most rows that an expert can expect, and then the most rows of a slot: of the decode kernel, and of the batch kernel.
DECODE_ROWS = ((4, 8), (16, 16))
BATCH_ROWS = ((28, 32), (56, 64))
MOST_ROWS = 256


def expert_matmul(
    x: Float[Array, "T D"],
    experts: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    w13: Packed,
    w2: Packed,
    routed: int | None = None,
) -> Float[Array, "T D"]:
    """See `reference.expert_matmul`; x is bfloat16, w13 and w2 come from `pack`.

    `routed`: of how many experts tokens choose, where more than those held here; it tells how many rows an expert may expect,
    and so which kernel is best. The weighted sum is in float32 in the order of a, and the same on every run.
    """
    tokens, choices = experts.shape
    options = regime(tokens * choices / (routed or w13.words.shape[0]))
    return run(x, experts, weights, w13, w2, processors=processors(), **options)


def regime(expected: float) -> dict[str, Any]:
    """Which kernel, and the most rows of a slot, where an expert can expect so many."""
    for kernel, limits in (("decode", DECODE_ROWS), ("batch", BATCH_ROWS)):
        for limit, rows in limits:
            if expected <= limit:
                return {"kernel": kernel, "rows": rows}
    return {"kernel": "batch", "rows": MOST_ROWS}


def supported(width: int, hidden: int) -> bool:
    """Whether the kernels take experts of `hidden` channels (those of this device) and tokens of `width`."""
    if not (fits(hidden, width) and fits(width, hidden)):
        return False
    shapes = ((2 * hidden // 64, width // 128), (width // 64, hidden // 128))
    return all(blocks % 2 == 0 and decode.tileable(blocks, depth) for blocks, depth in shapes)


def processors() -> int:
    """Multiprocessors of the GPU, each of which takes one block of a persistent kernel; an H200's where there is no GPU."""
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else 132


@functools.partial(jax.jit, static_argnames=("processors", "kernel", "rows", "launches", "cluster", "tuning"))
def run(
    x: Array,
    experts: Array,
    weights: Array,
    w13: Packed,
    w2: Packed,
    processors: int,
    kernel: str,
    rows: int,
    launches: int = 1,
    cluster: int = 1,
    tuning: tuple = (),
) -> Array:
    """`expert_matmul` by a kernel of the caller's choice, for tests and benchmarks."""
    tokens, choices = experts.shape
    held = w13.words.shape[0]
    if x.dtype != "bfloat16" or x.shape != (tokens, w2.words.shape[1] * 64):
        raise InputError(f"expert_matmul: x is {x.dtype}{list(x.shape)}; expected bfloat16[{tokens}, {w2.words.shape[1] * 64}]")
    if kernel == "batch":
        plans = (batch.plan(w13, rows, processors, cluster), batch.plan(w2, rows, processors, cluster))
        return batch.batch(x, weights, _group(experts, held, rows, 1, batch.ALIGN), w13, w2, plans)
    slots = slots_needed(tokens, choices, held, rows)
    plan = decode.plan(w13, w2, tokens, choices, slots, rows, processors, **dict(tuning))
    return decode.decode(x, weights, _group(experts, held, rows, plan.counters), w13, w2, plan, launches)


def _group(experts: Array, held: int, rows: int, counters: int, align: int = 1) -> Groups:
    small = experts.size <= grouping.MAX_ENTRIES
    return (grouping.group_on_device if small else group)(experts, held, rows, counters, align)
