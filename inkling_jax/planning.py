"""One question to the planner answered: a model's name and options in, bytes, limits and sentences out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from inkling_jax.cache.paged import is_fp8
from inkling_jax.cache.sizing import CacheRequest
from inkling_jax.config import PRESETS, ModelConfig, preset
from inkling_jax.convert.converted import RECORD, open_weights
from inkling_jax.convert.header import DTYPES, TensorInfo
from inkling_jax.convert.progress import size_text
from inkling_jax.convert.published import published_tensors
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.draft_loading import check_draft_mesh
from inkling_jax.engine.engine import EngineOptions
from inkling_jax.errors import CheckpointError, ConfigError, InputError
from inkling_jax.layers.mtp import DraftHead
from inkling_jax.loading import check_experts_over, check_options, choose_dtype, layout_of
from inkling_jax.memory import (
    UNLIMITED,
    Layout,
    Memory,
    largest,
    memory_of,
    mesh_text,
    most_positions,
    parse_bytes,
    smallest_mesh,
    usable,
)
from inkling_jax.sharding.mesh import mesh_sizes
from inkling_jax.sources import HUB_ID, find_directory, unknown

MOST_BATCH = 1 << 14


@dataclasses.dataclass(frozen=True)
class Files:
    """Bytes of a checkpoint's tensors: what loading reads, and what it leaves."""

    tensors: int
    read: int
    draft: int  # the draft head, and towers that the configuration has not
    unused: int  # calibration of quantised activations

    @property
    def total(self) -> int:
        """All of them."""
        return self.read + self.draft + self.unused


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model takes of each device, and what would fit."""

    model: str
    files: Files
    mesh: str
    dtype: str
    kv_dtype: str  # "fp8", or as dtype
    device_memory: int
    batch: int
    context: int
    chunk: int
    memory: Memory
    largest_batch: int  # at this context; 0: none
    largest_context: int  # of so many sequences; 0: none
    mesh_that_fits: str | None  # the smallest
    experts_over: str | None = None  # "data": routed experts are spread over the replicas
    other: Memory | None = None  # of several replicas with their experts laid out the other way, where that divides

    @property
    def margin(self) -> int:
        """What a plan leaves to the allocator."""
        return self.device_memory - usable(self.device_memory)

    @property
    def left(self) -> int:
        """What could still be filled; negative where it does not fit."""
        return usable(self.device_memory) - self.memory.total

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.left >= 0

    def heading(self) -> str:
        """What was asked."""
        experts = f", experts over {self.experts_over}" if self.experts_over else ""
        where = " a replica" if mesh_sizes(self.mesh)["data"] > 1 else ""
        return f"{self.model}, {self.mesh}{experts}, {self.dtype}, {self.batch} sequences of {self.context:,} tokens{where}"

    def rows(self) -> Iterator[tuple[str, int, str]]:
        """Name, bytes and a remark of each part."""
        memory = self.memory
        for kind, nbytes in memory.weights.items():
            yield f"weights: {kind}", nbytes, ""
        yield "weights in all", sum(memory.weights.values()), ""
        form = "" if self.kv_dtype == self.dtype else f", {self.kv_dtype} with scales"
        for name, what in (("global", f"every page{form}"), ("local", f"the window's pages{form}")):
            yield f"keys and values of {name} layers", memory.cache[name], what
        yield "convolution state", memory.cache["conv"], f"{self.batch + 1} rows"
        yield "sampler and page tables", memory.slots, ""
        if memory.media:
            yield "rows of media that are kept", memory.media, "at most"
        program = max(memory.workspace, key=memory.workspace.__getitem__)
        yield "workspace of a step", memory.step, f"{program}, the largest of {', '.join(memory.workspace)}"
        yield "in all", memory.total, ""
        yield "margin of the allocator", self.margin, ""
        yield "left" if self.fits else "missing", abs(self.left), f"of {self.device_memory:,} bytes"

    def sentences(self) -> Iterator[str]:
        """What follows from the numbers."""
        files = self.files
        left_out = [name for name, nbytes in (("the draft head", files.draft), ("calibration", files.unused)) if nbytes]
        not_read = f"; {' and '.join(left_out)}, {size_text(files.draft + files.unused)}, are not read" if left_out else ""
        yield f"files: {files.total:,} bytes in {files.tensors:,} tensors{not_read}"
        batch = f"{self.largest_batch:,} sequences of {self.context:,} tokens" if self.largest_batch else None
        context = f"{self.batch:,} sequences of {self.largest_context:,} tokens" if self.largest_context else None
        limits = [limit for limit in (batch, context) if limit]
        if limits:
            yield f"largest that fits this mesh: {', or '.join(limits)}"
        if self.other is not None:
            layouts = ("--experts-over data", "all experts in each replica")
            mine, others = reversed(layouts) if not self.experts_over else layouts
            told = "fits" if self.other.total <= usable(self.device_memory) else "does not fit"
            sizes = [
                f"{size_text(sum(memory.weights.values()))} of weights, {size_text(memory.total)} a device in all"
                for memory in (self.memory, self.other)
            ]
            yield f"{mine}: {sizes[0]}; {others}: {sizes[1]}, which {told}"

    def refusal(self) -> str:
        """Both numbers and what would do, on one line."""
        other = f"--mesh {self.mesh_that_fits} would fit" if self.mesh_that_fits else "no mesh of up to 64 devices would fit"
        there = f"of {self.device_memory} there {usable(self.device_memory)} can be used"
        return f"{self.memory.total} bytes a device are needed, {there}: {other}"


def answer(
    model: str,
    *,
    release_format: str | None = None,
    dtype: str | None = None,
    mesh: str | Mapping[str, int] | None = None,
    device_memory: str | None = None,
    context: int | None = None,
    batch: int = 8,
    chunk: int = 512,
    page_size: int = 64,
    kv_dtype: str | None = None,
    draft: bool = False,
    experts_over: str | None = None,
) -> Answer:
    """Plan `model`: a preset (as released in `release_format`), a checkpoint directory, or a hub id whose config.json is here.

    `draft`: with the draft head. `kv_dtype`: as `load` takes it. `experts_over`: "data" spreads routed experts over replicas.
    Raises ConfigError, naming a mesh that would do, for what does not divide, CheckpointError and InputError as `load` does.
    """
    options = EngineOptions(chunk=chunk)
    check_options(options, slots=batch, page_size=page_size, max_context=context)
    sizes = mesh_sizes(mesh)
    config, plan = _find(model, release_format, draft)
    check_experts_over(experts_over, sizes)
    dtype_of = choose_dtype(dtype, config)
    layout, other = (layout_of(config, plan, dtype_of, options, spread) for spread in (bool(experts_over), not experts_over))
    if draft:
        check_draft_mesh(sizes)
        if not plan.draft:
            raise InputError(f"{model} has no draft head")
        layout = dataclasses.replace(layout, draft=DraftHead.of(config, layout.dtype))
    count = math.prod(sizes.values())
    memory = parse_bytes(device_memory) if device_memory is not None else memory_of(jax.devices()[0], count)[0]
    request = CacheRequest(batch, page_size, most_positions(options), context or config.text.max_context, is_fp8(kv_dtype))
    found = _divided(layout, request, sizes, memory)

    def fits(**change: int) -> bool:
        return layout.full(dataclasses.replace(request, **change), sizes).total <= usable(memory)

    smallest = smallest_mesh(layout, request, memory)
    return Answer(
        model=model,
        files=_files(plan),
        mesh=mesh_text(sizes),
        dtype=layout.dtype.name,
        kv_dtype=kv_dtype or layout.dtype.name,
        device_memory=memory,
        batch=batch,
        context=request.max_context or 0,
        chunk=chunk,
        memory=found,
        largest_batch=largest(MOST_BATCH, lambda n: fits(slots=n)),
        largest_context=largest(config.text.max_context, lambda n: fits(max_context=n)),
        mesh_that_fits=mesh_text(smallest) if smallest else None,
        experts_over=experts_over,
        other=_if_divided(other, request, sizes) if sizes["data"] > 1 else None,
    )


def _if_divided(layout: Layout, request: CacheRequest, sizes: Mapping[str, int]) -> Memory | None:
    try:
        return layout.full(request, sizes)
    except ConfigError:
        return None


def _divided(layout: Layout, request: CacheRequest, sizes: Mapping[str, int], memory: int) -> Memory:
    try:
        return layout.full(request, sizes)
    except ConfigError as error:
        other = smallest_mesh(layout, request, memory) or smallest_mesh(layout, request, UNLIMITED, math.prod(sizes.values()))
        raise ConfigError(f"{error}; --mesh {mesh_text(other)} would do" if other else str(error)) from None


def _files(plan: WeightPlan) -> Files:
    tensors = plan.checkpoint.tensors
    draft, unused = (sum(tensors[name].nbytes for name in names) for names in (plan.deferred, plan.unused))
    return Files(len(tensors), plan.checkpoint.nbytes - draft - unused, draft, unused)


def _find(model: str, release_format: str | None, draft: bool) -> tuple[ModelConfig, WeightPlan]:
    """Configuration and tensors of a model, whose weights need not be here."""
    if (path := find_directory(model)) is not None:
        config, directory = ModelConfig.from_directory(path), path
    elif model in PRESETS:
        config, directory = preset(model), None
    elif HUB_ID.fullmatch(model):
        directory = _snapshot(model)
        config = ModelConfig.from_directory(directory)
    else:
        raise unknown(model)
    if directory is not None and (any(directory.glob("*.safetensors")) or (directory / RECORD).exists()):
        if release_format is not None:
            raise InputError(f"--format {release_format}: {directory} has tensors, which tell their format themselves")
        return config, open_weights(config, directory, draft=draft)
    stated = "bf16" if directory is not None and config.quant_algo is None else "nvfp4"
    return config, published_plan(config, (release_format or stated) == "nvfp4", draft)


def _snapshot(repo_id: str) -> Path:
    """Where the hub's cache holds config.json; nothing is downloaded."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        found = huggingface_hub.try_to_load_from_cache(repo_id, "config.json")
    except HFValidationError as error:  # the hub's rules for names are narrower than HUB_ID
        raise CheckpointError(f"{repo_id}: no such directory, and no hub id ({error})") from None
    if not isinstance(found, str):
        raise CheckpointError(f"{repo_id}: no such directory, and its config.json has not been downloaded")
    return Path(found).parent


def published_plan(config: ModelConfig, nvfp4: bool, draft: bool = False) -> WeightPlan:
    """The plan of a checkpoint in the published layout that is not here (spec 7)."""
    nowhere = Path("the published layout")
    tensors = {
        name: TensorInfo(name, dtype, shape, nowhere, 0, math.prod(shape) * DTYPES[dtype].itemsize)
        for name, (dtype, shape) in published_tensors(config, nvfp4).items()
    }
    return WeightPlan.build(config, Checkpoint(nowhere, tensors), draft=draft)
