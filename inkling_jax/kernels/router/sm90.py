"""The router on Hopper, and after it the rows sorted by expert (`expert_matmul.group`), in one launch.

Few tokens: programs of 16 rows of weights by a part of the columns leave their sums in memory, and the last of them to arrive
choose, a warp a token; who is the last to have chosen sorts. For more tokens than FUSED_TOKENS XLA's product makes the logits:
it reads x once for all weights where a program here reads its columns of every token, and a launch more no longer counts.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Bool, Float, Int

from inkling_jax.kernels import mlir as m
from inkling_jax.kernels.expert_matmul import grouping
from inkling_jax.kernels.expert_matmul.group import Grouping, Groups, group
from inkling_jax.kernels.launch import launch
from inkling_jax.kernels.mlir import Value
from inkling_jax.kernels.router import device
from inkling_jax.kernels.router.device import Shape
from inkling_jax.kernels.router.reference import Routing

FUSED_TOKENS = 64
COLUMNS = 128  # the least of a program: 32 for each of its warps
SPLITS = (8, 4, 2, 1)
# What the counter holds between launches: a number that is nobody else's, since XLA keeps equal constants in one place, and what
# the kernel reads beside it may be a constant too (`first` is 0 where one device holds all experts).
IDLE = 0x2B5A_11ED


@functools.partial(jax.jit, static_argnames=("chosen", "route_scale", "wanted"))
def route(
    x: BFloat16[Array, "T D"],
    weight: BFloat16[Array, "E+J D"],
    bias: Float[Array, " E"],
    global_scale: Float[Array, ""],
    valid: Bool[Array, " T"],
    first: Int[Array, ""],
    chosen: int,
    route_scale: float,
    wanted: Grouping,
) -> tuple[Routing, Groups]:
    """See `reference.route`, and `group.group` of the chosen experts, of which this device holds `wanted.experts` from `first`
    on. Tokens that are not valid are routed, but have no rows.
    """
    tokens, width = x.shape
    experts = bias.shape[0]
    splits = next((s for s in SPLITS if width % (s * COLUMNS) == 0), 0) if tokens <= FUSED_TOKENS else 0
    shape = Shape(tokens, width, experts, weight.shape[0] - experts, chosen, splits, route_scale)
    if splits:
        given = {"x": x, "weight": weight}
    else:
        given = {"logits": jnp.einsum("td,ed->te", x, weight, preferred_element_type=jnp.float32)}
    given |= {
        "bias": bias.astype(jnp.float32),
        "global_scale": global_scale.astype(jnp.float32).reshape(1),
        "valid": valid.astype(jnp.int32),
        "first_expert": jnp.asarray(first, jnp.int32).reshape(1),
        # A constant of one element stays where it is, so that the kernel can count in it; it leaves it as it was.
        "counter": jnp.full(1, IDLE, jnp.int32),
    }
    if tokens * chosen > grouping.MAX_ENTRIES:
        made = _launch(shape, None, given)
        return _routing(made), group(made["local"].reshape(tokens, chosen), *wanted)
    sorting = grouping.Sorting(tokens, chosen, *wanted)
    made = _launch(shape, sorting, given)
    return _routing(made), sorting.groups({name: made[name] for name in sorting.results()})


def _routing(made: dict[str, Array]) -> Routing:
    return Routing(made["experts"], made["weights"], made["shared"])


def _launch(shape: Shape, sorting: grouping.Sorting | None, operands: dict[str, Array]) -> dict[str, Array]:
    results = {
        "experts": jax.ShapeDtypeStruct((shape.tokens, shape.chosen), jnp.int32),
        "weights": jax.ShapeDtypeStruct((shape.tokens, shape.chosen), jnp.float32),
        "shared": jax.ShapeDtypeStruct((shape.tokens, shape.shared), jnp.float32),
        "local": jax.ShapeDtypeStruct((shape.tokens * shape.chosen,), jnp.int32),
    }
    scratch = {"mailbox": plgpu.SMEM((1,), jnp.int32)}
    if shape.splits:
        results["partial"] = jax.ShapeDtypeStruct((shape.splits, shape.tokens, shape.rows), jnp.float32)
        scratch["sums"] = plgpu.SMEM((device.WARPS, -(-shape.tokens // 8) * 128), jnp.float32)
    if sorting is not None:
        results |= sorting.results()
        scratch |= dict(zip(("counts", "totals"), sorting.scratch(), strict=True))
    run = functools.partial(_run, shape, sorting)
    return launch("router", run, operands=operands, changed={}, results=results, shared=scratch, programs=shape.programs)


def _run(shape: Shape, sorting: grouping.Sorting | None, program: Value, p: dict[str, Value]) -> None:
    """What a program does."""
    worker = program
    if shape.splits:
        device.multiply(shape, program, p["x"], p["weight"], p["partial"], p["sums"])
        before = m.subtract(device.arrive(p["counter"], 1, p["mailbox"]), IDLE)
        # The last to arrive is the first worker, and does not wait.
        worker = m.subtract(shape.programs - 1, before)
    with m.when(m.less(worker, shape.workers)):
        if shape.splits:
            counted = mgpu.utils.SemaphoreRef(p["counter"])
            counted.wait(IDLE + shape.programs, decrement=False, memory_scope="gpu")
        _choose(shape, worker, p)
        if shape.splits or sorting is not None:
            before = m.subtract(device.arrive(p["counter"], 1 << 16, p["mailbox"]), IDLE)
            with m.when(m.equal(m.shift(before, -16), shape.workers - 1)):
                with m.when(m.equal(m.thread(), 0)):
                    m.store(p["counter"], 0, m.as_int(IDLE))
                if sorting is not None:
                    order = ("token", "place", "expert", "first", "used", "count", "counters", "counts", "totals")
                    grouping.sort(sorting, p["local"], *(p[name] for name in order))


def _choose(shape: Shape, worker: Value, p: dict[str, Value]) -> None:
    def store(token: Value, experts: list[Value], weights: list[Value]) -> None:
        base = m.multiply(token, shape.chosen)
        valid = m.less(0, m.load(p["valid"], token, m.i32()))
        first = m.load(p["first_expert"], 0, m.i32())
        for a, expert in enumerate(experts):
            m.store(p["experts"], m.add(base, a), expert)
            m.store(p["local"], m.add(base, a), m.choose(valid, m.subtract(expert, first), -1))
            m.store(p["weights"], m.add(base, a), weights[a])
        for j, weight in enumerate(weights[shape.chosen :]):
            m.store(p["shared"], m.add(m.multiply(token, shape.shared), j), weight)

    logits = p["partial"] if shape.splits else p["logits"]
    device.choose(shape, worker, logits, p["bias"], p["global_scale"], store)
