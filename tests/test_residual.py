"""The residual stream's update: the reference against float64 by hand, the Hopper kernel by numpy, lowered, and on the GPU."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import threads

from inkling_jax.kernels import ring_device
from inkling_jax.kernels.residual import add_conv_norm, cases, device, sm90
from inkling_jax.kernels.residual.cases import CASES, Case

CUDA = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"), reason="lowering for CUDA asks the CUDA plugin which PTX it can assemble"
)
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(jnp.bfloat16).astype(np.float64)


def check(case: Case, found: tuple[Any, ...], *, excess: bool = False) -> None:
    """Of live rows: h, the norm of that h as it was rounded, and exactly the state. Sums in another order may round otherwise.

    excess: roundings between may be left out, as XLA does.
    """
    near, often = (2**-5, 1) if excess else (2**-6, 0.01)
    given = cases.inputs(case)
    live = np.flatnonzero(given["rows"].count)
    want_h, _, want_state = cases.expected(given, rounded)
    got_h, got_normed, got_state = (np.asarray(a).astype(np.float64) for a in found)
    want_normed = cases.normed(got_h, np.asarray(given["weight"], np.float64), rounded)
    for got, want in ((got_h, want_h), (got_normed, want_normed)):
        np.testing.assert_allclose(got[live], want[live], rtol=near, atol=2**-6)
        assert np.mean(got[live] != want[live]) <= often
    np.testing.assert_array_equal(got_state, want_state)


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_reference(case: Case) -> None:
    """Every place of the ring, the first positions of a sequence, and rows that idle."""
    check(case, jax.jit(add_conv_norm, static_argnames="eps")(**cases.inputs(case)), excess=True)


@EACH_CASE
def test_kernel_by_numpy(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its threads do, with this h, state and norm as they lie in memory."""
    given = cases.inputs(case)
    rows, shape = given.pop("rows"), device.Shape(len(case.positions), case.width, given.pop("eps"))
    arrays = given | rows._asdict() | {name: jnp.full_like(given["h"], jnp.nan) for name in ("next_h", "normed")}
    memories = {name: threads.memory(array) for name, array in arrays.items()}
    memories["sums"] = threads.memory(np.full(shape.warps, np.nan, np.float32))
    block = threads.Threads(shape.threads)
    for module in (device, ring_device):
        monkeypatch.setattr(module, "m", block)
    threads.run(functools.partial(device.add_conv_norm, shape), memories, shape.tokens)
    names = {"next_h": "h", "normed": "h", "state": "state"}
    check(case, tuple(memories[name].view(jnp.bfloat16).reshape(given[like].shape) for name, like in names.items()))


def arguments(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays by name, and what is static."""
    given = cases.inputs(case)
    return given, {"eps": given.pop("eps")}


@CUDA
@EACH_CASE
def test_lowers(case: Case) -> None:
    """What only the compiler refuses is seen without a GPU; the state is result and operand in one."""
    given, static = arguments(case)
    text = sm90.add_conv_norm.trace(**given, **static).lower(lowering_platforms=("cuda",)).as_text()
    assert "residual" in text and text.count("output_operand_alias<") == 1


@pytest.mark.gpu
@EACH_CASE
def test_on_gpu(case: Case) -> None:
    """And the same bits each time."""
    given, static = arguments(case)
    results = [jax.tree.map(np.asarray, sm90.add_conv_norm(**given, **static)) for _ in range(3)]
    check(case, results[0])
    for again in results[1:]:
        assert all(np.array_equal(a.view(np.int16), b.view(np.int16)) for a, b in zip(again, results[0], strict=True))


@pytest.mark.gpu
def test_steps_of_one_program_on_gpu() -> None:
    """Six steps of three layers, as decode has them: as the reference computes them, and no state is copied."""
    width, slots, layers = 4096, 1 << 12, 3
    given, static = arguments(Case((0, None, 5), width))
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    states = [normal(key, (slots, 3, width)) for key in jax.random.split(jax.random.key(0), layers)]
    given.pop("state")

    def program(update: Any) -> Any:
        def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
            h, y, states, rows = carry
            kept = []
            for state in states:
                h, y, state = update(h, y, given["taps"], given["weight"], state, rows, **static)
                kept.append(state)
            # not the kernel's own result: XLA would launch it as the write into a stack of results, and copy the state for that
            return (h, y, kept, rows._replace(position=rows.position + rows.count)), y.astype(jnp.float32)

        return jax.jit(
            lambda states: jax.lax.scan(step, (given["h"], given["y"], states, given["rows"]), length=6), donate_argnums=0
        )

    want = program(add_conv_norm)(list(map(jnp.copy, states)))
    compiled = program(sm90.add_conv_norm).lower(states).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < states[0].nbytes
    got = compiled(states)
    live = np.asarray(given["rows"].count) > 0
    for found, expected in ((got[1][:, live], want[1][:, live]), *zip(got[0][2], want[0][2], strict=True)):
        found, expected = (np.asarray(a, np.float32) for a in (found, expected))
        assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)
