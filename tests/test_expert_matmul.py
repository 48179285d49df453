"""The reference expert product against loops over tokens and experts in float64."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from inkling_jax.kernels.expert_matmul import Nvfp4, expert_matmul, reference

E, D, F = 6, 32, 48
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
run = jax.jit(expert_matmul)


def compiled_anew():
    """A jit that shares no program with `run`, for tests that change the sizes of the loops."""
    return jax.jit(partial(expert_matmul))


@dataclasses.dataclass
class Weights:
    """What the product is given, and the numbers that it stands for in float64."""

    given: tuple
    w13: np.ndarray
    w2: np.ndarray


def unpacked(weight: Nvfp4) -> np.ndarray:
    """value = code * block scale * matrix scale, the even column in the low nibble (spec 7.4)."""
    codes = np.stack([weight.values & 15, weight.values >> 4], axis=-1).reshape(*weight.values.shape[:-1], -1)
    values = np.where(codes >= 8, -1.0, 1.0) * E2M1[codes & 7]
    scale = np.repeat(weight.scale.astype(np.float64), 16, axis=-1)
    return values * scale * weight.scale2.astype(np.float64)[..., None, None]


def packed(shape: tuple[int, ...], rng: np.random.Generator) -> Nvfp4:
    *lead, rows, columns = shape
    return Nvfp4(
        rng.integers(0, 256, (*lead, rows, columns // 2), np.uint8),
        rng.uniform(0.1, 2, (*lead, rows, columns // 16)).astype(ml_dtypes.float8_e4m3fn),
        rng.uniform(0.02, 0.1, lead).astype(np.float32),
    )


def weights(pack: str = "", seed: int = 0) -> Weights:
    """Random weights; `pack` names those in NVFP4."""
    rng = np.random.default_rng(seed)
    given, meant = [], []
    for name, shape in (("w13", (E, 2, F, D)), ("w2", (E, D, F))):
        weight = packed(shape, rng) if name in pack else (rng.standard_normal(shape) * 0.2).astype(np.float32)
        given.append(weight)
        meant.append(unpacked(weight) if isinstance(weight, Nvfp4) else weight.astype(np.float64))
    return Weights(tuple(given), *meant)


def loops(x, experts, gates, w: Weights) -> np.ndarray:
    """Token by token, choice by choice (spec 2.6)."""
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for expert, gate in zip(experts[t], gates[t], strict=True):
            if 0 <= expert < E:
                a, b = w.w13[expert] @ x[t].astype(np.float64)
                out[t] += gate * (w.w2[expert] @ (a / (1 + np.exp(-a)) * b))
    return out


def tokens(count: int, choices: int = 3, seed: int = 1):
    """Inputs, distinct experts and weights."""
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(E)[:choices] for _ in range(count)]).astype(np.int32)
    return rng.standard_normal((count, D)).astype(np.float32), experts, rng.random((count, choices)).astype(np.float32)


def assert_close(found, expected) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("pack", ["", "w13", "w2", "w13 w2"])
def test_plain_and_packed(pack):
    """Either weight may be packed."""
    w, batch = weights(pack), tokens(20)
    assert_close(run(*batch, *w.given), loops(*batch, w))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 17, 64, 100, 129, 300])
def test_any_number_of_tokens(count):
    """One token to more than fill several tiles of every expert."""
    w, batch = weights("w13 w2"), tokens(count)
    assert_close(run(*batch, *w.given), loops(*batch, w))


@pytest.mark.parametrize("count", [1, 5, 300])
def test_all_tokens_to_one_expert(count):
    """The worst split: every row one expert's, the last or the first, and the other experts empty."""
    w, (x, _, gates) = weights(), tokens(count, choices=1)
    for expert in (0, E - 1):
        experts = np.full((count, 1), expert, np.int32)
        assert_close(run(x, experts, gates, *w.given), loops(x, experts, gates, w))


@pytest.mark.parametrize("count", [1, 4, 200])
def test_indices_out_of_range_contribute_nothing(count):
    """Another rank's experts and padding: below 0, E and above; tokens that have no other are zero, even with NaN inputs."""
    w, (x, experts, gates) = weights("w13"), tokens(count)
    experts[:, 1] = np.where(np.arange(count) % 2, -1, E)
    experts[::3, 0] = np.iinfo(np.int32).max
    assert_close(run(x, experts, gates, *w.given), loops(x, experts, gates, w))
    nothing = np.full_like(experts, E)
    assert (np.asarray(run(np.full_like(x, np.nan), nothing, gates, *w.given)) == 0).all()


