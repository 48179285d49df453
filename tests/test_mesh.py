"""One model on many meshes: the answers of one device, and each device with its own part alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_files import load as load_tensors

import inkling_jax
from inkling_jax import LLM, SamplingParams
from inkling_jax.sharding.mesh import mesh_sizes

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SIZES = {"dtype": "float32", "max_context": 256, "slots": 3, "page_size": 16, "chunk": 64, "quiet": True}
OVER_DATA = {"experts_over": "data"}
MESHES = ("tensor=2", "tensor=4", "expert=2", "expert=4", "expert=8", "tensor=2,expert=2", "tensor=2,expert=4")
# `wide` divides over `data` alone: 12 query heads on 3 or 6 key heads, and 80 channels an expert
WITHIN = [(preset, mesh) for preset in ("tiny", "gpu") for mesh in (*MESHES, "data=2,tensor=2,expert=2")]
OVER = [("tiny", n) for n in (2, 4, 8)] + [("gpu", n) for n in (2, 4, 8)] + [("wide", n) for n in (2, 4)]
CASES = [
    # all axes, key heads held twice, and tokens exchanged
    pytest.param("tiny", "data=2,tensor=2,expert=2", OVER_DATA),
    *(pytest.param(*case, {}, marks=pytest.mark.slow) for case in WITHIN),
    *(pytest.param(preset, f"data={n}", OVER_DATA, marks=pytest.mark.slow) for preset, n in OVER),
]

Expected = Callable[..., dict[str, np.ndarray]]


@pytest.fixture
def loaded(oracle_dir: Callable[..., Path]) -> Iterator[Callable[..., LLM]]:
    """`loaded(preset, mesh)`: that model on that mesh, closed when the test ends."""
    opened: list[LLM] = []

    def load(preset: str, mesh: str, **options: Any) -> LLM:
        opened.append(inkling_jax.load(oracle_dir(preset), mesh=mesh, **(SIZES | options)))
        return opened[-1]

    yield load
    for llm in opened:
        llm.close()


def assert_logits_close(found: np.ndarray, wanted: np.ndarray) -> None:
    """Relative error in the 2-norm, of the whole and of each row."""
    error = np.linalg.norm(found - wanted, axis=-1)
    assert found.shape == wanted.shape and np.linalg.norm(error) <= 1e-4 * np.linalg.norm(wanted)
    assert (error <= 2e-4 * np.linalg.norm(wanted, axis=-1)).all()


@pytest.mark.parametrize(("preset", "mesh", "options"), CASES)
def test_answers_are_those_of_one_device(
    loaded: Callable[..., LLM], expected: Expected, preset: str, mesh: str, options: dict[str, str]
) -> None:
    """Logits after each token, and 40 greedy tokens of three prompts at a time, as an implementation on one device has them.

    Of four and eight replicas some have no request, and at the end of a run all but one.
    """
    llm, answers = loaded(preset, mesh, **options), expected(preset)
    lengths = (1, 5, 33)
    found = llm.generate([answers[f"len{n}.ids"].tolist() for n in lengths], GREEDY)
    assert [list(made.token_ids) for made in found] == [answers[f"len{n}.greedy"].tolist()[n:] for n in lengths]
    assert_logits_close(llm.score(answers["len33.ids"].tolist()), answers["len33.logits"])


def assert_held(tree: Any, wanted: float) -> None:
    """Whether the bytes of all shards are those, on each device as many."""
    found: dict[Any, int] = {}
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    assert sum(found.values()) == wanted and set(found.values()) == {wanted / len(found)}


def stored_copies(name: str, sizes: dict[str, int], kv_heads: int) -> float:
    """How many devices should hold each number of a stored tensor; 0 where the text model does not read it."""
    ranks = sizes["tensor"] * sizes["expert"]
    copies = {
        r"^model\.(mtp|audio|visual)\.|input_amax$|original_shape$": 0,
        r"norm\.weight$|\.(attn|mlp)_sconv\.|\.gate\.|global_scale$|rel_logits_proj": ranks,
        r"\.w[kv]_dv\.|\.[kv]_sconv\.": max(1, ranks // kv_heads),
        r"experts\.w13_weight\.scale2$": 2 * sizes["tensor"],  # gate and up have one each
        r"experts\.w2_weight\.scale2$": sizes["tensor"],
        r"embed\.|w[qr]_du|wo_ud|w13_dn|w2_md|shared_experts|\.experts\.": 1,
    }
    return next(count for pattern, count in copies.items() if re.search(pattern, name))


@pytest.mark.parametrize(
    ("preset", "mesh", "options"),
    [
        pytest.param("tiny", "tensor=2,expert=4", {}),
        pytest.param("wide", "data=4", OVER_DATA),
        *(pytest.param(*case, {}, marks=pytest.mark.slow) for case in WITHIN),
        *(pytest.param(preset, f"data={n}", OVER_DATA, marks=pytest.mark.slow) for preset, n in OVER),
    ],
)
def test_nothing_is_held_twice_that_is_to_be_split(
    oracle_dir: Callable[..., Path], loaded: Callable[..., LLM], preset: str, mesh: str, options: dict[str, str]
) -> None:
    """The bytes of all shards, of weights and of keys and values, are those of the stored tensors, as often as each is needed.

    Each replica needs all of them, but for experts that are spread over the replicas.
    """
    llm, sizes = loaded(preset, mesh, **options), mesh_sizes(mesh)
    text, replicas, ranks = llm.config.text, sizes["data"], sizes["tensor"] * sizes["expert"]
    wanted = 0.0
    for name, tensor in load_tensors(oracle_dir(preset)).items():
        layer = re.search(r"llm\.layers\.(\d+)\.", name)
        kv_heads = text.attention(int(layer[1])).num_kv_heads if layer else 1
        itemsize = 4 if tensor.dtype.name in ("bfloat16", "float32") else tensor.itemsize
        times = 1 if options and ".mlp.experts." in name else replicas
        wanted += times * tensor.size * itemsize * stored_copies(name, sizes, kv_heads)
    assert_held(llm.engine.leaves, wanted)

    shape, kept = llm.engine.shape, 0
    for layer in range(text.num_layers):
        attention = text.attention(layer)
        pages = shape.local_pages if text.local_layers[layer] else shape.global_pages
        tokens = pages * shape.page_size + (shape.slots + 1) * (text.conv_width - 1)
        kept += 2 * 4 * tokens * attention.head_dim * max(attention.num_kv_heads, ranks)
    heads = [[layer.k_pages, layer.v_pages, layer.k_conv, layer.v_conv] for layer in llm.engine.state.cache.layers]
    assert_held(heads, replicas * kept)
