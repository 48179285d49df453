"""The router in plain JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Routing(NamedTuple):
    """What a token is sent to, and with which weights; all scales applied."""

    experts: Int[Array, "T A"]  # of all, not of a device's own; best first
    weights: Float[Array, "T A"]
    shared: Float[Array, "T J"]


def route(
    x: Float[Array, "T D"],
    weight: Float[Array, "E+J D"],
    bias: Float[Array, " E"],
    global_scale: Float[Array, ""],
    chosen: int,
    route_scale: float,
) -> Routing:
    """Router logits in float32, whatever x is, and what `select` makes of them; the last J rows are the shared experts'."""
    logits = jnp.einsum("td,ed->te", x, weight, preferred_element_type=jnp.float32)
    return select(logits, bias, chosen, route_scale * global_scale)


def select(logits: Float[Array, "T E+J"], bias: Float[Array, " E"], chosen: int, scale: float | Float[Array, ""]) -> Routing:
    """top-A of sigmoid + bias (ties to the lower index); weights sigmoid / its sum over the chosen and the shared, scaled."""
    routed, shared = logits[:, : bias.shape[0]], logits[:, bias.shape[0] :]
    _, experts = jax.lax.top_k(jax.nn.sigmoid(routed) + bias, chosen)
    joint = jnp.concatenate([jnp.take_along_axis(routed, experts, axis=1), shared], axis=1)
    weights = jax.nn.softmax(jax.nn.log_sigmoid(joint), axis=-1) * scale
    return Routing(experts, weights[:, :chosen], weights[:, chosen:])
