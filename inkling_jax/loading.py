"""From a model's name to an engine that can run it: configuration, weights on the mesh, a cache that fits, programs."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from inkling_jax.cache.paged import CacheShape
from inkling_jax.cache.sizing import CacheRequest, cache_bytes, fit_cache
from inkling_jax.config import ModelConfig, preset
from inkling_jax.convert.load import stream_parameters
from inkling_jax.convert.progress import Progress, size_text
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.engine.engine import Engine, EngineOptions
from inkling_jax.engine.media import KEEP_BYTES, MediaRunner
from inkling_jax.engine.state import EngineState, create_state
from inkling_jax.engine.steps import Programs, state_specs
from inkling_jax.errors import CapacityError, InputError
from inkling_jax.expert_storage import choose_kernels, repack, use_kernels
from inkling_jax.inputs.chat_template import chat_renderer
from inkling_jax.inputs.segments import Segment
from inkling_jax.inputs.stops import resolve_stop_ids
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.model import Inkling, flat_parameters
from inkling_jax.random_weights import local_leaves, packed_experts, random_parameters
from inkling_jax.sharding.mesh import make_mesh, mesh_sizes
from inkling_jax.sharding.rules import partition_spec
from inkling_jax.sources import find_source
from inkling_jax.towers import Towers

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
WORKSPACE_SHARE = 0.08  # of a GPU's memory, left for what a step computes on its way


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model ready to run."""

    config: ModelConfig
    engine: Engine
    tokenizer: Tokenizer | None
    render_chat: Callable[..., list[Segment]]  # called as `inputs.chat.render` is
    summary: str  # one line: shape, place, memory


def load_model(
    source: str | os.PathLike[str],
    *,
    weights: str = "checkpoint",
    dtype: str | None = None,
    mesh: str | Mapping[str, int] | None = None,
    max_context: int | None = None,
    kv_memory: int | str | None = None,
    kernels: str = "auto",
    slots: int = 8,
    page_size: int = 64,
    chunk: int = 512,
    tokens_per_call: int = 8,
    ahead: int = 1,
    seed: int = 0,
    quiet: bool = False,
) -> Loaded:
    """Load `source`: a checkpoint directory, a preset's name or a hub id.

    weights: "checkpoint", or "random" for a shape without files (seeded by `seed`). dtype: "bfloat16" or "float32", default the
    configuration's. mesh: axis sizes, or text such as "tensor=2". max_context: longest sequence; default what memory holds.
    kv_memory: bytes a device for the cache, or text such as "40GB"; default what is left beside the weights (a quarter of the RAM
    on a CPU). kernels: "reference" (plain XLA), "sm90" (Hopper's, on trial) or "auto". slots: sequences at once. page_size:
    tokens a cache page. chunk: prompt tokens a step. tokens_per_call: decode steps a host call. ahead: calls dispatched before
    the oldest's tokens are read.
    Raises ConfigError, CheckpointError, InputError or CapacityError.
    """
    options = _check_options(chunk, tokens_per_call, ahead, slots, page_size, max_context, seed)
    directory, config = _find(source, weights)
    model_dtype = _dtype(dtype, config)
    sizes = mesh_sizes(mesh)
    device_mesh = _make_mesh(sizes)
    tokenizer = Tokenizer.from_directory(directory, config) if directory and (directory / "tokenizer.json").exists() else None
    render_chat = chat_renderer(directory, tokenizer)  # a template that cannot be parsed is refused before weights are read
    stop_ids = resolve_stop_ids(directory, tokenizer, config)
    plan = WeightPlan.build(config, Checkpoint.open(directory)) if directory and weights == "checkpoint" else None
    itemsize = model_dtype.itemsize
    request = CacheRequest(slots, page_size, max(chunk, tokens_per_call * (ahead + 2)), max_context)
    packed = plan.packed if plan else packed_experts(config.text)
    model, towers = Inkling(config.text, packed, model_dtype), _towers(config, plan, model_dtype)
    _check_weights(model, towers, sizes, device_mesh)
    kept_rows = KEEP_BYTES if flat_parameters(towers) else 0
    # refuse before reading for minutes
    fit_cache(config.text, request, _kv_memory(kv_memory, device_mesh, kept_rows), itemsize, sizes)
    parameters = _parameters(model, towers, plan, device_mesh, model_dtype, seed, quiet)
    if choose_kernels(kernels, config.text, model_dtype, device_mesh.devices.flat[0].device_kind, sizes, page_size):
        model, parameters = use_kernels(Inkling(config.text, packed, model_dtype)), repack(parameters, device_mesh)
    arrays = dict(parameters)
    leaves, tower_leaves = _in_order(model, arrays), _in_order(towers, arrays)
    shape = fit_cache(config.text, request, _kv_memory(kv_memory, device_mesh, kept_rows), itemsize, sizes)
    engine = Engine(
        Programs(model, device_mesh, model_dtype),
        leaves,
        _create_state(config, shape, model_dtype, device_mesh),
        config.text,
        shape,
        banned=_media_slots(config, tokenizer),
        default_stop_ids=stop_ids,
        options=options,
        media=MediaRunner(towers, tower_leaves, device_mesh, model_dtype),
    )
    summary = _summary(config, leaves + tower_leaves, shape, sizes, device_mesh, model_dtype)
    logger.info("%s", summary)
    return Loaded(config, engine, tokenizer, render_chat, summary)


