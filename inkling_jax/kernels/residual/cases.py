"""Inputs of the residual stream's update that its tests on the CPU and on the GPU share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from inkling_jax.kernels.ring import Rows

EPS = 1e-6
Answer = Float[np.ndarray, "..."]
Rounding = Callable[[Answer], Answer]  # to the kernel's dtype, where it rounds


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


def rows_of(positions: tuple[int | None, ...], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields of `Rows` at `positions`, in shuffled slots; one more slot than rows, the last, is that of all that idle."""
    live = np.asarray([position is not None for position in positions])
    slot = np.where(live, rng.permutation(len(positions)), len(positions))
    return slot.astype(np.int32), np.asarray([p or 0 for p in positions], np.int32), live.astype(np.int32)


def inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments of add_conv_norm by name, bfloat16. In slots that no input of a row may come from lies NaN."""
    rng = np.random.default_rng(seed)
    rows = rows_of(case.positions, rng)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)

    tokens = len(case.positions)
    state = normal(tokens + 1, 3, case.width)
    for slot, position in zip(rows[0], case.positions, strict=True):
        if position is not None and position < 3:
            state[slot, position:] = np.nan
    arrays = {
        "h": normal(tokens, case.width),
        "y": normal(tokens, case.width),
        "taps": normal(case.width, 4),
        "weight": normal(case.width),
        "state": state,
    }
    return {name: jnp.asarray(array) for name, array in arrays.items()} | {
        "rows": Rows(*map(jnp.asarray, rows)),
        "eps": EPS,
    }


def expected(given: Mapping[str, Any], rounded: Rounding = lambda x: x) -> tuple[Answer, Answer, Answer]:
    """What the definition (spec 2.2, 2.4) makes of inputs: h, it normed, and the state, in float64 but for `rounded`."""
    h, y, taps, weight, state = (np.asarray(given[name], np.float64) for name in ("h", "y", "taps", "weight", "state"))
    convolved, state = convolved_rows(y, taps, state, given["rows"])
    h = rounded(h + rounded(convolved))
    return h, normed(h, weight, rounded), state


def normed(x: Answer, weight: Answer, rounded: Rounding) -> Answer:
    """The root-mean-square norm over the last axis."""
    return rounded(rounded(x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS)) * weight)


def convolved_rows(x: Answer, taps: Answer, state: Answer, rows: Rows) -> tuple[Answer, Answer]:
    """x after the short convolution, row by row, and the state with x in it."""
    y, state = x.copy(), state.copy()
    for token, (slot, position, live) in enumerate(zip(*map(np.asarray, rows), strict=True)):
        for back in range(min(3, position) + 1):
            y[token] += taps[..., 3 - back] * (state[slot, (position - back) % 3] if back else x[token])
        if live:
            state[slot, position % 3] = x[token]
    return y, state
