"""The Hopper kernels of the routed feed-forward: interpreted on the CPU, lowered for CUDA there, and run on the GPU."""

from __future__ import annotations

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_jax.errors import InputError
from inkling_jax.kernels.expert_matmul import batch, cases, decode, decode_plan, sm90
from inkling_jax.kernels.expert_matmul.cases import Case
from inkling_jax.kernels.expert_matmul.group import group, slots_needed
from inkling_jax.kernels.expert_matmul.grouping import group_on_device
from inkling_jax.kernels.expert_matmul.nvfp4 import Nvfp4, dequantize
from inkling_jax.kernels.expert_matmul.pack import BF16_LINES, LINES, Packed, Shared, pack
from inkling_jax.kernels.expert_matmul.sm90 import Regime

# With how many shared experts. Tiles split over four warpgroups, two and one; weights of bfloat16; shared experts in two slots.
INTERPRETED = [
    (Case(256, 128, 2, 4, 3, 1), 2),
    (Case(256, 256, 3, 3, 2, 2, packed=False), 1),
    *(
        pytest.param(case, number, marks=pytest.mark.slow)
        for case, number in (
            (Case(256, 256, 8, 8, 5, 3), 0),
            (Case(256, 128, 3, 6, 33, 2), 2),
            (Case(1024, 1024, 4, 4, 1, 2), 0),
            (Case(512, 384, 6, 6, 13, 2, "one"), 0),
        )
    ),
]
CUDA = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"), reason="lowering for CUDA asks the CUDA plugin which PTX it can assemble"
)


def numbers(weight: Nvfp4 | jax.Array) -> np.ndarray:
    """What a weight stands for."""
    if not isinstance(weight, Nvfp4):
        return np.asarray(weight).astype(np.float32)
    halves = [np.asarray(half) for half in dequantize(weight, jnp.float32)]
    return np.stack(halves, -1).reshape(*halves[0].shape[:-1], -1)


