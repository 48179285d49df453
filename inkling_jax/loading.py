"""From a model's name to an engine that can run it: configuration, weights on the mesh, a cache that fits, programs."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from inkling_jax.cache.paged import CacheShape, is_fp8
from inkling_jax.cache.sizing import CacheRequest
from inkling_jax.config import ModelConfig, TextConfig, preset
from inkling_jax.convert.converted import open_weights
from inkling_jax.convert.load import bytes_to_read, stream_parameters
from inkling_jax.convert.progress import Progress, size_text
from inkling_jax.convert.spread import spread_plan
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.draft_loading import DraftSource, check_draft_mesh
from inkling_jax.engine import warmup
from inkling_jax.engine.draft import DraftRunner
from inkling_jax.engine.engine import Engine, EngineOptions
from inkling_jax.engine.media import KEEP_BYTES, MediaRunner
from inkling_jax.engine.shapes import Shapes
from inkling_jax.engine.state import EngineState, create_state
from inkling_jax.engine.steps import Programs, state_specs
from inkling_jax.errors import InputError
from inkling_jax.expert_storage import choose_kernels, measure_inputs, quantize_inputs, repack, use_kernels
from inkling_jax.inputs.chat_template import chat_renderer
from inkling_jax.inputs.images import ImageConfig
from inkling_jax.inputs.processor import Processor
from inkling_jax.inputs.segments import Segment
from inkling_jax.inputs.stops import resolve_stop_ids
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.memory import Layout, Memory, choose_mesh, declare_decoder, fit_model, mesh_text, most_positions, to_bytes
from inkling_jax.model import Inkling, flat_parameters
from inkling_jax.processes import check_processes, first_on_host, of_all_processes
from inkling_jax.random_weights import packed_experts, random_parameters
from inkling_jax.sharding.mesh import make_mesh, mesh_sizes
from inkling_jax.sharding.rules import partition_spec
from inkling_jax.sources import find_source
from inkling_jax.towers import Towers

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model ready to run."""

    config: ModelConfig
    engine: Engine
    tokenizer: Tokenizer | None
    processor: Processor
    render_chat: Callable[..., list[Segment]]  # called as `inputs.chat.render` is
    open_drafts: Callable[[], DraftRunner]  # read the draft head, where `draft` has not
    summary: str  # one line: shape, place, memory


