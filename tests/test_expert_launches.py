"""How many kernels a sparse layer launches at decode, from router to the sum of routed and shared experts."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend import core
from jax.sharding import PartitionSpec

from inkling_jax.config import preset
from inkling_jax.layers.experts import SparseMLP
from inkling_jax.random_weights import local_leaves
from inkling_jax.sharding.mesh import make_mesh

LAUNCH = "mpmd_map"  # a Pallas kernel
FREE = {"axis_index", "reshape", "broadcast_in_dim"}  # constants, and arrays looked at otherwise
ONCE = {"convert_element_type"}  # which tokens are valid, as integers: the same for all layers, so computed for one


def primitives(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Names of all operations but those inside kernels."""
    for equation in jaxpr.eqns:
        inner = [p for p in equation.params.values() if isinstance(p, core.Jaxpr | core.ClosedJaxpr)]
        if equation.primitive.name == LAUNCH or not inner:
            yield equation.primitive.name
        for p in inner if equation.primitive.name != LAUNCH else ():
            yield from primitives(p.jaxpr if isinstance(p, core.ClosedJaxpr) else p)


def operations(tokens: int, packed: bool, sizes: dict[str, int]) -> collections.Counter[str]:
    """Of one sparse layer of Inkling-Small, of one rank of a mesh of `sizes`, on a mesh of one device."""
    config = preset("inkling-small").text
    layer = SparseMLP(config, frozenset({"w13", "w2"} if packed else ()), jnp.bfloat16)
    layer.experts.use_kernels()
    layer.shared.use_kernels()
    graph, state = nnx.split(layer)

    def run(leaves: list, x: jax.Array, valid: jax.Array) -> jax.Array:
        return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))(x, valid)

    everywhere = PartitionSpec()
    mapped = jax.shard_map(run, mesh=make_mesh(), in_specs=everywhere, out_specs=everywhere, check_vma=False)
    x = jax.ShapeDtypeStruct((tokens, config.hidden_size), jnp.bfloat16)
    traced = jax.make_jaxpr(mapped)(list(local_leaves(layer, sizes).values()), x, jax.ShapeDtypeStruct((tokens,), bool))
    return collections.Counter(primitives(traced.jaxpr))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sizes", [{"tensor": 8}, {"expert": 8}, {}], ids=str)
@pytest.mark.parametrize("tokens", [1, 64])
def test_two_launches_at_decode(tokens: int, packed: bool, sizes: dict[str, int]) -> None:
    """The router with the sorting of rows, and all experts with the weighted sum: XLA adds nothing a layer.

    There is one rank, whose answer is the sum.
    """
    found = operations(tokens, packed, sizes)
    assert found.pop(LAUNCH) == 2
    assert all(found.pop(name, 0) <= 1 for name in ONCE)
    assert set(found) <= FREE | {"mul"} and found["mul"] <= 1  # axis index times experts: a constant where there is one rank


def test_more_tokens_take_more() -> None:
    """Beyond what one launch is good for: XLA's logits, and two launches for the shared experts."""
    found = operations(65, True, {"tensor": 8})
    assert (found[LAUNCH], found["dot_general"]) == (4, 1)
    assert not {"sort", "top_k", "scatter", "while"} & set(found)
