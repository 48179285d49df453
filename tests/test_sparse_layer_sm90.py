"""The sparse feed-forward on the Hopper kernels as a step has it: layers one after the other in one program, over a mesh."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from modules import filled, on_one_device

from inkling_jax.config import preset
from inkling_jax.expert_storage import repack
from inkling_jax.layers.experts import SparseMLP
from inkling_jax.model import Inkling
from inkling_jax.random_weights import random_parameters

SMALL = preset("inkling-small").text
CONFIG = dataclasses.replace(
    SMALL,
    num_layers=1,
    dense_layers=(False,),
    local_layers=(False,),
    hidden_size=256,
    expert_width=256,
    num_experts=8,
    num_experts_per_token=3,
    vocab_size=128,
    usable_vocab_size=128,
)
MINE = "layers.0.mlp."


def layer_of(packed: bool, dtype: jnp.dtype, kernels: bool) -> SparseMLP:
    """The same random weights whatever the dtype and the form."""
    names = ("w13", "w2") if packed else ()
    made = random_parameters(Inkling(CONFIG, frozenset((0, name) for name in names), jnp.bfloat16))
    parameters = {path: array for path, array in made if path.startswith(MINE)}
    module = SparseMLP(CONFIG, frozenset(names), dtype)
    if kernels:
        module.experts.use_kernels()
        module.shared.use_kernels()
        parameters = dict(repack(parameters.items()))
    return filled(module, **{path.removeprefix(MINE).replace(".", "_"): array for path, array in parameters.items()})


def outputs(module: SparseMLP, x: jax.Array) -> np.ndarray:
    """Of three layers one after the other, a row for each token of each; the last two tokens are padding where there are more."""
    valid = jnp.arange(len(x)) < max(1, len(x) - 2)

    def layers(x: jax.Array) -> list[jax.Array]:
        made = []
        for _ in range(3):
            made.append(module(x, valid))
            x = made[-1] / jnp.linalg.norm(made[-1].astype(jnp.float32), axis=1, keepdims=True).astype(x.dtype) * 16
        return made

    return np.concatenate([np.asarray(y, np.float32) for y in jax.jit(on_one_device(layers))(x)])


def check(tokens: int, packed: bool, kernels: bool) -> None:
    """The median token, since rounding may turn a later layer's choice, is as near float32 as plain bfloat16 is."""
    x = jax.random.normal(jax.random.key(tokens), (tokens, CONFIG.hidden_size), jnp.bfloat16)
    with jax.default_matmul_precision("highest"):  # a GPU's float32 would be TF32
        want = outputs(layer_of(packed, jnp.dtype(jnp.float32), False), x.astype(jnp.float32))

    def error(found: np.ndarray) -> float:
        return float(np.median(np.linalg.norm(found - want, axis=1) / np.linalg.norm(want, axis=1)))

    plain = error(outputs(layer_of(packed, jnp.dtype(jnp.bfloat16), False), x))
    got = error(outputs(layer_of(packed, jnp.dtype(jnp.bfloat16), kernels), x))
    assert got <= 1.3 * plain + 1e-3 < 0.05, (got, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tokens", [1, 5, 32, 33, 65, 300])  # one launch of experts, and more; routers that multiply, or do not
def test_layers_of_one_program_on_gpu(tokens: int, packed: bool) -> None:
    """Rows of each layer go to the experts that its router chose, with what is shared by all layers of a step as it is there."""
    check(tokens, packed, kernels=True)