def load_model(
    source: str | os.PathLike[str],
    *,
    weights: str = "checkpoint",
    dtype: str | None = None,
    mesh: str | Mapping[str, int] | None = None,
    experts_over: str | None = None,
    max_context: int | None = None,
    kv_memory: int | str | None = None,
    kv_dtype: str | None = None,
    prefix_memory: int | str = "1GB",
    kernels: str = "auto",
    activations: str | None = None,
    draft: bool = False,
    slots: int = 8,
    page_size: int = 64,
    chunk: int = 512,
    tokens_per_call: int = 8,
    ahead: int = 1,
    deterministic: bool = False,
    check: bool = False,
    warm_up: bool | str = False,
    seed: int = 0,
    quiet: bool = False,
) -> Loaded:
    """Load `source`: a checkpoint directory, a preset's name or a hub id.

    weights: "checkpoint", or "random" for a shape without files (seeded by `seed`). dtype: "bfloat16" or "float32", default the
    configuration's. mesh: axis sizes, text such as "data=2,tensor=4", or "auto": of all devices here, as the plan says.
    experts_over: "data" spreads routed experts over the replicas as well, default within each. max_context: longest sequence;
    default what memory holds. kv_memory: bytes a device for the cache, or text such as "40GB"; default what is left beside the
    weights (a quarter of the RAM on a CPU). kv_dtype: "fp8" keeps keys and values as e4m3 with a scale for each token and head;
    default as computed. prefix_memory: bytes of the host's memory, or such text, for what a prompt that
    begins as an earlier one goes on from; 0 for reading every prompt in full. kernels: "reference" (plain XLA), "sm90"
    (Hopper's) or "auto" (sm90 where it can run). activations: "nvfp4" rounds the inputs of packed experts to 4 bits by the
    checkpoint's input_amax, as serving on Blackwell does (a simulation on the reference path), "measured" has `trace` tell the
    largest inputs of unpacked experts, "moe.j.amax" [T, 2], of w13 and of w2; default neither. draft: read the draft head with
    the model and plan its memory; default not, then `draft_logits` reads it when it is first called, into what memory is left.
    slots: sequences at once. page_size: tokens a cache page. chunk: prompt tokens a step. tokens_per_call: decode steps a host
    call. ahead: calls dispatched before the oldest's tokens are read. deterministic: to the bit, a request's tokens do not
    depend on what else runs, which costs speed. check: compare the device's state with the host's after each step, and raise
    InklingError where they differ; slow. warm_up: compile now what requests can lead to, or with "text" those without media.
    Raises ConfigError, CheckpointError, InputError or CapacityError.
    """
    options = EngineOptions(
        chunk, tokens_per_call, ahead, deterministic, check, prefix_bytes=to_bytes(prefix_memory, "prefix_memory")
    )
    check_options(options, slots=slots, page_size=page_size, max_context=max_context, seed=seed)
    if warm_up not in (False, True, "text"):
        raise InputError(f"warm_up={warm_up!r}: expected True, False or 'text' (nothing that takes media)")
    check_activations(activations, kernels)
    check_spread_experts(experts_over, activations, kernels)
    directory, config = _find(source, weights)
    model_dtype, fp8 = choose_dtype(dtype, config), is_fp8(kv_dtype)
    automatic = mesh == "auto"
    sizes = {} if automatic else mesh_sizes(mesh)
    if not automatic:
        check_processes(sizes)
        make_mesh(sizes)  # refuses what there are no devices for before anything is read
    tokenizer = Tokenizer.from_directory(directory, config) if directory and (directory / "tokenizer.json").exists() else None
    images = ImageConfig.from_directory(directory) if directory else ImageConfig()
    render_chat = chat_renderer(directory, tokenizer)  # a template that cannot be parsed is refused before weights are read
    stop_ids = resolve_stop_ids(directory, tokenizer, config)
    plan = open_weights(config, directory, input_scales=activations == "nvfp4") if directory and weights == "checkpoint" else None
    heads = DraftSource(config, directory if weights == "checkpoint" else None, model_dtype, seed, quiet)
    layout = layout_of(config, plan, model_dtype, options, experts_over == "data")
    layout = dataclasses.replace(layout, draft=heads.declare() if draft else None)
    request = CacheRequest(slots, page_size, most_positions(options), max_context, fp8)
    if automatic:
        sizes = choose_mesh(layout, request)
    check_experts_over(experts_over, sizes)
    if draft:
        check_draft_mesh(sizes)
    device_mesh = make_mesh(sizes)
    placed = layout.over(sizes)  # with each rank's own key heads
    if activations == "measured":
        if placed.packed:
            raise InputError(f"activations={activations!r}: {source} has experts in NVFP4, whose inputs are known")
        measure_inputs(placed.model)
        kernels = "reference"
    elif activations:
        if plan is None or not plan.packed:
            raise InputError(f"activations={activations!r}: {source} has no experts in NVFP4 with a calibration of their inputs")
        quantize_inputs(placed.model)
        kernels = "reference" if kernels == "auto" else kernels
    model, towers, text = placed.model, placed.towers, placed.text
    processor = Processor(config, tokenizer, towers.names, images)
    shape = fit_model(layout, request, kv_memory, device_mesh)  # refuses before weights are read, which may take minutes
    parameters = _parameters(model, towers, plan, device_mesh, model_dtype, seed, quiet)
    kernels = "reference" if experts_over else kernels
    hopper = choose_kernels(kernels, text, model_dtype, device_mesh.devices.flat[0].device_kind, sizes, page_size, fp8)
    if hopper:
        model = use_kernels(layout_of(placed.config, plan, model_dtype, options).model, deterministic)
        parameters = repack(parameters, device_mesh)
    arrays = dict(parameters)
    leaves, tower_leaves = _in_order(model, arrays), _in_order(towers, arrays)
    engine = Engine(
        Programs(model, device_mesh, model_dtype),
        leaves,
        _state_maker(text, shape, model_dtype, device_mesh),
        text,
        shape,
        banned=tuple(sorted(processor.slots.values())),
        default_stop_ids=stop_ids,
        options=options,
        shapes=Shapes.of(shape, chunk, bounded=not hopper, single=deterministic),
        media=MediaRunner(towers, tower_leaves, device_mesh, model_dtype),
        entropy=of_all_processes([secrets.randbits(63)])[0][0],
    )
    open_drafts = functools.partial(heads.open, engine.programs)
    if draft:
        engine.drafts = open_drafts()
    summary = _summary(layout, shape, layout.memory(shape, sizes), device_mesh)
    logger.info("%s", summary)
    if warm_up:
        warmup.warm_up(engine, media=warm_up != "text", quiet=quiet)
    return Loaded(config, engine, tokenizer, processor, render_chat, open_drafts, summary)


def _find(source: str | os.PathLike[str], weights: str) -> tuple[Path | None, ModelConfig]:
    """The checkpoint's directory, None for a preset, and the configuration."""
    if not isinstance(source, str | os.PathLike):
        raise InputError(f"model {source!r}: expected a checkpoint directory, a preset's name or a hub id")
    found = find_source(os.fspath(source), weights)
    return (found, ModelConfig.from_directory(found)) if isinstance(found, Path) else (None, preset(found))


