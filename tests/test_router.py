"""The router: the reference against float64 by hand, the Hopper kernel lowered for CUDA here and run on the GPU."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.kernels.expert_matmul.group import Grouping, group
from inkling_jax.kernels.router import cases, route, sm90
from inkling_jax.kernels.router.cases import CASES, Case

CUDA = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"), reason="lowering for CUDA asks the CUDA plugin which PTX it can assemble"
)


def check(case: Case, given: dict, experts: np.ndarray, weights: np.ndarray, shared: np.ndarray) -> None:
    """Distinct experts in the order of scores, the lowest index first among equals, and weights from logits without the bias."""
    x, weight, bias = (np.asarray(given[name]).astype(np.float64) for name in ("x", "weight", "bias"))
    logits = x @ weight.T
    score = 1 / (1 + np.exp(-np.maximum(logits[:, : case.experts], -700))) + bias
    rows = np.arange(case.tokens)[:, None]
    assert all(len(set(e)) == case.chosen for e in experts.tolist())
    np.testing.assert_allclose(score[rows, experts], -np.sort(-score, axis=1)[:, : case.chosen], atol=2e-6)
    if case.kind == "ties":  # equal logits and biases give equal scores in any arithmetic, and the others are far apart
        order = np.argsort(-np.round(score, 4), axis=1, kind="stable")
        assert np.array_equal(experts, order[:, : case.chosen])
        assert (np.diff(np.round(score, 4)[rows, order], axis=1) == 0).any(axis=1).all()
    joint = np.concatenate([logits[rows, experts], logits[:, case.experts :]], axis=1)
    low = np.minimum(joint, 0) - np.log1p(np.exp(-np.abs(joint)))  # log of the sigmoid
    share = np.exp(low - low.max(axis=1, keepdims=True))
    want = share / share.sum(axis=1, keepdims=True) * 2.4
    np.testing.assert_allclose(np.concatenate([weights, shared], axis=1), want, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference(case: Case) -> None:
    """Every kind of case, ties and logits far beyond what exp can hold among them."""
    given = cases.inputs(case)
    check(case, given, *(np.asarray(a) for a in jax.jit(route, static_argnames=("chosen", "route_scale"))(**given)))


def arguments(case: Case) -> tuple[tuple, dict]:
    """Of the kernel: every third token is padding."""
    given = cases.inputs(case)
    static = {name: given.pop(name) for name in ("chosen", "route_scale")}
    valid = jnp.arange(case.tokens) % 3 != 1
    return (*given.values(), valid, jnp.int32(case.first)), static | {"wanted": Grouping(case.held, 8, 70)}


@CUDA
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lowers(case: Case) -> None:
    """What only the compiler refuses is seen without a GPU."""
    args, static = arguments(case)
    assert "router" in sm90.route.trace(*args, **static).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("tokens", [1, 65])
def test_what_the_kernel_counts_in_is_nobody_elses(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA keeps equal constants in one place, and `first` is one where a device holds all experts: see what it gives a launch."""

    def kernel(_body: object, out_type: tuple, **_how: object) -> Callable:
        return lambda *operands: jax.pure_callback(lambda *_: 1 / 0, out_type, *operands)

    monkeypatch.setattr(sm90.plgpu, "kernel", kernel)
    (*arrays, _first), static = arguments(Case(tokens))
    route_here = inspect.unwrap(sm90.route)  # its own jit would remember this for other tests
    program = jax.jit(lambda *given: route_here(*given, jnp.int32(0), **static))
    text = program.lower(*arrays).compile().as_text() or ""
    found = re.search(r"custom-call\((.*?)\), custom_call_target", text)
    assert found is not None
    operands = re.findall(r"%[\w.]+", found[1])
    assert len(operands) == (7 if tokens == 1 else 6) and operands.count(operands[-1]) == 1
    assert f"{operands[-1]} = s32[1]{{0}} constant({{{sm90.IDLE}}})" in text


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_gpu(case: Case) -> None:
    """Choice, weights and the sorted rows are right, and the same bits each time."""
    args, static = arguments(case)
    results = [jax.tree.map(np.asarray, sm90.route(*args, **static)) for _ in range(3)]
    routing, groups = results[0]
    check(case, cases.inputs(case), *routing)
    chosen = np.where(np.asarray(args[-2])[:, None], routing.experts - case.first, case.held)
    want = jax.tree.map(np.asarray, group(jnp.asarray(chosen), *static["wanted"]))
    slots, row = int(want.count[0]), want.place[want.place >= 0]
    assert int(groups.count[0]) == slots and np.array_equal(groups.place, want.place) and not groups.counters.any()
    assert np.array_equal(groups.token[row], want.token[row])
    for name in ("expert", "first", "used"):
        assert np.array_equal(getattr(groups, name)[:slots], getattr(want, name)[:slots])
    for again, _ in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(again, routing, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 32, 65])
def test_layers_of_one_program_on_gpu(tokens: int) -> None:
    """Three layers one after the other, `first` a constant as on one device: each sorts by the experts that it chose."""
    (x, *arrays, _first), static = arguments(Case(tokens, experts=8, chosen=3, held=8))

    @jax.jit
    def layers(x: jax.Array) -> list:
        made = []
        for _ in range(3):
            made.append(sm90.route(x, *arrays, jnp.int32(0), **static))
            x = x * made[-1][0].weights[:, :1].astype(x.dtype)
        return made

    for _ in range(2):
        for routing, groups in layers(x):
            local = jnp.where(arrays[-1][:, None], routing.experts, 8)
            assert np.array_equal(groups.place, group(local, *static["wanted"]).place)