def _find(source: str | os.PathLike[str], weights: str) -> tuple[Path | None, ModelConfig]:
    """The checkpoint's directory, None for a preset, and the configuration."""
    if not isinstance(source, str | os.PathLike):
        raise InputError(f"model {source!r}: expected a checkpoint directory, a preset's name or a hub id")
    found = find_source(os.fspath(source), weights)
    return (found, ModelConfig.from_directory(found)) if isinstance(found, Path) else (None, preset(found))


def _towers(config: ModelConfig, plan: WeightPlan | None, dtype: jnp.dtype) -> Towers:
    """The towers that the configuration has, and the checkpoint, where there is one."""
    vision, audio = (plan is None or name in plan.towers for name in ("vision", "audio"))
    return Towers(config.vision if vision else None, config.audio if audio else None, dtype)


def _parameters(
    model: Inkling, towers: Towers, plan: WeightPlan | None, mesh: Mesh, dtype: jnp.dtype, seed: int, quiet: bool
) -> Iterator[tuple[str, jax.Array]]:
    """All parameters on the mesh, one by one, each with its path: read as planned, or random without a plan."""
    if plan is None:
        yield from random_parameters(model, mesh=mesh, seed=seed)
        yield from random_parameters(towers, mesh=mesh, seed=seed)
        return
    declared = flat_parameters(model) | flat_parameters(towers)
    shardings = {path: NamedSharding(mesh, partition_spec(leaf.axes)) for path, leaf in declared.items()}
    with Progress(plan.total_bytes, label="loading weights", quiet=quiet) as progress:
        yield from stream_parameters(plan, dtype=dtype, device=shardings, progress=progress)


def _create_state(config: ModelConfig, shape: CacheShape, dtype: jnp.dtype, mesh: Mesh) -> EngineState:
    """An empty state, made where it belongs."""
    create = functools.partial(create_state, config.text, shape, dtype, config.text.usable_vocab_size)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs(jax.eval_shape(create)))
    return jax.jit(create, out_shardings=shardings)()


