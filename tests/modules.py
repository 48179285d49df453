"""Parts of the model by themselves: modules with given values, called as inside a step on one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from inkling_jax.cache.ragged import Ragged
from inkling_jax.sharding.mesh import make_mesh


def filled(module, **values):
    """The module with each parameter's value by its path, "_" for "."; arrays take the declared dtype. All must be given."""
    graph, state = nnx.split(module)
    leaves, given = [], dict(values)
    for path, leaf in nnx.to_flat_state(state):
        declared = leaf.get_value()
        array = jnp.asarray(given.pop("_".join(map(str, path))), declared.dtype)
        assert array.shape == declared.shape, (path, array.shape, declared.shape)
        leaves.append(array)
    assert not given, f"no such parameters: {sorted(given)}"
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))


def on_one_device(function):
    """`function` as the body of a step over a mesh of one device, where collectives have their axes."""

    @functools.wraps(function, updated=())
    def call(*args):
        everywhere = PartitionSpec()
        return jax.shard_map(function, mesh=make_mesh(), in_specs=everywhere, out_specs=everywhere, check_vma=False)(*args)

    return call


def chunk(counts, lengths, *, slots=None, tokens=None) -> Ragged:
    """Rows with these counts of query tokens and lengths after them, laid end to end and padded to `tokens`."""
    counts, lengths = np.asarray(counts), np.asarray(lengths)
    ends = np.cumsum(counts)
    tokens, start = tokens or int(ends[-1]), ends - counts
    row = np.minimum(np.searchsorted(ends, np.arange(tokens), side="right"), len(counts) - 1)
    valid = np.arange(tokens) < ends[-1]
    offset = np.where(valid, np.arange(tokens) - start[row], 0)
    position = np.where(valid, (lengths - counts)[row] + offset, 0)
    slots = np.arange(len(counts)) if slots is None else np.asarray(slots)
    arrays = (slots, start, counts, lengths, row, offset, position, valid)
    return Ragged(*map(jnp.asarray, arrays), longest=tokens)


def single_tokens(live, lengths, slots) -> Ragged:
    """One token for each row, some of them idle."""
    live, lengths = np.asarray(live), np.asarray(lengths)
    rows, position = np.arange(len(live)), np.where(live, lengths - 1, 0)
    arrays = (np.asarray(slots), rows, live.astype(int), np.where(live, lengths, 0), rows, 0 * rows, position, live)
    return Ragged(*map(jnp.asarray, arrays), longest=1)
