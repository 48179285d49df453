"""Inputs of the residual stream's update that its tests on the CPU and on the GPU share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from inkling_jax.kernels.ring import Rows

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows at these positions, each in a slot of its own; None: an idle row, in the last slot."""

    positions: tuple[int | None, ...]
    width: int = 256

    @property
    def name(self) -> str:
        """Stable, without spaces."""
        return f"T{len(self.positions)}-D{self.width}"


BEGINNING = (0, 1, 2, 3, 4, None, 1_048_575, 131_072, None)
CASES = (
    Case(BEGINNING),
    Case(BEGINNING, 8),
    Case((5,), 4096),
    Case((None, 7), 6144),
    Case((2,), 6152),
    Case(tuple(range(64)), 1032),
)


def rows_of(positions: tuple[int | None, ...], rng: np.random.Generator) -> tuple[Rows, int]:
    """Rows at `positions` in shuffled slots, and how many slots there are: one more than rows, the last for all that idle."""
    count = len(positions)
    live = np.asarray([position is not None for position in positions])
    slot = np.where(live, rng.permutation(count), count)
    return Rows(*(jnp.asarray(a, jnp.int32) for a in (slot, [p or 0 for p in positions], live))), count + 1


def inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments of add_conv_norm by name, bfloat16. In slots that no input of a row may come from lies NaN."""
    rng = np.random.default_rng(seed)
    rows, slots = rows_of(case.positions, rng)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)

    tokens = len(case.positions)
    state = normal(slots, 3, case.width)
    for slot, position in zip(np.asarray(rows.slot), case.positions, strict=True):
        if position is not None and position < 3:
            state[slot, position:] = np.nan
    arrays = {
        "h": normal(tokens, case.width),
        "y": normal(tokens, case.width),
        "taps": normal(case.width, 4),
        "weight": normal(case.width),
        "state": state,
    }
    return {name: jnp.asarray(array) for name, array in arrays.items()} | {"rows": rows, "eps": EPS}
