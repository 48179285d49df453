"""What training computes without a cache: attention, experts and embeddings whose gradients need no scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import dense, random_case
from jax.sharding import Mesh, PartitionSpec

from inkling_jax.kernels.expert_matmul.every import every_expert
from inkling_jax.kernels.paged_attention.unpaged import attention_within
from inkling_jax.sharding.collectives import embedding_rows


@pytest.mark.parametrize(("window", "extent"), [(None, 5), (6, 6), (None, 40)])
def test_attention(window: int | None, extent: int) -> None:
    """Three sequences end to end equal the definition; a bias that reaches less far than they do, or further."""
    lengths = (11, 1, 8)
    case = random_case([(n, n) for n in lengths], extent=extent)
    row = np.repeat(np.arange(len(lengths)), lengths)
    keys, values = np.concatenate(case.keys), np.concatenate(case.values)
    out = jax.jit(attention_within, static_argnames="window")(case.q, case.rel, case.rel_bias, keys, values, row, window=window)
    np.testing.assert_allclose(out, dense(case, window), rtol=1e-5, atol=1e-5)


def test_experts() -> None:
    """The weighted sum over chosen experts, in float64; a choice that is none adds nothing."""
    rng = np.random.default_rng(0)
    tokens, model, width, count = 7, 6, 5, 4
    x, w13, w2 = (rng.standard_normal(s) for s in ((tokens, model), (count, 2, width, model), (count, model, width)))
    experts = np.stack([rng.permutation(count)[:2] for _ in range(tokens)])
    experts[3, 1] = count
    weights = rng.random((tokens, 2))
    wanted = np.zeros((tokens, model))
    for t, a in np.ndindex(tokens, 2):
        if experts[t, a] < count:
            gate, up = w13[experts[t, a]] @ x[t]
            wanted[t] += weights[t, a] * (w2[experts[t, a]] @ (gate / (1 + np.exp(-gate)) * up))
    found = every_expert(jnp.float32(x), jnp.asarray(experts), jnp.float32(weights), jnp.float32(w13), jnp.float32(w2))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_gradient_of_embeddings() -> None:
    """A row of the table gets the sum over all its uses, rounded to bfloat16 once."""
    rng = np.random.default_rng(0)
    ids, out = rng.integers(0, 3, 2000), rng.random((2000, 4)).astype(jnp.bfloat16)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("tensor", "expert"))

    def gradient(table: jax.Array) -> jax.Array:
        return jax.grad(lambda table: (embedding_rows(table, jnp.asarray(ids)) * out).astype(jnp.float32).sum())(table)

    whole = PartitionSpec()
    found = jax.shard_map(gradient, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)(jnp.ones((5, 4), jnp.bfloat16))
    wanted = np.zeros((5, 4))
    np.add.at(wanted, ids, out.astype(np.float64))
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-8)