def layout_of(
    config: ModelConfig, plan: WeightPlan | None, dtype: jnp.dtype, options: EngineOptions, experts_over_data: bool = False
) -> Layout:
    """The model as it is declared: what the plan found, or without one the shape of an NVFP4 release.

    Towers are those that the configuration has, and the checkpoint, where there is one.
    """
    packed = plan.packed if plan else packed_experts(config.text)
    towers = Towers.of(config, plan.towers if plan else ("vision", "audio"), dtype)
    media = KEEP_BYTES if flat_parameters(towers) else 0
    model = declare_decoder(config.text, packed, dtype, experts_over_data)
    return Layout(config, model, towers, dtype, packed, options.chunk, media, experts_over_data=experts_over_data)


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
    plan = spread_plan(plan, {path: leaf.get_value().shape for path, leaf in declared.items()})
    label = f"loading weights on {socket.gethostname()}" if jax.process_count() > 1 else "loading weights"
    quiet = quiet or not first_on_host()
    with Progress(bytes_to_read(plan, shardings), label=label, quiet=quiet) as progress:
        yield from stream_parameters(plan, dtype=dtype, device=shardings, progress=progress)


def _state_maker(text: TextConfig, shape: CacheShape, dtype: jnp.dtype, mesh: Mesh) -> Callable[[], EngineState]:
    """What makes an empty state where it belongs."""
    create = functools.partial(create_state, text, shape, dtype, mesh.shape)
    specs = state_specs(jax.eval_shape(create))
    return jax.jit(jax.shard_map(create, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False))


def _in_order(model: Inkling | Towers, arrays: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Parameters as the model's flat state orders them."""
    return [jax.block_until_ready(arrays[path]) for path in flat_parameters(model)]


def check_options(options: EngineOptions, *, slots: int, page_size: int, max_context: int | None, seed: int = 0) -> None:
    """Raise InputError for a number that is none, or too small, naming it."""
    for name, value, least in (
        ("chunk", options.chunk, 1),
        ("tokens_per_call", options.tokens_per_call, 1),
        ("ahead", options.ahead, 0),
        ("slots", slots, 1),
        ("page_size", page_size, 1),
        ("max_context", 1 if max_context is None else max_context, 1),
        ("seed", seed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name}={value!r}: expected an integer of at least {least}")


def check_activations(activations: str | None, kernels: str) -> None:
    """Raise InputError for a format that is not known, or that these kernels do not compute in."""
    if activations not in (None, "nvfp4", "measured"):
        raise InputError(f"activations={activations!r}: expected None (the model's dtype), 'nvfp4' or 'measured'")
    if activations and kernels == "sm90":
        raise InputError(f"kernels='sm90': activations={activations!r} are of the reference path alone")


def check_experts_over(experts_over: str | None, sizes: Mapping[str, int]) -> None:
    """Raise InputError for what is no axis of replicas, or has one."""
    if experts_over not in (None, "data"):
        raise InputError(f"experts_over={experts_over!r}: expected None (within a replica) or 'data' (over all of them)")
    if experts_over and sizes["data"] == 1:
        raise InputError(f"experts_over={experts_over!r}: mesh {mesh_text(sizes)} has one replica; give it more, such as data=2")


def check_spread_experts(experts_over: str | None, activations: str | None, kernels: str) -> None:
    """Raise InputError for what experts that are spread over replicas do not go with."""
    if experts_over and kernels == "sm90":
        raise InputError("kernels='sm90': experts that are spread over replicas are of the reference path alone")
    if experts_over and activations == "measured":
        raise InputError("activations='measured': not with experts that are spread over replicas")


def choose_dtype(wanted: str | None, config: ModelConfig) -> jnp.dtype:
    """What to compute in: as wanted, or as the configuration says. Raises InputError for what is not in `DTYPES`."""
    name = config.text.dtype if wanted is None else wanted
    if not isinstance(name, str) or name not in DTYPES:
        where = " is the configuration's, give another: one of" if wanted is None else ": expected one of"
        raise InputError(f"dtype {name!r}{where} {', '.join(DTYPES)}")
    return jnp.dtype(DTYPES[name])


def _summary(layout: Layout, shape: CacheShape, memory: Memory, mesh: Mesh) -> str:
    pages = f"{shape.global_pages:,} pages of global and {shape.local_pages:,} of local layers, {shape.page_size} tokens each"
    pages += ", keys and values in fp8" if shape.fp8 else ""
    each = f" in each of {mesh.shape['data']} replicas" if mesh.shape["data"] > 1 else ""
    return (
        f"{layout.text.num_layers} layers, {layout.dtype.name}, {mesh.size} x {mesh.devices.flat[0].device_kind}; "
        f"a device holds weights of {size_text(sum(memory.weights.values()))} and a cache of "
        f"{size_text(sum(memory.cache.values()))}: {pages}, {shape.slots + 1} rows of convolution state; "
        f"{shape.global_pages * shape.page_size:,} tokens in all{each}, at most {shape.max_context:,} a sequence"
    )
