"""The attention layer on the Hopper kernels without a GPU: how a step is planned and lowered, and one in the interpreter."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from modules import chunk, filled, on_one_device, single_tokens
from oracle_distances import open_set

from inkling_jax import SamplingParams
from inkling_jax.cache.paged import CacheShape, LayerCache, create_cache
from inkling_jax.config import TextConfig, preset
from inkling_jax.engine.pack import pack_chunk, pack_slots, pack_updates
from inkling_jax.engine.state import create_state
from inkling_jax.engine.steps import Programs, Sampling
from inkling_jax.errors import InputError
from inkling_jax.expert_storage import choose_kernels, repack
from inkling_jax.kernels.kv_append import append
from inkling_jax.kernels.kv_append import sm90 as append_sm90
from inkling_jax.kernels.paged_attention import prepare_bias, reference, sm90
from inkling_jax.layers.attention import Attention
from inkling_jax.model import Inkling
from inkling_jax.random_weights import local_leaves, random_parameters
from inkling_jax.sharding.mesh import make_mesh


def config(layers: int = 4) -> TextConfig:
    """A small model with the heads of one key head in two, whose last layer is global."""
    local = (True,) * (layers - 1) + (False,)
    text = preset("inkling-small").text
    heads = {"num_heads": 8, "num_kv_heads": 2}
    return dataclasses.replace(
        text,
        num_layers=layers,
        hidden_size=256,
        dense_width=256,
        local_layers=local,
        dense_layers=(True,) * layers,
        vocab_size=512,
        usable_vocab_size=500,
        global_attention=dataclasses.replace(text.global_attention, **heads, rel_extent=256),
        local_attention=dataclasses.replace(text.local_attention, **heads, rel_extent=64, window=64),
    )


def program(
    step: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch, fp8: bool = False
) -> tuple[str, list[dict[str, Any]]]:
    """The text of a step of three layers, two of them of one kind, for a GPU, and the sizes of the plans that it makes."""
    planned: list[dict[str, Any]] = []
    plan = getattr(sm90, f"plan_{step}")
    monkeypatch.setattr(sm90, f"plan_{step}", lambda *rows, **sizes: planned.append(sizes) or plan(*rows, **sizes))
    text = config(3)
    model = Inkling(text, frozenset(), jnp.bfloat16)
    for layer in model.layers:
        layer.use_kernels()
    shape = CacheShape(slots=3, page_size=64, global_pages=12, local_pages=12, max_context=256, max_query=32, fp8=fp8)
    state = jax.eval_shape(lambda: create_state(text, shape, jnp.bfloat16))
    programs, leaves = Programs(model, make_mesh(sizes), jnp.bfloat16), list(local_leaves(model, {}).values())
    nothing: Any = {"global": [], "local": []}
    greedy = Sampling("greedy", None, ())
    if step == "prefill":
        prompts = pack_chunk([(0, tuple(range(7)), 0, True), (2, tuple(range(12)), 100, False)], nothing, shape, 32)
        traced = programs.prefill.trace(leaves, state, prompts, context=256, sampling=greedy)
    else:
        inputs = pack_slots([0, 1, 2], shape, 4), pack_updates(nothing, 16)
        traced = programs.decode.trace(leaves, state, inputs, context=256, sampling=greedy, steps=8)
    return traced.lower(lowering_platforms=("cuda",)).as_text(), planned


WAYS = [pytest.param({}, False, marks=pytest.mark.slow), ({"tensor": 2}, False), pytest.param({}, True, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("sizes", "fp8"), WAYS)
def test_a_decode_step_plans_once_a_kind_and_lowers_a_kind_once(
    sizes: dict[str, int], fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two plans, of this rank's heads; two kernels, each with its merge and its append of keys; two that add to the stream.

    The last of these is another, since after it nobody reads the stream, only its norm.
    """
    text, planned = program("decode", sizes, monkeypatch, fp8)
    for function, calls, kinds in (("run_decode", 3, 2), ("append", 3, 2), ("add_conv_norm", 6, 2)):
        names = re.findall(rf"call @({function}(?:_\d+)?)\(", text)
        assert (len(names), len(set(names))) == (calls, kinds), function
    assert text.count("custom_call @mosaic_gpu") == 8
    assert [(call["window"], call["kv_heads"], call["tokens"]) for call in planned] == [
        (window, 2 // sizes.get("tensor", 1), 4) for window in (64, None)
    ]


@pytest.mark.parametrize(("sizes", "fp8"), WAYS)
def test_a_step_of_prompts_plans_once_a_kind_and_lowers_a_kind_once(
    sizes: dict[str, int], fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two plans of 32 tokens, the four heads of a key head in tiles of 32, and two kernels; nothing attends in plain JAX."""
    monkeypatch.delattr(reference, "paged_attention")
    text, planned = program("prefill", sizes, monkeypatch, fp8)
    names = re.findall(r"call @(run_prefill\w*)\(", text)
    assert len(names) == 3 and len(set(names)) == 2
    assert text.count("custom_call @mosaic_gpu") == 2
    assert planned == [{"tokens": 32, "tile": 32, "window": window} for window in (64, None)]


@pytest.mark.parametrize(
    ("page", "change", "reason"),
    [
        (64, {}, None),
        (128, {"head_dim": 64}, None),
        (32, {}, r"pages of 32 tokens: the kernels take \(64, 128\)"),
        (64, {"head_dim": 32}, r"heads of width 32: the kernels take \(64, 128\)"),
        (64, {"num_heads": 64, "num_kv_heads": 8}, None),
        (64, {"num_heads": 72, "num_kv_heads": 8}, "9 query heads a key head: the kernels take at most 8"),
    ],
)
def test_sizes_that_the_kernels_do_not_take_are_refused(
    page: int, change: dict[str, int], reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Asking for the kernels by name with such sizes is an error that says which would do; by itself the reference runs."""
    text = preset("inkling-small").text
    text = dataclasses.replace(text, local_attention=dataclasses.replace(text.local_attention, **change))
    if reason is None:
        assert choose_kernels("sm90", text, jnp.bfloat16, "NVIDIA H200", {}, page)
        return
    with pytest.raises(InputError, match=f"kernels='sm90': {reason}"):
        choose_kernels("sm90", text, jnp.bfloat16, "NVIDIA H200", {}, page)
    with caplog.at_level("INFO", logger="inkling_jax"):
        assert not choose_kernels("auto", text, jnp.bfloat16, "NVIDIA H200", {}, page)
    assert len(caplog.messages) == 1 and re.search(f"reference path .*{reason}", caplog.messages[0])


def test_every_rank_has_the_tables_of_a_bias() -> None:
    """They take the place of the weight under its path, whole on every device."""
    mesh = make_mesh({"tensor": 2})
    weight = jax.random.normal(jax.random.key(0), (64, 16), jnp.bfloat16)
    given = {"layers.0.attn.rel_bias": jax.device_put(weight, NamedSharding(mesh, PartitionSpec())), "norm.scale": weight}
    got = dict(repack(given.items(), mesh))
    assert list(got) == [f"layers.0.attn.rel_bias.{name}" for name in ("weight", "reversed", "halved")] + ["norm.scale"]
    for name, table in jax.device_get(vars(prepare_bias(weight))).items():
        shards = got[f"layers.0.attn.rel_bias.{name}"].addressable_shards
        assert len(shards) == 2 and all(np.array_equal(shard.data, table) for shard in shards)


def layer_of(text: TextConfig, layer: int, dtype: jnp.dtype, kernels: bool) -> Attention:
    """Random weights of a layer, the same whatever the dtype and the form."""
    mine = f"layers.{layer}.attn."
    parameters = {path: a for path, a in random_parameters(Inkling(text, frozenset(), jnp.bfloat16)) if path.startswith(mine)}
    parameters[mine + "rel_bias"] *= 8  # as large as learned ones, so that a bias in the wrong place is seen
    module = Attention(text, layer, dtype)
    if kernels:
        module.use_kernels()
        parameters = dict(repack(parameters.items()))
    return filled(module, **{path.removeprefix(mine).replace(".", "_"): array for path, array in parameters.items()})


STEPS = {  # rows of three slots, the second idle, and the last token is no row's
    "decode": lambda: single_tokens([True, False, True], [150, 0, 66], [0, 3, 1]),
    "prompts": lambda: chunk([17, 0, 12], [150, 0, 66], slots=[0, 3, 1], tokens=30),
}


def errors(step: str, layer: int) -> dict[str, float]:
    """Of a step of a layer in bfloat16, against float32: on the reference, and on the kernels; and what idle tokens get."""
    text = config(2)
    shape = CacheShape(slots=3, page_size=64, global_pages=9, local_pages=9, max_context=192, max_query=32)
    ragged = STEPS[step]()
    keys = iter(jax.random.split(jax.random.key(0), 8))
    x = jax.random.normal(next(keys), (ragged.row.shape[0], text.hidden_size), jnp.bfloat16)
    empty = create_cache(text, shape, jnp.bfloat16).layers[layer]
    arrays = {f.name: getattr(empty, f.name) for f in dataclasses.fields(LayerCache)}
    cache = {name: jax.random.normal(next(keys), array.shape, jnp.bfloat16) for name, array in arrays.items()}
    table = jnp.asarray(np.random.default_rng(0).permutation(9).reshape(3, 3), jnp.int32)

    def run(dtype: jnp.dtype, kernels: bool) -> np.ndarray:
        module = layer_of(text, layer, dtype, kernels)

        def call(x: jax.Array, cache: LayerCache) -> jax.Array:
            return module(x, cache, module.step(table, ragged, 192), ragged)[0]

        given = LayerCache(**{name: array.astype(dtype) for name, array in cache.items()})
        return np.asarray(jax.jit(on_one_device(call))(x.astype(dtype), given), np.float32)

    want, plain, got = run(jnp.float32, False), run(jnp.bfloat16, False), run(jnp.bfloat16, True)

    def error(found: np.ndarray) -> float:
        return float(np.linalg.norm(found - want) / np.linalg.norm(want))

    idle = np.abs(got[~np.asarray(ragged.valid)]).max()
    return {"reference": error(plain), "kernels": error(got), "idle": float(idle)}


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1], ids=["window", "global"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_in_the_interpreter(step: str, layer: int) -> None:
    # A process of its own: see test_paged_attention_sm90.
    root = Path(__file__).parent.parent
    env = os.environ | {"NPROC": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    run = subprocess.run(
        [sys.executable, __file__, step, str(layer)], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    check(found)


def check(found: dict[str, float]) -> None:
    """The kernels are as near as the reference, and give an idle token zero."""
    assert found["kernels"] <= 1.3 * found["reference"] < 0.02, found
    assert found["idle"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [0, 1], ids=["window", "global"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_on_a_gpu(step: str, layer: int) -> None:
    check(errors(step, layer))


@pytest.mark.gpu(bytes=2 * 10**9)
def test_decoded_tokens_are_as_likely_as_the_model_says(
    oracle_dir: Callable[..., Path], expected: Callable[..., dict[str, np.ndarray]]
) -> None:
    """Log-probabilities that decoding gave to its own tokens, against those of the model in float32: no further off than plain.

    The median, since where rounding turns a router's choice a token's logits move by a third.
    """
    directory, answers = oracle_dir("gpu"), expected("gpu")
    prompts = [answers[f"len{length}.ids"].tolist() for length in (1, 5, 33)]
    greedy, made = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1), {}
    for kernels in ("reference", "sm90"):
        with open_set("gpu", directory, "bfloat16", kernels) as llm:
            made[kernels] = llm.generate(prompts, greedy)
    distance = {}
    with open_set("gpu", directory, "float32") as llm:
        for kernels, completions in made.items():
            off = []
            for prompt, completion in zip(prompts, completions, strict=True):
                assert completion.logprobs is not None and len(completion.token_ids) == 40
                logits = jax.nn.log_softmax(llm.score([*prompt, *completion.token_ids])[len(prompt) - 1 : -1])
                for place, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                    off.append(abs(float(logits[place, token]) - found.logprob))
            distance[kernels] = float(np.median(off))
    print(distance)
    assert distance["sm90"] <= 1.3 * distance["reference"] + 1e-3, distance


if __name__ == "__main__":
    append_sm90.append = append  # which has no interpreter: test_kv_append runs it by numpy
    sm90.PROCESSORS = 3
    sm90.run_decode = functools.partial(sm90.run_decode, interpret=True)
    sm90.run_prefill = functools.partial(sm90.run_prefill, interpret=True)
    print(json.dumps(errors(sys.argv[1], int(sys.argv[2]))))
