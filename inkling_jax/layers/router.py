"""The router: sigmoid scores select with a bias, joint weights of routed and shared experts without it (spec 2.6)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from inkling_jax.config import TextConfig
from inkling_jax.kernels.expert_matmul.group import Grouping, Groups
from inkling_jax.kernels.router import Routing, route
from inkling_jax.layers.param import param


class Router(nnx.Module):
    """Chooses A of E routed experts and weighs them together with the J shared ones, in float32; the last J rows are theirs."""

    def __init__(self, config: TextConfig, dtype: jnp.dtype):
        rows = config.num_experts + config.num_shared_experts
        self.weight = param((rows, config.hidden_size), dtype, (None, None))
        self.bias = param((config.num_experts,), jnp.float32, (None,))
        self.global_scale = param((), jnp.float32, ())
        self.chosen, self.route_scale = config.num_experts_per_token, config.route_scale

    def __call__(self, x: Float[Array, "T D"]) -> Routing:
        """Experts, their weights and the shared experts' weights; all scales applied."""
        return route(x, *self._parameters(), self.chosen, self.route_scale)

    def grouped(
        self, x: Float[Array, "T D"], valid: Bool[Array, " T"], first: Int[Array, ""], wanted: Grouping
    ) -> tuple[Routing, Groups]:
        """The same on Hopper, and the rows of valid tokens sorted by the experts of this rank, which begin with `first`."""
        from inkling_jax.kernels.router import sm90  # Pallas' GPU half takes a while to import, and few need it

        return sm90.route(x, *self._parameters(), valid, first, self.chosen, self.route_scale, wanted)

    def _parameters(self) -> tuple[Float[Array, "E+J D"], Float[Array, " E"], Float[Array, ""]]:
        return self.weight[...], self.bias[...], self.global_scale[...]