def _in_order(model: Inkling | Towers, arrays: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Parameters as the model's flat state orders them."""
    return [jax.block_until_ready(arrays[path]) for path in flat_parameters(model)]


def _check_options(
    chunk: int, tokens_per_call: int, ahead: int, slots: int, page_size: int, max_context: int | None, seed: int
) -> EngineOptions:
    for name, value, least in (
        ("chunk", chunk, 1),
        ("tokens_per_call", tokens_per_call, 1),
        ("ahead", ahead, 0),
        ("slots", slots, 1),
        ("page_size", page_size, 1),
        ("max_context", 1 if max_context is None else max_context, 1),
        ("seed", seed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name}={value!r}: expected an integer of at least {least}")
    return EngineOptions(chunk, tokens_per_call, ahead)


def _make_mesh(sizes: Mapping[str, int]) -> Mesh:
    if sizes["data"] > 1:
        raise InputError(f"mesh data={sizes['data']}: replicas are not supported yet, use tensor and expert")
    return make_mesh(sizes)


def _dtype(wanted: str | None, config: ModelConfig) -> jnp.dtype:
    name = config.text.dtype if wanted is None else wanted
    if name not in DTYPES:
        where = " is the configuration's, give another: one of" if wanted is None else ": expected one of"
        raise InputError(f"dtype {name!r}{where} {', '.join(DTYPES)}")
    return jnp.dtype(DTYPES[name])


def _check_weights(model: Inkling, towers: Towers, sizes: Mapping[str, int], mesh: Mesh) -> None:
    """Before a weight is read, refuse a mesh that a parameter does not divide over, by name, or that cannot hold them all."""
    leaves = local_leaves(model, sizes) | local_leaves(towers, sizes)
    need = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    total, taken = _memory(mesh)
    if need > total - taken:
        raise CapacityError(
            f"the weights take {need} bytes a device, of {total} there {total - taken} are free: "
            "spread them over more devices, such as mesh='tensor=8'"
        )


def _memory(mesh: Mesh) -> tuple[int, int]:
    """Bytes of memory of a device, and how many of them are taken. On a CPU, whose devices share it: the RAM, and none."""
    device = mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // mesh.size, 0
    return stats["bytes_limit"], stats["bytes_in_use"]


def _kv_memory(wanted: int | str | None, mesh: Mesh, kept_rows: int) -> int:
    """Bytes a device that the cache may take. Rows of media may take `kept_rows` bytes beside it."""
    if wanted is not None:
        if isinstance(wanted, str):
            return parse_bytes(wanted)
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0:
            raise InputError(f"kv_memory={wanted!r}: expected a number of bytes, or text such as 40GB or 512MiB")
        return wanted
    total, taken = _memory(mesh)
    if mesh.devices.flat[0].platform == "cpu":
        return total // 4
    left = total * (1 - WORKSPACE_SHARE) - taken - kept_rows
    if left <= 0:
        raise CapacityError(f"{taken} of {total} bytes of the device are taken: no room for a cache")
    return int(left)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "40GB", "512MiB" or "1000000"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]i?)?B?\s*", text)
    if match is None:
        raise InputError(f"size {text!r}: expected a number of bytes such as 40GB or 512MiB")
    number, unit = match.groups()
    scale = (1024 if unit.endswith("i") else 1000) ** ("KMGT".index(unit[0].upper()) + 1) if unit else 1
    return int(float(number) * scale)


def _media_slots(config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that stand for media rows, which no model output may be."""
    ids = {config.image_token_id, config.audio_token_id}
    if tokenizer is not None:
        ids |= {tokenizer.control.get("image_slot"), tokenizer.control.get("audio_slot")}
    return tuple(sorted(i for i in ids if i is not None))


def _summary(
    config: ModelConfig,
    leaves: list[jax.Array],
    shape: CacheShape,
    sizes: Mapping[str, int],
    mesh: Mesh,
    dtype: jnp.dtype,
) -> str:
    weights = sum(leaf.nbytes for leaf in leaves)
    cache = cache_bytes(config.text, shape, dtype.itemsize, sizes)
    devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
    return (
        f"{config.text.num_layers} layers, {dtype.name}, {devices}; weights {size_text(weights)}; "
        f"cache {size_text(sum(cache.values()))} a device for {shape.global_pages * shape.page_size:,} tokens, "
        f"at most {shape.max_context:,} a sequence"
    )
