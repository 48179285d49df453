"""Other ways to compute the routed feed-forward, for rows beside the kernels': what XLA offers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inkling_jax.errors import InputError
from inkling_jax.kernels.expert_matmul import reference
from inkling_jax.kernels.expert_matmul.cases import Case
from inkling_jax.kernels.expert_matmul.nvfp4 import Nvfp4

NAMES = ("xla dequantise", "ragged_dot bf16", "cublas bf16 batched")
BF16_BYTES = 40e9  # the most that a rival's unpacked weights may take
BATCH_BYTES = 4e9


def prepare(
    name: str,
    case: Case,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    given: tuple[Nvfp4 | jax.Array, Nvfp4 | jax.Array],
    hits: int,
    most: int,
) -> tuple[Callable, tuple]:
    """A jitted chain of a call for each of `experts` [calls, T, A], and its arguments.

    Raises InputError for what is too large.
    """
    if name == "xla dequantise":
        return chain(reference.expert_matmul), (x, experts, weights, *given)
    elements = 3 * case.width * case.hidden
    if name == "ragged_dot bf16":
        if 2 * case.held * elements > BF16_BYTES:
            raise InputError(f"{case.name}: bfloat16 weights of {2 * case.held * elements / 1e9:.0f} GB")
        shape = (case.held, case.width, 2 * case.hidden), (case.held, case.hidden, case.width)
        made = (_normal(key, s, s[1] ** -0.5) for key, s in enumerate(shape))
        return chain(_ragged), (x, experts, weights, *made)
    # Only as many experts as are hit, each with as many rows as the fullest has, and no rows gathered: the best case of a batch.
    hits, most = max(1, hits), max(1, most)
    if 2 * hits * most * (case.width + 3 * case.hidden) > BATCH_BYTES:
        raise InputError(f"{case.name}: {hits} experts with {most} rows each")
    sets = len(experts) if 2 * hits * elements < BATCH_BYTES else 1
    w13 = [_normal(i, (hits, 2 * case.hidden, case.width), case.width**-0.5) for i in range(sets)]
    w2 = [_normal(i, (hits, case.width, case.hidden), case.hidden**-0.5) for i in range(sets)]
    return _batched(len(experts)), (_normal(0, (hits, most, case.width), 1.0), w13, w2)


def chain(moe: Callable) -> Callable:
    """A call for each of `experts` [calls, T, A], each after the one before: its routing is a sum with something that is always
    zero of the last result.
    """

    def f(x: Any, experts: Any, weights: Any, *more: Any) -> Any:
        zero = jnp.zeros((), jnp.int32)
        for i in range(experts.shape[0]):
            y = moe(x, experts[i] + zero, weights, *more)
            zero = (y[0, 0] > 1e30).astype(jnp.int32)
        return y

    return jax.jit(f)


def _ragged(x: jax.Array, experts: jax.Array, weights: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
    """Rows sorted by expert; `lax.ragged_dot` for both products."""
    held, choices = w13.shape[0], experts.shape[1]
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    size = jnp.sum(flat[None] == jnp.arange(held)[:, None], axis=1, dtype=jnp.int32)
    hidden = lax.ragged_dot(x[order // choices], w13, size, preferred_element_type=jnp.float32)
    gate, up = jnp.split(hidden, 2, axis=1)
    y = lax.ragged_dot((jax.nn.silu(gate) * up).astype(x.dtype), w2, size, preferred_element_type=jnp.float32)
    back = jnp.zeros_like(y).at[order].set(y).reshape(*experts.shape, -1)
    return jnp.sum(jnp.where((experts < held)[..., None], back * weights[..., None], 0), axis=1).astype(x.dtype)


def _batched(calls: int) -> Callable:
    def f(x: jax.Array, w13: list[jax.Array], w2: list[jax.Array]) -> jax.Array:
        for i in range(calls):
            hidden = jnp.einsum("erd,efd->erf", x, w13[i % len(w13)], preferred_element_type=jnp.float32)
            gate, up = jnp.split(hidden, 2, axis=2)
            y = jnp.einsum("erf,edf->erd", (jax.nn.silu(gate) * up).astype(x.dtype), w2[i % len(w2)])
            x = x + (y[:1, :1] > 1e30).astype(x.dtype)  # zero, but after what was computed
        return y

    return jax.jit(f)


@functools.partial(jax.jit, static_argnames="shape")
def _normal(seed: int, shape: tuple[int, ...], gain: float) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * gain).astype(jnp.bfloat16)
