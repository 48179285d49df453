"""Hybrid attention: no rotary embedding, a learned bias by distance, log scaling on global layers (spec 2.3)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from inkling_jax.cache.paged import LayerCache, append
from inkling_jax.cache.ragged import Ragged
from inkling_jax.config import TextConfig
from inkling_jax.kernels.kv_append import Kept, Weights
from inkling_jax.kernels.paged_attention import RelativeBias, paged_attention, plan_attention, prepare_bias
from inkling_jax.kernels.paged_attention.unpaged import attention_within
from inkling_jax.kernels.ring import Rows
from inkling_jax.layers.linear import linear
from inkling_jax.layers.norm import RMSNorm
from inkling_jax.layers.param import param
from inkling_jax.layers.short_conv import ShortConv
from inkling_jax.sharding.collectives import sum_over_model


@dataclasses.dataclass(frozen=True)
class AttentionStep:
    """What the attention of all layers of one kind, global or local, shares in a step."""

    table: Int[Array, "B width"]  # pages of the rows
    context: int  # no row is longer
    plan: Any  # of the kernels, from plan_attention; None without them


class KernelBias(nnx.Module):
    """The bias of a layer in the form of the Hopper kernels, made by prepare_bias of its weight."""

    def __init__(self, weight: jax.ShapeDtypeStruct):
        made = jax.eval_shape(prepare_bias, weight)
        for field in dataclasses.fields(RelativeBias):
            table = getattr(made, field.name)
            setattr(self, field.name, param(table.shape, table.dtype, (None,) * table.ndim))

    def __call__(self) -> RelativeBias:
        return RelativeBias(*(getattr(self, field.name)[...] for field in dataclasses.fields(RelativeBias)))


class Attention(nnx.Module):
    """Attention of one layer over its pages. Query, key, value and bias projections are one product, grouped by key head."""

    def __init__(self, config: TextConfig, layer: int, dtype: jnp.dtype):
        shape = config.attention(layer)
        heads, kv_heads, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
        share = heads // kv_heads
        group = share * width + 2 * width + share * config.rel_dim
        self.qkvr_proj = param((kv_heads, group, config.hidden_size), dtype, ("kv_heads", None, None))
        self.o_proj = param((config.hidden_size, heads * width), dtype, (None, "heads"))
        self.q_norm = RMSNorm(width, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(width, config.rms_norm_eps, dtype)
        self.rel_bias: nnx.Param | KernelBias = param((shape.rel_extent, config.rel_dim), dtype, (None, None))
        self.k_conv = ShortConv((kv_heads, width), config.conv_width, dtype, ("kv_heads", None))
        self.v_conv = ShortConv((kv_heads, width), config.conv_width, dtype, ("kv_heads", None))
        self.head_dim, self.rel_dim, self.window = width, config.rel_dim, shape.window
        self.fixed = False
        is_global = shape.window is None
        self.log_scaling = (
            (config.log_scaling_floor, config.log_scaling_alpha) if is_global and config.log_scaling_floor else None
        )

    def use_kernels(self, fixed: bool = False) -> None:
        """Hold the bias in the form of the kernels from now on, and with it choose them. `fixed`: see plan_attention."""
        self.fixed = fixed
        assert isinstance(self.rel_bias, nnx.Param)
        self.rel_bias = KernelBias(self.rel_bias.get_value())

    def step(self, table: Int[Array, "B width"], ragged: Ragged, context: int) -> AttentionStep:
        """What this layer and all of its kind need in a step. `context` bounds the rows' lengths statically."""
        kv_heads, group, _ = self.qkvr_proj[...].shape
        plan = plan_attention(
            self._bias(),
            ragged.start,
            ragged.count,
            ragged.length,
            tokens=ragged.row.shape[0],
            heads=kv_heads * self._share(group),
            kv_heads=kv_heads,
            window=self.window,
            longest=ragged.longest,
            fixed=context if self.fixed else None,
        )
        return AttentionStep(table, context, plan)

    def __call__(
        self, x: Float[Array, "T D"], cache: LayerCache, step: AttentionStep, ragged: Ragged
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        """Attention output after the output projection, summed over ranks, and the cache with these tokens appended."""
        projected = self._project(x)
        if isinstance(self.rel_bias, KernelBias) and ragged.one_each:
            q, rel, cache = self._append_one_each(projected, cache, step, ragged)
            out = self._attend((q, rel), cache, step, ragged)
            return self._output(out), cache
        q, k, v, rel = self._split(projected)
        k, k_state = self.k_conv(k, cache.k_conv, ragged)
        v, v_state = self.v_conv(v, cache.v_conv, ragged)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.log_scaling is not None:
            tau = log_scale(ragged.position, *self.log_scaling)[:, None, None, None]
            q, rel = (q * tau).astype(x.dtype), (rel * tau).astype(x.dtype)
        tokens, kv_heads, share, width = q.shape
        queries = (q.reshape(tokens, kv_heads * share, width), rel.reshape(tokens, kv_heads * share, self.rel_dim))
        if cache.k_pages is None:
            assert isinstance(self.rel_bias, nnx.Param)
            out = attention_within(*queries, self.rel_bias[...], k, v, ragged.row, window=self.window)
        else:
            cache = dataclasses.replace(
                cache,
                k_pages=append(cache.k_pages, k, step.table, ragged),
                v_pages=append(cache.v_pages, v, step.table, ragged),
                k_conv=k_state,
                v_conv=v_state,
            )
            out = self._attend(queries, cache, step, ragged)
        return self._output(out), cache

    def _append_one_each(
        self, projected: Float[Array, "T K group"], cache: LayerCache, step: AttentionStep, ragged: Ragged
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T N r"], LayerCache]:
        """One launch on Hopper: queries and bias coefficients, and the cache with the tokens of decode appended."""
        from inkling_jax.kernels.kv_append import sm90  # Pallas' GPU half takes a while to import, and few need it

        tau = None if self.log_scaling is None else log_scale(ragged.position, *self.log_scaling)
        weights = Weights(*(part.weight[...] for part in (self.k_conv, self.v_conv, self.q_norm, self.k_norm)))
        kept = Kept(cache.k_pages, cache.v_pages, cache.k_conv, cache.v_conv)
        rows = Rows(ragged.slot, ragged.position, ragged.count)
        q, rel, kept = sm90.append(projected, weights, tau, kept, step.table, rows, rank=self.rel_dim, eps=self.q_norm.eps)
        k_pages, v_pages, k_conv, v_conv = kept
        return q, rel, dataclasses.replace(cache, k_pages=k_pages, v_pages=v_pages, k_conv=k_conv, v_conv=v_conv)

    def _output(self, out: Float[Array, "T N H"]) -> Float[Array, "T D"]:
        return sum_over_model(linear(out.reshape(out.shape[0], -1), self.o_proj[...]))

    def _attend(
        self, queries: tuple[Float[Array, "T N H"], Float[Array, "T N r"]], cache: LayerCache, step: AttentionStep, ragged: Ragged
    ) -> Float[Array, "T N H"]:
        return paged_attention(
            *queries,
            self._bias(),
            cache.k_pages,
            cache.v_pages,
            step.table,
            ragged.start,
            ragged.count,
            ragged.length,
            window=self.window,
            longest=ragged.longest,
            context=step.context,
            plan=step.plan,
        )

    def _project(self, x: Float[Array, "T D"]) -> Float[Array, "T K group"]:
        """Queries, key, value and bias coefficients of each key head side by side."""
        weight = self.qkvr_proj[...]
        kv_heads, group, _ = weight.shape
        return linear(x, weight.reshape(kv_heads * group, -1)).reshape(-1, kv_heads, group)

    def _split(self, projected: Float[Array, "T K group"]) -> tuple[Array, Array, Array, Array]:
        """q [T, K, n, H], k and v [T, K, H], r [T, K, n, rel_dim] of n query heads for each of K key heads."""
        _, kv_heads, group = projected.shape
        share = self._share(group)
        q, k, v, rel = jnp.split(
            projected, [share * self.head_dim, (share + 1) * self.head_dim, (share + 2) * self.head_dim], axis=-1
        )
        return q.reshape(-1, kv_heads, share, self.head_dim), k, v, rel.reshape(-1, kv_heads, share, self.rel_dim)

    def _share(self, group: int) -> int:
        """Query heads of a key head, from the rows of the projection that belong to it."""
        return (group - 2 * self.head_dim) // (self.head_dim + self.rel_dim)

    def _bias(self) -> Float[Array, "R r"] | RelativeBias:
        return self.rel_bias() if isinstance(self.rel_bias, KernelBias) else self.rel_bias[...]


def log_scale(position: Int[Array, " T"], floor: int, alpha: float) -> Float[Array, " T"]:
    """tau = 1 + alpha ln(max((position + 1) / floor, 1)) in float32; multiplies the query and its bias on global layers."""
    return 1.0 + alpha * jnp.log(jnp.maximum((position + 1).astype(jnp.float32) / floor, 1.0))
