"""The append of keys and values: the reference against float64 by hand, the Hopper kernel by numpy, lowered, and on the GPU."""

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
from inkling_jax.kernels.kv_append import Appended, Kept, append, cases, device, sm90
from inkling_jax.kernels.kv_append.cases import CASES, RANK, Case
from inkling_jax.kernels.pages import Fp8Pages, parts, quantize
from inkling_jax.kernels.residual import device as residual_device
from inkling_jax.kernels.residual.cases import EPS

CUDA = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"), reason="lowering for CUDA asks the CUDA plugin which PTX it can assemble"
)
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
FIELDS = ("q", "rel", *Kept._fields)
STEP = 2.0**-4  # of an e4m3 number, relative: half the distance to the next; of a small one 2^-10 of the scale


def rounded(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(jnp.bfloat16).astype(np.float64)


def check(case: Case, found: Appended, *, excess: bool = False) -> None:
    """Rounded otherwise now and then, since sums go in another order; exact where nothing is computed.

    excess: roundings between may be left out, as XLA does.
    """
    want = cases.expected(case, cases.inputs(case), rounded)
    got = dict(zip(FIELDS, (found.q, found.rel, *found.kept), strict=True))
    for name in FIELDS:
        a, b = cases.floats(got[name]), want[name]
        if case.fp8 and name in ("k_pages", "v_pages"):
            scale = np.abs(b).max(-1, keepdims=True) / 448
            assert (np.abs(a - b) <= np.maximum(STEP * np.abs(b), 2.0**-10 * scale) * 1.1 + 2**-6).all(), name
        elif name in ("k_pages", "v_pages", "q"):
            np.testing.assert_allclose(a, b, rtol=2**-5 if excess else 2**-6, atol=2**-6, err_msg=name)
            assert np.mean(a != b) <= (1 if excess else 2e-3), name
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("case", (*CASES[:2], *CASES[-2:]), ids=lambda case: case.name)
def test_reference(case: Case) -> None:
    """Every place of the ring and of a page, pages that are not there, and rows that idle."""
    check(case, jax.jit(append, static_argnames=("rank", "eps"))(**cases.inputs(case)), excess=True)


@EACH_CASE
def test_kernel_by_numpy(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its threads do, and nothing else changes in pages and states."""
    given = cases.inputs(case)
    kept, tokens = given["kept"], len(case.positions)
    sizes = (case.kv_heads, case.share, case.width, RANK, kept.k_pages.shape[0], case.page, case.columns)
    shape = device.Shape(tokens, *sizes, case.scaled, EPS, case.fp8)
    heads = (tokens, case.kv_heads * case.share)
    results = {name: np.full((*heads, size), np.nan, jnp.bfloat16) for name, size in (("q", case.width), ("rel", RANK))}
    arrays = {"projected": given["projected"], "table": given["table"], "tau": given["tau"]} | results
    for fields in (given["weights"], given["rows"], kept):
        arrays |= fields._asdict()
    arrays |= parts(kept.k_pages, kept.v_pages)
    memories = {name: threads.memory(array) for name, array in arrays.items() if array is not None}
    block = threads.Threads(128)
    for module in (device, residual_device, ring_device):
        monkeypatch.setattr(module, "m", block)
    threads.run(functools.partial(device.append, shape), memories, shape.programs)

    def made(name: str) -> jax.Array:
        return jnp.asarray(memories[name].view(arrays[name].dtype).reshape(arrays[name].shape))

    k_pages, v_pages = (Fp8Pages(made(f"{w}_pages"), made(f"{w}_scale")) if case.fp8 else made(f"{w}_pages") for w in "kv")
    check(case, Appended(made("q"), made("rel"), Kept(k_pages, v_pages, made("k_state"), made("v_state"))))


def test_kernel_quantises_as_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same codes and scales to the bit, a vector a warp: of every size, of zeros, and where something is not finite."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 128)) * np.exp2(rng.integers(-110, 30, (64, 1)))).astype(jnp.bfloat16)
    x[0], x[1, 5], x[2, 7], x[3] = 0, np.nan, -np.inf, 448
    block = threads.Threads(64 * 32)
    monkeypatch.setattr(device, "m", block)
    words = x.view(np.int32).reshape(-1, 2)
    with np.errstate(invalid="ignore"):
        codes, scale = device._quantized([words[:, 0], words[:, 1]])
    want_codes, want_scale = map(np.asarray, jax.jit(quantize)(x))
    np.testing.assert_array_equal(scale.reshape(64, 32), np.repeat(want_scale[:, None], 32, axis=1))
    assert np.isnan(want_scale).nonzero()[0].tolist() == [1, 2]
    finite = np.isfinite(want_scale)
    np.testing.assert_array_equal(codes.view(np.uint8).reshape(64, 128)[finite], want_codes[finite])


def arguments(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays by name, and what is static."""
    given = cases.inputs(case)
    return given, {name: given.pop(name) for name in ("rank", "eps")}


@CUDA
@EACH_CASE
def test_lowers(case: Case) -> None:
    """What only the compiler refuses is seen without a GPU; pages and states are results and operands in one."""
    given, static = arguments(case)
    text = sm90.append.trace(**given, **static).lower(lowering_platforms=("cuda",)).as_text()
    assert "kv_append" in text and text.count("output_operand_alias<") == len(Kept._fields) + 2 * case.fp8


@pytest.mark.gpu
@EACH_CASE
def test_on_gpu(case: Case) -> None:
    """And the same bits each time."""
    given, static = arguments(case)
    results = [jax.tree.map(np.asarray, sm90.append(**given, **static)) for _ in range(3)]
    check(case, results[0])
    for again in results[1:]:
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(results[0]), strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.gpu(bytes=2 * 10**9)
def test_steps_of_one_program_on_gpu() -> None:
    """Six steps of two layers, as decode has them: as the reference computes them, and no pool is copied."""
    case = Case((61, None, 0, 3), columns=128)
    given, static = arguments(case)
    kept, rows = given.pop("kept"), given.pop("rows")

    def program(function: Any) -> Any:
        def step(carry: Any, _: None) -> tuple[Any, tuple[jax.Array, ...]]:
            layers, rows = carry
            made = [function(kept=layer, rows=rows, **given, **static) for layer in layers]
            seen = tuple(array for found in made for array in (found.q, found.rel))
            return ([found.kept for found in made], rows._replace(position=rows.position + rows.count)), seen

        return jax.jit(lambda layers: jax.lax.scan(step, (layers, rows), length=6), donate_argnums=0)

    def layers() -> list[Kept]:
        return [jax.tree.map(jnp.copy, kept), jax.tree.map(lambda a: a + 1, kept)]

    want = program(append)(layers())
    compiled = program(sm90.append).lower(layers()).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < kept.k_pages.nbytes
    for found, expected in zip(jax.tree.leaves(compiled(layers())), jax.tree.leaves(want), strict=True):
        a, b = (np.nan_to_num(np.asarray(array, np.float32)) for array in (found, expected))
        assert np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(b)
