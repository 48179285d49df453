"""What devices exchange in a step: the compiled programs hold the collectives of sharding/collectives.py, and no others."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from inkling_jax.cache.paged import CacheShape
from inkling_jax.config import ModelConfig
from inkling_jax.config_ranks import spread_text
from inkling_jax.engine.pack import pack_updates
from inkling_jax.engine.state import create_state
from inkling_jax.engine.steps import Chunk, Programs, Sampling, state_specs
from inkling_jax.memory import declare_decoder
from inkling_jax.model import flat_parameters
from inkling_jax.sharding.mesh import make_mesh
from inkling_jax.sharding.rules import partition_spec

F32, ROWS, LAYERS = jnp.dtype(jnp.float32), 4, 3
SHAPE = CacheShape(ROWS, 16, 4 * ROWS, 4 * ROWS, 64, 16)
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
OPERATION = re.compile(rf"= (\S+) ({'|'.join(KINDS)})(?:-start)?\(")


def compiled(
    directory: Path, sizes: dict[str, int], program: str, experts_over_data: bool = False, **static: Any
) -> list[tuple[str, str]]:
    """Kind and shape of each collective of a program of three layers: a dense one, a sparse one, and a global sparse one."""
    replicas = sizes.get("data", 1)
    text = spread_text(ModelConfig.from_directory(directory).text, sizes.get("tensor", 1) * sizes.get("expert", 1))
    kinds = {"local_layers": (True, True, False), "dense_layers": (True, False, False)}
    text, mesh = dataclasses.replace(text, num_layers=LAYERS, **kinds), make_mesh(sizes)
    model = declare_decoder(text, frozenset({(2, "w13"), (2, "w2")}), F32, experts_over_data)
    programs = Programs(model, mesh, F32)

    def placed(a: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

    leaves = [placed(leaf.get_value(), partition_spec(leaf.axes)) for leaf in flat_parameters(model).values()]
    create = functools.partial(create_state, text, SHAPE, F32, mesh.shape)
    specs = state_specs(jax.eval_shape(create))
    state = jax.eval_shape(jax.shard_map(create, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False))
    state = jax.tree.map(placed, state, specs)
    updates, rows = pack_updates({"global": [], "local": []}, 4 * replicas), jnp.zeros(ROWS * replicas, jnp.int32)
    ids = jnp.zeros(16 * replicas, jnp.int32)
    inputs = (rows, updates) if program == "decode" else Chunk(ids, rows, rows, rows, rows < 0, rows > 0, updates)
    lowered = getattr(programs, program).lower(leaves, state, inputs, context=64, **static)
    return [(found[2], found[1]) for found in OPERATION.finditer(lowered.compile().as_text())]


@pytest.mark.parametrize(
    ("program", "static", "gathers"),
    [
        ("decode", {"sampling": Sampling("sample", None, ()), "steps": 2}, [f"s32[4,{ROWS},6]"]),
        pytest.param(
            "decode",
            {"sampling": Sampling("full", 3, ()), "steps": 2},
            [f"f32[{ROWS},512]", f"s32[4,{ROWS},12]"],
            marks=pytest.mark.slow,
        ),
        pytest.param("prefill", {"sampling": Sampling("greedy", None, ())}, [f"s32[4,{ROWS},6]"], marks=pytest.mark.slow),
        pytest.param("prefill", {"sampling": None}, [], marks=pytest.mark.slow),
        pytest.param("score", {"trace": False}, ["f32[16,512]"], marks=pytest.mark.slow),
    ],
)
def test_collectives_of_a_step(oracle_dir: Callable[..., Path], program: str, static: dict[str, Any], gathers: list[str]) -> None:
    """A sum for the embedding and two a layer; one exchange of candidates for the head; whole rows where filters want them."""
    found = compiled(oracle_dir("tiny"), {"tensor": 2, "expert": 2}, program, **static)
    kinds = Counter(kind for kind, _ in found)
    assert kinds == Counter({"all-reduce": 1 + 2 * LAYERS, "all-gather": len(gathers)})
    assert [shape.partition("{")[0] for kind, shape in found if kind == "all-gather"] == gathers


@pytest.mark.slow
def test_replicas_exchange_tokens_and_answers_of_experts_alone(oracle_dir: Callable[..., Path]) -> None:
    """Twice a sparse layer where experts are spread over them, and otherwise nothing."""
    decode = {"sampling": Sampling("sample", None, ()), "steps": 2}
    assert compiled(oracle_dir("tiny"), {"data": 4}, "decode", **decode) == []
    found = compiled(oracle_dir("tiny"), {"data": 4}, "decode", experts_over_data=True, **decode)
    assert sorted((kind, shape.partition("{")[0]) for kind, shape in found) == [
        *[("all-gather", f"f32[{4 * ROWS},129]")] * 2,  # a token's 128 channels, and whether it is one
        *[("reduce-scatter", f"f32[{ROWS},128]")] * 2,
    ]


@pytest.mark.slow
def test_one_device_exchanges_nothing(oracle_dir: Callable[..., Path]) -> None:
    assert compiled(oracle_dir("tiny"), {}, "decode", sampling=Sampling("full", 3, ()), steps=1) == []
