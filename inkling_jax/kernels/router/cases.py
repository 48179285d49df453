"""Shapes and numbers of the router that its tests on the CPU and on the GPU share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Case:
    """`kind`: "random", "ties" (logits and biases of a few values only) or "far" (logits beyond what exp can hold)."""

    tokens: int
    width: int = 256
    experts: int = 256
    shared: int = 2
    chosen: int = 6
    held: int = 32  # experts of this device, from `first` on
    first: int = 64
    kind: str = "random"

    @property
    def name(self) -> str:
        """Stable, without spaces."""
        return f"T{self.tokens}-D{self.width}-E{self.experts}+{self.shared}-A{self.chosen}-{self.kind}"


CASES = (
    Case(1, 4096),
    Case(1, 6144),
    Case(8, 4096, held=256, first=0),
    Case(64, 6144, held=12, first=240),
    Case(37, 4096, kind="ties"),
    Case(5, kind="far"),
    Case(9, 128, experts=8, shared=1, chosen=3, held=8, first=0),
    Case(3, 512, experts=12, shared=2, chosen=12, held=12, first=0, kind="ties"),
    Case(2, 256, experts=300, shared=3, chosen=1, held=300, first=0),
    Case(65, 4096),
    Case(1365, 256, kind="ties"),
    Case(4000, 512),
)


def inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments of `route` by name."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (case.tokens, case.width))
    weight = jax.random.normal(keys[1], (case.experts + case.shared, case.width))
    bias = 0.3 * jax.random.normal(keys[2], (case.experts,))
    if case.kind == "ties":
        # A few whole numbers in a few places: logits are exact in any order of summation, and many are equal.
        place = jnp.arange(case.width) < 4
        x, weight, bias = jnp.round(x) * place, jnp.round(weight) * place, jnp.round(bias * 4) / 8
    gain = {"random": 1.5, "ties": case.width**0.5 / 4, "far": 300.0}[case.kind]
    weight = weight * (gain / case.width**0.5)
    return {
        "x": x.astype(jnp.bfloat16),
        "weight": weight.astype(jnp.bfloat16),
        "bias": bias.astype(jnp.float32),
        "global_scale": jnp.float32(0.3),
        "chosen": case.chosen,
        "route_scale": 8.0,
    }
