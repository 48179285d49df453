"""Shapes of the routed feed-forward that its tests and its benchmark share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from inkling_jax.kernels.expert_matmul.nvfp4 import Nvfp4


@dataclasses.dataclass(frozen=True)
class Case:
    """`held` experts of `routed` lie on this device; each of `tokens` chooses `choices` of all `routed`."""

    width: int  # D
    hidden: int  # F, of this device
    held: int
    routed: int
    tokens: int
    choices: int = 6
    skew: str = "random"  # or "one": every token chooses the first expert
    packed: bool = True  # NVFP4, else bfloat16

    @property
    def name(self) -> str:
        """Stable, without spaces."""
        end = "" if self.packed else "-bf16"
        return f"D{self.width}-F{self.hidden}-E{self.held}of{self.routed}-T{self.tokens}-A{self.choices}-{self.skew}{end}"

    @property
    def phase(self) -> str:
        return "decode" if self.tokens <= 64 else "prefill"


DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TOKENS = (2048, 8192, 16384)
MODELS = {"Inkling-Small": (4096, 2048), "Inkling": (6144, 3072)}
BENCH = tuple(
    Case(width, hidden // shards, held, routed, tokens)
    for width, hidden in MODELS.values()
    for held, routed, shards in ((32, 256, 1), (32, 32, 1), (256, 256, 8), (256, 256, 1))
    for tokens in DECODE_TOKENS + PREFILL_TOKENS
) + tuple(Case(4096, 2048, 32, 256, tokens, packed=False) for tokens in (1, 64, 8192))
# Everything odd that a test wants: few, many and no rows of an expert, none held at all, columns in threes, one wide expert.
SMALL = (
    Case(256, 256, 8, 8, 1, 3),
    Case(256, 256, 8, 8, 5, 3),
    Case(1024, 1024, 4, 4, 1, 2),
    Case(1024, 512, 12, 48, 3, 6),
    Case(768, 384, 12, 12, 16, 6),
    Case(512, 384, 6, 6, 13, 2, "one"),
    Case(256, 128, 4, 400, 2, 1),
    Case(512, 256, 32, 32, 64, 6),
    Case(512, 256, 3, 5, 200, 2),
    Case(512, 384, 4, 4, 1500, 2, "one"),
    Case(256, 256, 6, 6, 5, 2, packed=False),
    Case(256, 256, 6, 6, 300, 2, packed=False),
)


def routing(case: Case, seed: int) -> tuple[Int32[Array, "T A"], Array]:
    """Distinct experts of each token, those not held here out of range, and weights of the order that a router gives."""
    key, other = jax.random.split(jax.random.key(seed))
    order = jnp.argsort(jax.random.uniform(key, (case.tokens, case.routed)), axis=1)[:, : case.choices].astype(jnp.int32)
    if case.skew == "one":
        order = order.at[:, 0].set(0).at[:, 1:].set(1 + order[:, 1:] % (case.routed - 1))
    order = jnp.where(order < case.held, order, case.held + 7)
    return order, jax.random.uniform(other, order.shape, minval=0.2, maxval=2.0)


def weights_of(case: Case, seed: int) -> tuple[Nvfp4 | Array, Nvfp4 | Array]:
    """Random w13 and w2, made where jax computes; scaled so that outputs are of order one."""

    def make(key: Array, shape: tuple[int, ...], gain: float) -> Nvfp4 | Array:
        if not case.packed:
            return (jax.random.normal(key, shape, jnp.bfloat16) * (gain / shape[-1] ** 0.5)).astype(jnp.bfloat16)
        values, scale, scale2 = jax.random.split(key, 3)
        # Numbers of random codes and scales in 0.02..3 have a standard deviation of 5.
        factor = gain / 5 / shape[-1] ** 0.5
        return Nvfp4(
            jax.random.bits(values, (*shape[:-1], shape[-1] // 2), jnp.uint8),
            jax.random.uniform(scale, (*shape[:-1], shape[-1] // 16), minval=0.02, maxval=3.0).astype(jnp.float8_e4m3fn),
            jax.random.uniform(scale2, shape[:-2], minval=0.5, maxval=1.5) * factor,
        )

    key, other = jax.random.split(jax.random.key(seed))
    d, f, e = case.width, case.hidden, case.held
    return make(key, (e, 2, f, d), 1.5), make(other, (e, d, f), 1.5)


def inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments of `expert_matmul` by name, weights as Nvfp4 or arrays."""
    experts, weights = routing(case, seed)
    w13, w2 = weights_of(case, seed)
    x = jax.random.normal(jax.random.key(seed + 1), (case.tokens, case.width), jnp.bfloat16)
    return {"x": x, "experts": experts, "weights": weights, "w13": w13, "w2": w2}
