"""The routed feed-forward on Hopper from packed weights: the same signature as the reference, the kernel chosen by shape."""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float, Int

from inkling_jax.errors import InputError
from inkling_jax.kernels.expert_matmul import decode, grouping
from inkling_jax.kernels.expert_matmul.group import group, slots_needed
from inkling_jax.kernels.expert_matmul.pack import Packed


def expert_matmul(
    x: Float[Array, "T D"], experts: Int[Array, "T A"], weights: Float[Array, "T A"], w13: Packed, w2: Packed
) -> Float[Array, "T D"]:
    """See `reference.expert_matmul`; x is bfloat16, w13 and w2 come from `pack`.

    The weighted sum is in float32 in the order of a, and the same on every run.
    """
    return _run(x, experts, weights, w13, w2, processors=processors())


def processors() -> int:
    """Multiprocessors of the GPU, each of which takes one block of a persistent kernel; an H200's where there is no GPU."""
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else 132


@functools.partial(jax.jit, static_argnames=("processors", "launches", "grouped"))
def _run(
    x: Array, experts: Array, weights: Array, w13: Packed, w2: Packed, processors: int, launches: int = 1, grouped: bool = True
) -> Array:
    tokens, choices = experts.shape
    held = w13.words.shape[0]
    if x.dtype != "bfloat16" or x.shape != (tokens, w2.words.shape[1] * 64):
        raise InputError(f"expert_matmul: x is {x.dtype}{list(x.shape)}; expected bfloat16[{tokens}, {w2.words.shape[1] * 64}]")
    slots = slots_needed(tokens, choices, held, decode.ROWS)
    plan = decode.plan(w13, w2, tokens, choices, slots, processors)
    small = grouped and tokens * choices <= grouping.MAX_ENTRIES
    groups = (grouping.group_on_device if small else group)(experts, held, decode.ROWS, plan.counters)
    return decode.decode(x, weights, groups, w13, w2, plan, launches)