@pytest.mark.parametrize("count", [2, 40, 300])
@pytest.mark.parametrize("limit", [1, 2 * F * D * 2])
def test_tiles_a_few_at_a_time(count, limit, monkeypatch):
    """Where not all weights may be unpacked at once the result is the same."""
    w, batch = weights("w13 w2"), tokens(count)
    whole = run(*batch, *w.given)
    monkeypatch.setattr(reference, "DEQUANTIZED_ELEMENTS", limit)
    assert_close(compiled_anew()(*batch, *w.given), whole)


@pytest.mark.parametrize("limit", [1, 1 << 27])
def test_unused_experts_may_hold_anything(limit, monkeypatch):
    """NaN in experts that no token chose changes no bit, and NaN in a chosen one reaches its tokens alone."""
    monkeypatch.setattr(reference, "DEQUANTIZED_ELEMENTS", limit)
    product = compiled_anew()
    w, (x, experts, gates) = weights(), tokens(50)
    experts[experts == 4] = 9
    clean = np.asarray(product(x, experts, gates, *w.given))
    for broken in (4, 2):
        spoiled = [np.array(a) for a in w.given]
        for a in spoiled:
            a[broken] = np.nan
        out = np.asarray(product(x, experts, gates, *spoiled))
        hit = (experts == broken).any(axis=1)
        assert hit.any() == (broken == 2)
        assert np.isnan(out[hit]).all()
        np.testing.assert_array_equal(out[~hit], clean[~hit])


def test_a_token_with_nan_spoils_no_other():
    """Rows of a tile do not mix."""
    w, (x, experts, gates) = weights("w13 w2"), tokens(50)
    clean = np.asarray(run(x, experts, gates, *w.given))
    x[7] = np.nan
    out = np.asarray(run(x, experts, gates, *w.given))
    assert np.isnan(out[7]).all()
    np.testing.assert_array_equal(np.delete(out, 7, axis=0), np.delete(clean, 7, axis=0))


def test_gate_and_up_have_scales_of_their_own():
    """Twice the scale of up doubles the output; the gate's passes through silu."""
    w, (x, experts, gates) = weights("w13"), tokens(9)
    w13, w2 = w.given
    doubled = w13._replace(scale2=w13.scale2 * np.array([1, 2], np.float32))
    assert_close(run(x, experts, gates, doubled, w2), 2 * loops(x, experts, gates, w))


def test_small_scales_do_not_underflow():
    """Block scale 2^-9 times matrix scale 2^-110 is a float32; steps in float16 would flush it to zero."""
    w13 = Nvfp4(
        np.full((1, 2, 16, 8), 0x77, np.uint8),
        np.full((1, 2, 16, 1), 2.0**-9).astype(ml_dtypes.float8_e4m3fn),
        np.array([[1, 2.0**-110]], np.float32),
    )
    x = np.full((1, 16), 1.0, np.float32)
    out = run(x, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32), w13, np.eye(16, dtype=np.float32)[None])
    gate = 16 * 6 * 2.0**-9
    np.testing.assert_allclose(out, gate / (1 + math.exp(-gate)) * 16 * 6 * 2.0**-119, rtol=1e-5, atol=0)


def test_bfloat16():
    """In bfloat16 the products accumulate in float32: the error is that of rounding operands, hidden values and output."""
    w, (x, experts, gates) = weights("w13 w2"), tokens(64)
    x = x.astype(ml_dtypes.bfloat16)
    out = run(x, experts, gates, *w.given)
    expected = loops(x, experts, gates, w)
    assert out.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(out, np.float64) - expected) < 6e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("count", [1, 8, 4096])
def test_memory_at_full_size(count):
    """Real widths, a token to a long prompt: all but a bounded number of experts stay packed."""
    experts, choices, model, width = 256, 6, 4096, 2048
    s = jax.ShapeDtypeStruct
    w13, w2 = (
        Nvfp4(s((*lead, rows, size // 2), jnp.uint8), s((*lead, rows, size // 16), jnp.float8_e4m3fn), s(lead, jnp.float32))
        for lead, rows, size in (((experts, 2), width, model), ((experts,), model, width))
    )
    args = s((count, model), jnp.bfloat16), s((count, choices), jnp.int32), s((count, choices), jnp.float32), w13, w2
    compiled = compiled_anew().lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 30  # all experts unpacked are 24 GiB
