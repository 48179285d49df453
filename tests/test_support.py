"""docs/support.md: written from its table, and every line of the table is what the code does."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checkpoint_files import micro_config

from inkling_jax import LLM, InklingError, InputError, Prompt, SamplingParams, generate
from inkling_jax.cache.paged import is_fp8
from inkling_jax.cache.sizing import CacheRequest
from inkling_jax.config import PRESETS, ModelConfig, preset
from inkling_jax.convert.foreign import refuse_foreign_directory, refuse_foreign_names
from inkling_jax.engine.engine import EngineOptions
from inkling_jax.expert_storage import choose_kernels, kernels_refused
from inkling_jax.loading import Loaded, check_experts_over, check_spread_experts, choose_dtype, layout_of, load_model
from inkling_jax.memory import Layout, choose_mesh
from inkling_jax.planning import answer, published_plan
from inkling_jax.sharding.mesh import mesh_sizes

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "inkling_jax").rglob("*.py")))
BF16 = jnp.dtype(jnp.bfloat16)
HOPPER = "NVIDIA H200"

table = runpy.run_path(str(ROOT / "scripts" / "make_support.py"))
FEATURES = {feature.key: feature for features in table["FEATURES"].values() for feature in features}


def works(call: Callable[[], Any]) -> bool:
    """Whether a call is not refused; what we refuse, we refuse with an error of our own."""
    try:
        call()
    except InklingError:
        return False
    return True


def accepts(option: str) -> bool:
    """Whether the command line has an option."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        generate.main(["--help"])
    assert "--prompt" in out.getvalue()
    return option in out.getvalue().split()


def names(name: str) -> bool:
    return works(lambda: refuse_foreign_names([name], Path("x")))


def reads(**fields: Any) -> bool:
    """Whether a config.json with these fields can be read."""
    return works(lambda: ModelConfig.from_dict(micro_config().to_dict() | fields))


def published(model: str, nvfp4: bool) -> bool:
    return works(lambda: published_plan(preset(model), nvfp4=nvfp4))


def in_the_other_dialect(_: str) -> bool:
    """Spec 1.2: dense and expert widths under other names."""
    given = micro_config().to_dict()
    text = given["text_config"]
    text |= {"moe_intermediate_size": text["intermediate_size"], "intermediate_size": text.pop("dense_intermediate_size")}
    return works(lambda: ModelConfig.from_dict(given)) and ModelConfig.from_dict(given).text == micro_config().text


def directory_with(suffix: str, tmp_path: Path) -> bool:
    (tmp_path / f"model{suffix}").touch()
    return works(lambda: refuse_foreign_directory(tmp_path))


@functools.cache
def layout(model: str) -> Layout:
    return layout_of(preset(model), None, BF16, EngineOptions())


def divides(model: str, **sizes: int) -> bool:
    return works(lambda: layout(model).full(CacheRequest(1, 64, 512, 1024), sizes))


@functools.cache
def spread_layout(model: str) -> Layout:
    return layout_of(preset(model), None, BF16, EngineOptions(), True)


def spread_divides(model: str, replicas: int) -> bool:
    return works(lambda: spread_layout(model).weights({"data": replicas, "tensor": 1, "expert": 1}))


def fits(model: str, devices: int, memory: str, batch: int = 1, context: int = 1024) -> bool:
    return answer(model, mesh=f"tensor={devices}", device_memory=memory, batch=batch, context=context).fits


def kernels_run(model: str, kind: str = HOPPER, dtype: Any = BF16, page_size: int = 64) -> bool:
    return kernels_refused(preset(model).text, jnp.dtype(dtype), kind, {"tensor": 8}, page_size) is None