def expected(given: dict) -> np.ndarray:
    """The answer in float32 from the numbers that the weights stand for, token by token."""
    x = np.asarray(given["x"]).astype(np.float32)
    w13, w2 = (numbers(given[name]) for name in ("w13", "w2"))
    out = np.zeros_like(x)
    for t, a in np.ndindex(*given["experts"].shape):
        e = int(given["experts"][t, a])
        if 0 <= e < len(w2):
            gate, up = w13[e, 0] @ x[t], w13[e, 1] @ x[t]
            out[t] += float(given["weights"][t, a]) * (w2[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def error(got: jax.Array, want: np.ndarray) -> float:
    """Relative, of the whole."""
    return float(np.linalg.norm(np.asarray(got).astype(np.float32) - want) / max(np.linalg.norm(want), 1e-30))


def shared_of(case: Case, number: int, hidden: int = 128) -> tuple[Shared, np.ndarray]:
    """`number` shared experts of `hidden` channels as the kernels take them, and what they add to every token, in float32."""
    keys = jax.random.split(jax.random.key(5), 4)
    d, f = case.width, hidden
    w13 = (jax.random.normal(keys[0], (number, 2, f, d)) * d**-0.5).astype(jnp.bfloat16)
    w2 = (jax.random.normal(keys[1], (d, number, f)) * f**-0.5).astype(jnp.bfloat16)
    weights = jax.random.uniform(keys[2], (case.tokens, number))
    wide = w13.swapaxes(0, 1).reshape(1, 2, number * f, d)
    packed = Shared(weights, pack(wide, "w13"), pack(w2.reshape(1, d, number * f), "w2"))
    x = np.asarray(cases.inputs(case)["x"]).astype(np.float32)
    out = np.zeros_like(x)
    for j in range(number):
        gate, up = (x @ np.asarray(w13[j, i]).astype(np.float32).T for i in (0, 1))
        hidden_j = gate / (1 + np.exp(-gate)) * up @ np.asarray(w2[:, j]).astype(np.float32).T
        out += np.asarray(weights)[:, j, None] * hidden_j
    return packed, out


@pytest.mark.parametrize(("case", "number"), INTERPRETED, ids=str)
def test_interpreted(case: Case, number: int) -> None:
    """Copies, barriers, tiles and grouping of the decode kernel give the answer, with two processors sharing the work."""
    given = cases.inputs(case)
    w13, w2 = pack(given["w13"], "w13"), pack(given["w2"], "w2")
    shared, rest = shared_of(case, number) if number else (None, 0)
    rows = 16 if case.tokens > 8 else 8
    slots = slots_needed(case.tokens, case.choices, case.held, rows)
    of_shared = (shared.w13, shared.w2, number) if shared else None
    plan = decode_plan.plan(w13, w2, case.tokens, case.choices, slots, rows, processors=2, shared=of_shared)
    groups = group(given["experts"], case.held, rows, plan.counters)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = decode.decode(given["x"], given["weights"], groups, w13, w2, plan, shared, launches=3, interpret=True)
    assert error(got, expected(given) + rest) < 3.5e-3


BATCH = [
    (Case(256, 128, 2, 3, 9, 1), 0),
    *(
        pytest.param(case, number, marks=pytest.mark.slow)
        for case, number in (
            (Case(256, 256, 3, 5, 24, 2), 0),
            (Case(512, 128, 4, 4, 9, 2, "one"), 0),
            (Case(256, 128, 3, 3, 20, 2, packed=False), 0),
            (Case(256, 128, 2, 2, 40, 1), 2),
        )
    ),
]


@pytest.mark.parametrize(("case", "number"), BATCH, ids=str)
def test_batch_interpreted(case: Case, number: int) -> None:
    """The kernel for many rows an expert gives the answer: experts with no rows, with one slot and with two."""
    given = cases.inputs(case)
    w13, w2 = pack(given["w13"], "w13"), pack(given["w2"], "w2")
    plans = tuple(batch.plan(w, 32, processors=2) for w in (w13, w2))
    groups = group(given["experts"], case.held, 32, 0, batch.ALIGN)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        if number:
            shared, want = shared_of(case, number)
            got = batch.batch_shared(given["x"], shared, tuple(batch.plan(w, 32, 2) for w in shared[1:]), interpret=True)
        else:
            got = batch.batch(given["x"], given["weights"], groups, w13, w2, plans, interpret=True)
            want = expected(given)
    assert error(got, want) < 3.5e-3


@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "rows", "align"),
    [(1, 6, 32, 8, 1), (40, 6, 5, 8, 1), (9, 1, 3, 4, 1), (2, 2, 1, 1, 1), (40, 3, 5, 16, 8), (3, 2, 20, 32, 8)],
)
def test_group(tokens: int, choices: int, experts: int, rows: int, align: int) -> None:
    """Every row that exists is in one slot of its expert, in order of token and choice, and the others are nowhere."""
    rng = np.random.default_rng(tokens)
    chosen = rng.integers(-2, experts + 2, (tokens, choices))
    found = jax.tree.map(np.asarray, group(jnp.asarray(chosen), experts, rows, 3, align))
    row, slots = 0, []
    for e in range(experts):
        mine = np.argwhere(chosen == e)
        row = -(-row // align) * align
        start = row
        for t, a in mine:
            assert found.place[t, a] == row and found.token[row] == t
            row += 1
        slots += [(e, start + i, min(rows, len(mine) - i)) for i in range(0, len(mine), rows)]
    assert found.count.tolist() == [len(slots)]
    assert list(zip(*(f[: len(slots)].tolist() for f in (found.expert, found.first, found.used)), strict=True)) == slots
    assert (found.place[(chosen < 0) | (chosen >= experts)] < 0).all()
    assert len(slots) <= slots_needed(tokens, choices, experts, rows) == len(found.expert)
    assert found.counters.tolist() == [0, 0, 0]


def abstract(case: Case) -> tuple:
    """Shapes of the arguments."""
    shape = jax.ShapeDtypeStruct
    d, f, e, lines = case.width, case.hidden, case.held, LINES if case.packed else BF16_LINES
    return (
        shape((case.tokens, d), jnp.bfloat16),
        shape((case.tokens, case.choices), jnp.int32),
        shape((case.tokens, case.choices), jnp.float32),
        Packed(shape((e, f // 32, d // 128, lines, 128), jnp.int32), shape((e, 2), jnp.float32)),
        Packed(shape((e, d // 64, f // 128, lines, 128), jnp.int32), shape((e,), jnp.float32)),
    )


SHARED = (
    (Case(512, 256, 32, 32, 1, 6), 2, 256),
    (Case(512, 256, 32, 256, 8, 6), 2, 128),
    (Case(256, 128, 4, 400, 2, 1), 1, 384),  # no row of a routed expert
    (Case(512, 256, 6, 6, 16, 2, packed=False), 2, 256),
    (Case(1024, 512, 256, 256, 33, 6), 2, 512),
    (Case(768, 384, 256, 256, 64, 6), 3, 128),
    (Case(512, 256, 256, 256, 65, 6), 2, 256),
    (Case(512, 256, 4, 4, 700, 2), 2, 256),
)
GROUPED = ((1, 6, 32, 0, 1), (64, 6, 32, 224, 1), (50, 3, 300, 9, 8), (1000, 6, 12, 3, 8))


def regime(case: Case) -> Regime:
    """What the product chooses."""
    return sm90.regime(case.tokens, case.choices, case.routed)


@CUDA
@pytest.mark.parametrize("case", [*cases.SMALL, *(c for c in cases.BENCH if c.tokens in (1, 64, 8192))], ids=lambda c: c.name)
def test_lowers(case: Case) -> None:
    """What only the compiler refuses (shared memory, layouts, alignments) is seen without a GPU."""
    text = sm90.run.trace(*abstract(case), processors=132, how=regime(case)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2


@CUDA
@pytest.mark.parametrize(("case", "number", "hidden"), SHARED, ids=str)
def test_lowers_with_shared_experts(case: Case, number: int, hidden: int) -> None:
    """Up to 64 tokens the shared experts are in the launch of the routed, beyond they have their own two."""
    d, word, scale = case.width, jnp.int32, jnp.float32
    shared = Shared(
        jax.ShapeDtypeStruct((case.tokens, number), scale),
        Packed(jax.ShapeDtypeStruct((1, number * hidden // 32, d // 128, BF16_LINES, 128), word), jnp.ones((1, 2), scale)),
        Packed(jax.ShapeDtypeStruct((1, d // 64, number * hidden // 128, BF16_LINES, 128), word), jnp.ones(1, scale)),
    )
    traced = sm90.run.trace(*abstract(case), processors=132, how=regime(case), shared=shared)
    launches = 2 if case.tokens <= 64 else 4 + (regime(case).kernel == "batch")
    assert str(traced.jaxpr).count("= mpmd_map") == launches
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_wrong_x_is_refused() -> None:
    """Only bfloat16 of the weights' width."""
    x, *rest = abstract(cases.SMALL[0])
    with pytest.raises(InputError, match=r"float32\[1, 256\]; expected bfloat16\[1, 256\]"):
        sm90.run.trace(jax.ShapeDtypeStruct(x.shape, jnp.float32), *rest, processors=132, how=Regime("decode", 8))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "choices", "experts", "beyond", "align"), GROUPED)
def test_group_on_gpu(tokens: int, choices: int, experts: int, beyond: int, align: int) -> None:
    """The grouping in one launch agrees with the plain one in all that is promised."""
    chosen = jax.random.randint(jax.random.key(tokens), (tokens, choices), 0, experts + beyond, jnp.int32)
    want, got = (jax.tree.map(np.asarray, f(chosen, experts, 32, 70, align)) for f in (group, group_on_device))
    slots, row = int(want.count[0]), want.place[want.place >= 0]
    assert slots == int(got.count[0]) and not got.counters.any()
    assert np.array_equal(want.place, got.place) and np.array_equal(want.token[row], got.token[row])
    for name in ("expert", "first", "used"):
        assert np.array_equal(getattr(got, name)[:slots], getattr(want, name)[:slots])


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name)
def test_on_gpu(case: Case) -> None:
    """The kernel's answer is right and the same bits each time."""
    given = cases.inputs(case)
    args = (given["x"], given["experts"], given["weights"], pack(given["w13"], "w13"), pack(given["w2"], "w2"))
    got = [np.asarray(sm90.expert_matmul(*args, routed=case.routed)) for _ in range(3)]
    assert error(got[0], expected(given)) < 3.5e-3
    assert all(np.array_equal(g.view(np.uint16), got[0].view(np.uint16)) for g in got)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "number", "hidden"), SHARED, ids=str)
def test_shared_on_gpu(case: Case, number: int, hidden: int) -> None:
    """With shared experts in the same launch, or in launches of their own."""
    given = cases.inputs(case)
    args = (given["x"], given["experts"], given["weights"], pack(given["w13"], "w13"), pack(given["w2"], "w2"))
    shared, rest = shared_of(case, number, hidden)
    run = partial(sm90.run, how=regime(case), processors=sm90.processors(), shared=shared)
    got = [np.asarray(run(*args)) for _ in range(3)]
    assert error(got[0], expected(given) + rest) < 3.5e-3
    assert all(np.array_equal(g.view(np.uint16), got[0].view(np.uint16)) for g in got)
