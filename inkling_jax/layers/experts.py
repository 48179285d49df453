"""The sparse feed-forward: router, routed experts (packed or not) and shared experts (spec 2.6)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from inkling_jax.config import TextConfig
from inkling_jax.kernels.expert_matmul import Calibrated, Nvfp4, Packed, Shared, expert_matmul
from inkling_jax.kernels.expert_matmul.every import every_expert
from inkling_jax.kernels.expert_matmul.pack import packed_shape
from inkling_jax.kernels.router import Routing
from inkling_jax.layers.mlp import SharedExperts
from inkling_jax.layers.param import param
from inkling_jax.layers.router import Router
from inkling_jax.sharding.collectives import (
    first_local_expert,
    gather_replicas,
    largest_over_model,
    own_rows,
    sum_over_model,
    sum_to_replicas,
)
from inkling_jax.sharding.rules import Axes

ExpertWeight = jax.Array | Nvfp4 | Calibrated | Packed
W13_AXES, W2_AXES = ("experts", None, "expert_ffn", None), ("experts", None, "expert_ffn")


class PackedWeight(nnx.Module):
    """An NVFP4 weight of shape [*lead, O, I], stored as kernels.expert_matmul.Nvfp4 describes."""

    def __init__(self, shape: tuple[int, ...], axes: Axes):
        *lead, out, size = shape
        self.values = param((*lead, out, size // 2), jnp.uint8, axes)
        self.scale = param((*lead, out, size // 16), jnp.float8_e4m3fn, axes)
        self.scale2 = param(tuple(lead), jnp.float32, axes[:-2])

    def __call__(self) -> Nvfp4 | Calibrated:
        return Nvfp4(self.values[...], self.scale[...], self.scale2[...])


class CalibratedWeight(PackedWeight):
    """The same with the largest input that was seen in calibration, as kernels.expert_matmul.Calibrated has it."""

    def __init__(self, shape: tuple[int, ...], axes: Axes):
        super().__init__(shape, axes)
        self.input_amax = param(shape[:1], jnp.float32, axes[:1])

    def __call__(self) -> Calibrated:
        return Calibrated(Nvfp4(self.values[...], self.scale[...], self.scale2[...]), self.input_amax[...])


class KernelWeight(nnx.Module):
    """A weight of shape [E, O, I] or [E, 2, F, I] in the order of the Hopper kernels; `packed`: of NVFP4, else of bfloat16."""

    def __init__(self, shape: tuple[int, ...], axes: Axes, packed: bool):
        rows, columns = axes[-2:]
        self.words = param(packed_shape(shape, packed), jnp.int32, (axes[0], rows, columns, None, None))
        self.scale2 = param(shape[:-2], jnp.float32, axes[:-2])

    def __call__(self) -> Packed:
        return Packed(self.words[...], self.scale2[...])


def _weight(shape: tuple[int, ...], axes: Axes, packed: bool, dtype: jnp.dtype) -> PackedWeight | nnx.Param:
    return PackedWeight(shape, axes) if packed else param(shape, dtype, axes)


class RoutedExperts(nnx.Module):
    """w13 [E, 2, F, D] and w2 [E, D, F] of the experts of this rank, each an array, a PackedWeight or a KernelWeight."""

    def __init__(self, config: TextConfig, packed: frozenset[str], dtype: jnp.dtype):
        experts, width, model = config.num_experts, config.expert_width, config.hidden_size
        self.w13_shape, self.w2_shape = (experts, 2, width, model), (experts, model, width)
        self._declare(W13_AXES, W2_AXES, "w13" in packed, "w2" in packed, dtype)

    def _declare(self, w13_axes: Axes, w2_axes: Axes, w13_packed: bool, w2_packed: bool, dtype: jnp.dtype) -> None:
        self.w13_axes, self.w2_axes = w13_axes, w2_axes
        self.w13 = _weight(self.w13_shape, w13_axes, w13_packed, dtype)
        self.w2 = _weight(self.w2_shape, w2_axes, w2_packed, dtype)

    def __call__(self) -> tuple[ExpertWeight, ExpertWeight]:
        w13, w2 = (w[...] if isinstance(w, nnx.Param) else w() for w in (self.w13, self.w2))
        return w13, w2

    def spread(self, dtype: jnp.dtype) -> None:
        """Hold of all experts those of this rank among all replicas from now on."""
        w13, w2 = (("all_experts", *axes[1:]) for axes in (W13_AXES, W2_AXES))
        self._declare(w13, w2, isinstance(self.w13, PackedWeight), isinstance(self.w2, PackedWeight), dtype)

    def quantize_inputs(self) -> None:
        """Hold packed weights with the scales of their inputs, which are rounded to 4 bits from now on."""
        if isinstance(self.w13, PackedWeight):
            self.w13 = CalibratedWeight(self.w13_shape, self.w13_axes)
        if isinstance(self.w2, PackedWeight):
            self.w2 = CalibratedWeight(self.w2_shape, self.w2_axes)

    def use_kernels(self) -> None:
        """Hold both weights, whatever they were, in the order of the kernels from now on."""
        self.w13 = KernelWeight(self.w13_shape, W13_AXES, isinstance(self.w13, PackedWeight))
        self.w2 = KernelWeight(self.w2_shape, W2_AXES, isinstance(self.w2, PackedWeight))


class SparseMLP(nnx.Module):
    """Routed plus shared experts; one reduction over ranks for both. `packed` names the weights ("w13", "w2") stored as NVFP4."""

    def __init__(self, config: TextConfig, packed: frozenset[str], dtype: jnp.dtype):
        self.router = Router(config, dtype)
        self.experts = RoutedExperts(config, packed, dtype)
        self.shared = SharedExperts(config, dtype)
        self.num_experts = config.num_experts
        self.over_replicas = False  # experts are spread over the replicas, which exchange tokens
        self.every_expert = False  # training: all tokens through all experts, see kernels.expert_matmul.every
        self.measure_inputs = False  # calibration: the tape receives the largest inputs as well

    def __call__(
        self, x: Float[Array, "T D"], valid: Bool[Array, " T"], tape: dict[str, Array] | None = None
    ) -> Float[Array, "T D"]:
        """`tape`, where given, receives "experts" (ascending), "weights" and "shared".

        Where inputs are measured also "amax" [T, 2]: a token's largest magnitude into w13 and, of the experts it chose, into w2.
        """
        w13, w2 = self.experts()
        held = jax.tree.leaves(w13)[0].shape[0]
        first = first_local_expert(held, self.over_replicas)
        if self.over_replicas:
            routing, y = self._exchanged(x, valid, w13, w2, first)
        elif isinstance(w13, Packed) and isinstance(w2, Packed):
            routing, y = self._kernels(x, valid, w13, w2, first)
        else:
            routing = self.router(x)
            local = jnp.where(valid[:, None], routing.experts - first, held)  # out of range: not ours, not read
            multiply: Callable[..., jax.Array] = every_expert if self.every_expert else expert_matmul
            y = multiply(x, local, routing.weights, w13, w2).astype(jnp.float32) + self.shared(x, routing.shared)
        if tape is not None:
            order = jnp.argsort(routing.experts, axis=-1)
            tape["experts"], tape["weights"] = (jnp.take_along_axis(a, order, axis=-1) for a in routing[:2])
            tape["shared"] = routing.shared
            if self.measure_inputs:
                assert isinstance(w13, jax.Array)
                tape["amax"] = largest_over_model(_largest_inputs(x, routing.experts - first, w13))
        return sum_over_model(y.astype(x.dtype))

    def spread_experts(self, dtype: jnp.dtype) -> None:
        """Spread the routed experts over all replicas; each rank then takes the tokens of all of them."""
        self.experts.spread(dtype)
        self.over_replicas = True

    def _exchanged(
        self, x: Float[Array, "T D"], valid: Bool[Array, " T"], w13: ExpertWeight, w2: ExpertWeight, first: Int[Array, ""]
    ) -> tuple[Routing, Float[Array, "T D"]]:
        """The experts of this rank for the tokens of all replicas, and of all ranks' answers those to the tokens here.

        Every rank routes all tokens: that costs less than an exchange of what the router decides.
        """
        tokens, everywhere = gather_replicas(x, valid)
        routing = self.router(tokens)
        held = jax.tree.leaves(w13)[0].shape[0]
        local = jnp.where(everywhere[:, None], routing.experts - first, held)
        y = sum_to_replicas(expert_matmul(tokens, local, routing.weights, w13, w2).astype(jnp.float32))
        routing = jax.tree.map(lambda a: own_rows(a, x.shape[0]), routing)
        return routing, y + self.shared(x, routing.shared)

    def _kernels(
        self, x: Float[Array, "T D"], valid: Bool[Array, " T"], w13: Packed, w2: Packed, first: Int[Array, ""]
    ) -> tuple[Routing, Float[Array, "T D"]]:
        """Two launches at decode: the router with the sorting of rows, and all experts."""
        from inkling_jax.kernels.expert_matmul import sm90  # Pallas' GPU half takes a while to import, and few need it

        tokens, choices, shared = x.shape[0], self.router.chosen, self.shared.packed()
        how = sm90.regime(tokens, choices, self.num_experts)
        step = sm90.plan(tokens, choices, w13, w2, how, sm90.processors(), (*shared, self.shared.count))
        routing, groups = self.router.grouped(x, valid, first, step.grouping)
        return routing, sm90.multiply(x, routing.weights, groups, w13, w2, step, Shared(routing.shared, *shared))


def _largest_inputs(x: Float[Array, "T D"], experts: Int[Array, "T A"], w13: Float[Array, "E 2 F D"]) -> Float[Array, "T 2"]:
    """A token's largest magnitude before w13 and before w2, of those of its experts that are here. Tries all: for calibration."""

    def one(best: Float[Array, " T"], expert: tuple[Array, Array]) -> tuple[Float[Array, " T"], None]:
        index, weight = expert
        hidden = jnp.einsum("td,gfd->tgf", x, weight, preferred_element_type=jnp.float32)
        hidden = (jax.nn.silu(hidden[:, 0]) * hidden[:, 1]).astype(x.dtype).astype(jnp.float32)
        found = jnp.where((experts == index).any(axis=1), jnp.abs(hidden).max(axis=1), 0)
        return jnp.maximum(best, found), None

    hidden, _ = jax.lax.scan(one, jnp.zeros(x.shape[0]), (jnp.arange(w13.shape[0]), w13))
    return jnp.stack([jnp.abs(x.astype(jnp.float32)).max(axis=1), hidden], axis=1)