CHECKS: dict[str, Callable[[str], bool]] = {
    "bf16": lambda model: published(model, False),
    "nvfp4": lambda model: published(model, True),
    "converted": lambda model: (ROOT / "inkling_jax/convert/__main__.py").exists(),
    "quantise": lambda model: (ROOT / "inkling_jax/convert/quantization.py").exists(),
    "hf_dialect": in_the_other_dialect,
    "hf_names": lambda model: names("model.language_model.layers.0.self_attn.q_proj.weight"),
    "mlx": lambda model: names("model.llm.embed.scales") or reads(quantization={"bits": 4, "group_size": 64}),
    "compressed": lambda model: (
        names("model.llm.embed.weight_packed") or reads(quantization_config={"quant_method": "compressed-tensors"})
    ),
    "lora": lambda model: names("model.llm.embed.lora_A.weight"),
    "random": lambda model: model in PRESETS and "weights" in inspect.signature(load_model).parameters,
    "generate": lambda model: callable(LLM.generate) and callable(LLM.stream),
    "chat": lambda model: "tools" in inspect.signature(LLM.chat).parameters,
    "score": lambda model: callable(LLM.score) and callable(LLM.trace),
    "media": lambda model: (
        {"images", "audios", "videos"} <= {field.name for field in dataclasses.fields(Prompt)}
        and "processor" in {field.name for field in dataclasses.fields(Loaded)}
    ),
    "media_cli": lambda model: all(accepts(option) for option in ("--image", "--audio", "--video")),
    "batch": lambda model: accepts("--input"),
    "draft": lambda model: callable(LLM.draft_logits) and "draft" in inspect.signature(load_model).parameters,
    "speculative": lambda model: any("speculative" in path.name for path in (ROOT / "inkling_jax").rglob("*.py")),
    "prefix": lambda model: any("prefix" in path.name for path in (ROOT / "inkling_jax").rglob("*.py")),
    "kv_quantised": lambda model: works(lambda: quantised_cache("FP8")),
    "kv_fp8": lambda model: (
        accepts("--kv-dtype")
        and not works(lambda: is_fp8("int8"))
        and answer(model, kv_dtype="fp8", device_memory="1TB", context=4096).memory.cache["global"]
        < 0.6 * answer(model, device_memory="1TB", context=4096).memory.cache["global"]
    ),
    "context": lambda model: preset(model).text.max_context == 1_048_576,
    "cpu": lambda model: True,  # where these tests run
    "float32": lambda model: works(lambda: choose_dtype("float32", preset(model))),
    "float16": lambda model: works(lambda: choose_dtype("float16", preset(model))),
    "reference": lambda model: not choose_kernels("reference", preset(model).text, BF16, "any", {}, 16),
    "sm90": kernels_run,
    "pages": lambda model: works(lambda: answer(model, page_size=1, device_memory="1TB", context=64)),
    "mesh": lambda model: (
        [n for n in range(1, 129) if divides(model, tensor=n)] == [2**i for i in range(7 if model == "inkling" else 6)]
        and divides(model, expert=16)
        and divides(model, tensor=4, expert=8)
    ),
    "kv_copies": lambda model: divides(model, tensor=16) or divides(model, tensor=4, expert=4),
    "auto_mesh": lambda model: choose_mesh(layout(model), CacheRequest(1, 64, 512, 1024))["tensor"] == len(jax.devices()),
    "data": lambda model: divides(model, data=2, tensor=2),
    "experts_over_data": lambda model: (
        accepts("--experts-over")
        and not works(lambda: check_spread_experts("data", None, "sm90"))
        and not works(lambda: check_experts_over("data", mesh_sizes("tensor=2")))
        and [n for n in range(1, 300) if spread_divides(model, n)] == [2**i for i in range(9)]
    ),
    "processes": lambda model: "jax.distributed" in SOURCE,
    "one_gpu": lambda model: fits(model, 1, "141GB"),
    "two_gpus": lambda model: fits(model, 2, "141GB"),
    "eight_gpus": lambda model: fits(model, 8, "60GB", 8, 16384),
    "eight_large": lambda model: fits(model, 8, "141GB", 32, 131072),
}


def quantised_cache(algo: str) -> ModelConfig:
    quant = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": algo}}
    return ModelConfig.from_dict(micro_config().to_dict(), quant=quant)


def test_the_document_is_the_table() -> None:
    assert table["main"](["--check"]) == 0


def test_a_document_that_differs_is_told_and_mended(tmp_path: Path) -> None:
    path = tmp_path / "support.md"
    with pytest.raises(InputError, match="run python scripts/make_support.py"):
        table["main"](["--check"], path)
    assert table["main"]([], path) == 0 and table["main"](["--check"], path) == 0
    path.write_text(path.read_text().replace("| yes |", "| no |", 1))
    with pytest.raises(InputError, match="support.md is not what it is made from"):
        table["main"](["--check"], path)


def test_every_line_has_a_check() -> None:
    assert {*CHECKS, "gguf"} == FEATURES.keys()


@pytest.mark.parametrize("key", CHECKS)
def test_a_line_is_what_the_code_does(key: str) -> None:
    """Where a line says no the code refuses, or has no such option; where it says yes or names a condition, it does not."""
    for model, cell in (("inkling", FEATURES[key].inkling), ("inkling-small", FEATURES[key].small)):
        found = CHECKS[key](model)
        assert found == (cell != "no"), f"the table says {cell!r} of {FEATURES[key].name!r} for {model}, the code {found}"


def test_gguf_is_refused(tmp_path: Path) -> None:
    assert FEATURES["gguf"].inkling == FEATURES["gguf"].small == "no" and not directory_with(".gguf", tmp_path)


def test_conditions() -> None:
    """What the cells that are no plain yes or no say."""
    for model in PRESETS:
        assert not kernels_run(model, kind="NVIDIA A100") and not kernels_run(model, dtype=jnp.float32)
        assert choose_kernels("auto", preset(model).text, BF16, HOPPER, {}, 64)
        assert [size for size in (16, 32, 64, 128, 256) if kernels_run(model, page_size=size)] == [64, 128]
        assert not works(lambda model=model: answer(model, page_size=48, device_memory="1TB", context=64))
        assert not any(divides(model, tensor=n) for n in (3, 5, 6, 7))
    settings = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias", "logprobs"} <= settings
