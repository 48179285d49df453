"""The feed-forward of a sparse layer on Hopper from packed weights: which kernel, by shape, and its launch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, BFloat16, Float, Int

from inkling_jax.errors import InputError
from inkling_jax.kernels.expert_matmul import batch, decode, decode_plan, grouping
from inkling_jax.kernels.expert_matmul.group import Grouping, Groups, group, slots_needed
from inkling_jax.kernels.expert_matmul.pack import Packed, Shared, fits

# The most rows that an expert can expect, and then the most rows of a slot: of the decode kernel, and of the batch kernel.
DECODE_ROWS = ((4, 8), (16, 16))
BATCH_ROWS = ((28, 32), (56, 64))
MOST_ROWS = 256
# With more tokens the shared experts, which all of them take, go to the batch kernel. Up to so many they are in the same launch.
SHARED_TOKENS = 64


class Regime(NamedTuple):
    """A kernel, and how it is to run."""

    kernel: str  # "decode" or "batch"
    rows: int  # the most of a slot
    launches: int = 1
    cluster: int = 1
    tuning: tuple[tuple[str, Any], ...] = ()  # of `decode_plan.plan`


@dataclasses.dataclass(frozen=True)
class Step:
    """What the feed-forward of so many tokens takes: how their rows are to be grouped, and the kernels' plans."""

    grouping: Grouping
    decode: decode_plan.Plan | None
    batch: tuple[batch.Plan, batch.Plan] | None
    shared: tuple[batch.Plan, batch.Plan] | None  # where they need launches of their own
    launches: int


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
    how = regime(tokens, choices, routed or w13.words.shape[0])
    return run(x, experts, weights, w13, w2, how=how, processors=processors())


def regime(tokens: int, choices: int, routed: int) -> Regime:
    """Which kernel, and the most rows of a slot, where tokens choose among `routed` experts."""
    expected = tokens * choices / routed
    if tokens * choices <= grouping.MAX_ENTRIES:  # whose counters the decode kernel counts in
        for limit, rows in DECODE_ROWS:
            if expected <= limit:
                return Regime("decode", rows)
    return Regime("batch", _batch_rows(expected))


def _batch_rows(expected: float) -> int:
    return next((rows for limit, rows in BATCH_ROWS if expected <= limit), MOST_ROWS)


def supported(width: int, hidden: int) -> bool:
    """Whether the kernels take experts of `hidden` channels (those of this device) and tokens of `width`."""
    if not (fits(hidden, width) and fits(width, hidden)):
        return False
    shapes = ((2 * hidden // 64, width // 128), (width // 64, hidden // 128))
    return all(blocks % 2 == 0 and decode_plan.tileable(blocks, depth) for blocks, depth in shapes)


def processors() -> int:
    """Multiprocessors of the GPU, each of which takes one block of a persistent kernel; an H200's where there is no GPU."""
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else 132


def plan(
    tokens: int,
    choices: int,
    w13: Packed,
    w2: Packed,
    how: Regime,
    processors: int,
    shared: tuple[Packed, Packed, int] | None = None,
) -> Step:
    """The plans of a regime. `shared`: weights of the shared experts, as `Shared` has them, and how many they are."""
    held = w13.words.shape[0]
    fused = shared if how.kernel == "decode" and tokens <= SHARED_TOKENS else None
    apart = None
    if shared is not None and fused is None:
        apart = _batch_plans(shared[:2], _batch_rows(tokens), processors, how.cluster)
    if how.kernel == "batch":
        plans = _batch_plans((w13, w2), how.rows, processors, how.cluster)
        return Step(Grouping(held, how.rows, 1, batch.ALIGN), None, plans, apart, 2)
    slots = slots_needed(tokens, choices, held, how.rows)
    made = decode_plan.plan(w13, w2, tokens, choices, slots, how.rows, processors, fused, **dict(how.tuning))
    return Step(Grouping(held, how.rows, made.counters), made, None, apart, how.launches)


def _batch_plans(weights: tuple[Packed, ...], rows: int, processors: int, cluster: int) -> tuple[batch.Plan, batch.Plan]:
    up, down = (batch.plan(weight, rows, processors, cluster) for weight in weights)
    return up, down


@functools.partial(jax.jit, static_argnames="step")
def multiply(
    x: BFloat16[Array, "T D"],
    weights: Float[Array, "T A"],
    groups: Groups,
    w13: Packed,
    w2: Packed,
    step: Step,
    shared: Shared | None = None,
) -> BFloat16[Array, "T D"]:
    """The weighted sum of routed experts, of rows grouped as `step.grouping` says, and of shared ones."""
    width = w2.words.shape[1] * 64
    if x.dtype != "bfloat16" or x.shape[1] != width:
        raise InputError(f"expert_matmul: x is {x.dtype}{list(x.shape)}; expected bfloat16[{x.shape[0]}, {width}]")
    rest = batch.batch_shared(x, shared, step.shared) if shared is not None and step.shared is not None else None
    if step.batch is not None:
        return batch.batch(x, weights, groups, w13, w2, step.batch, rest)
    assert step.decode is not None  # one of the two
    y = decode.decode(x, weights, groups, w13, w2, step.decode, shared if rest is None else None, step.launches)
    return y if rest is None else (y.astype("float32") + rest.astype("float32")).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("how", "processors"))
def run(
    x: Array,
    experts: Array,
    weights: Array,
    w13: Packed,
    w2: Packed,
    how: Regime,
    processors: int,
    shared: Shared | None = None,
) -> Array:
    """`expert_matmul` by a kernel of the caller's choice, and with shared experts, for tests and benchmarks."""
    of_shared = None if shared is None else (shared.w13, shared.w2, shared.weights.shape[1])
    tokens, choices = experts.shape
    step = plan(tokens, choices, w13, w2, how, processors, of_shared)
    small = experts.size <= grouping.MAX_ENTRIES
    groups = (grouping.group_on_device if small else group)(experts, *step.grouping)
    return multiply(x, weights, groups, w13, w2, step, shared)
