"""The depthwise causal short convolution with its inner residual (spec 2.4), over ragged tokens with a state a slot."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from inkling_jax.cache.ragged import Ragged
from inkling_jax.layers.param import param
from inkling_jax.sharding.rules import Axes

State = Float[Array, "slots m *C"] | None


class ShortConv(nnx.Module):
    """y[t] = x[t] + sum_j w[j] x[t - (width-1) + j]: the last tap multiplies the current token.

    `channels` is any shape (K and V are [heads, width]); weight is [*channels, width].
    """

    def __init__(self, channels: tuple[int, ...], width: int, dtype: jnp.dtype, axes: Axes):
        self.weight = param((*channels, width), dtype, (*axes, None))

    def __call__(self, x: Float[Array, "T *C"], state: State, ragged: Ragged) -> tuple[Float[Array, "T *C"], State]:
        """Convolved tokens in the dtype of x, and the state holding each row's last width-1 inputs.

        The state is a ring: the input at position p lies at p % (width-1). So a step writes its tokens and moves none, in one
        scatter whose updates exist already. None, of a cache that keeps nothing, stays None.
        """
        taps = self.weight[...].astype(jnp.float32)
        y = short_conv(x, taps, previous_inputs(x, state, ragged, taps.shape[-1]))
        return y.astype(x.dtype), next_state(x, state, ragged)


def short_conv(x: Float[Array, "T *C"], taps: Float[Array, "*C width"], past: list[Float[Array, "T *C"]]) -> Float[Array, "T *C"]:
    """The convolution in float32 from each token's input and the list of earlier ones, nearest first."""
    y = x.astype(jnp.float32)
    y = y + taps[..., -1] * y
    for back, earlier in enumerate(past, start=1):
        y = y + taps[..., -1 - back] * earlier.astype(jnp.float32)
    return y


def previous_inputs(x: Float[Array, "T *C"], state: State, ragged: Ragged, width: int) -> list[Float[Array, "T *C"]]:
    """For 1 .. width-1 tokens back: the input there, from this step's tokens or, before them, from the row's state.

    Before a sequence's first token it is zero, whatever another sequence left in the state.
    """
    past = []
    for back in range(1, width):
        earlier = jnp.zeros_like(x)
        if state is not None:
            position, slot = ragged.position - back, ragged.slot[ragged.row]
            earlier = jnp.where(_expand(position >= 0, x), state[slot, position % state.shape[1]], earlier)
        if ragged.longest > 1:
            in_step = ragged.offset >= back
            earlier = jnp.where(_expand(in_step, x), jnp.roll(x, back, axis=0), earlier)
        past.append(earlier)
    return past


def next_state(x: Float[Array, "T *C"], state: State, ragged: Ragged) -> State:
    """The state after this step, in which each row's last tokens are written; rows without tokens keep theirs."""
    if state is None:
        return None
    kept = state.shape[1]
    last = ragged.valid & (ragged.offset >= ragged.count[ragged.row] - kept)
    slot = jnp.where(last, ragged.slot[ragged.row], state.shape[0])
    return state.at[slot, ragged.position % kept].set(x.astype(state.dtype), mode="drop")


def _expand(mask: Array, like: Array) -> Array:
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim))
