"""The router: sigmoid scores select with a bias, joint weights of routed and shared experts without it (spec 2.6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from inkling_jax.config import TextConfig
from inkling_jax.layers.linear import linear
from inkling_jax.layers.param import param


class Router(nnx.Module):
    """Chooses A of E routed experts and weighs them together with the J shared ones, in float32; the last J rows are theirs."""

    def __init__(self, config: TextConfig, dtype: jnp.dtype):
        rows = config.num_experts + config.num_shared_experts
        self.weight = param((rows, config.hidden_size), dtype, (None, None))
        self.bias = param((config.num_experts,), jnp.float32, (None,))
        self.global_scale = param((), jnp.float32, ())
        self.chosen, self.route_scale = config.num_experts_per_token, config.route_scale

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int[Array, "T A"], Float[Array, "T A"], Float[Array, "T J"]]:
        """Experts, their weights, the shared experts' weights; all scales applied."""
        logits = linear(x, self.weight[...], jnp.float32)
        return route(logits, self.bias[...], self.chosen, self.route_scale * self.global_scale[...])


def route(
    logits: Float[Array, "T E+J"], bias: Float[Array, " E"], chosen: int, scale: float | Float[Array, ""]
) -> tuple[Int[Array, "T A"], Float[Array, "T A"], Float[Array, "T J"]]:
    """top-A of sigmoid + bias (ties to the lower index); weights sigmoid / its sum over the chosen and the shared, scaled."""
    routed, shared = logits[:, : bias.shape[0]], logits[:, bias.shape[0] :]
    _, experts = jax.lax.top_k(jax.nn.sigmoid(routed) + bias, chosen)
    joint = jnp.concatenate([jnp.take_along_axis(routed, experts, axis=1), shared], axis=1)
    weights = jax.nn.softmax(jax.nn.log_sigmoid(joint), axis=-1) * scale
    return experts, weights[:, :chosen], weights[:, chosen:]
