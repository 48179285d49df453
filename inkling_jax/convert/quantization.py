"""A published checkpoint in BF16 as one in NVFP4: its routed experts packed (spec 7.4), everything else byte for byte."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from inkling_jax.config import ModelConfig
from inkling_jax.config_quant import QUANT_FILE
from inkling_jax.convert.converted import RECORD
from inkling_jax.convert.destination import JOURNAL, Destination, flush
from inkling_jax.convert.header import DTYPES, MAX_JSON_BYTES, TensorInfo, parse_json, regular_file_size
from inkling_jax.convert.journal import Journal
from inkling_jax.convert.nvfp4 import BLOCK
from inkling_jax.convert.progress import Progress, size_text
from inkling_jax.convert.provenance import copied_files, state_of, weight_files
from inkling_jax.convert.published import Layout, is_first_sparse, packed_stack
from inkling_jax.convert.quantize import quantize
from inkling_jax.convert.safetensors_reader import INDEX, Checkpoint, read_into
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.convert.write import file_header, in_file_order, quant_config, tensor_bytes, write_json
from inkling_jax.errors import CheckpointError, ConfigError, InputError

logger = logging.getLogger(__name__)

_COPY_BYTES = 1 << 24
Amax = Mapping[str, float]  # the largest input of an expert stack, by the stack's name


@dataclasses.dataclass(frozen=True)
class Quantization:
    """From `plan`'s checkpoint to `place`: `stacks` are the expert weights [E, O, I] that are packed, by name."""

    source: Path
    place: Destination
    config: ModelConfig
    plan: WeightPlan
    stacks: dict[str, tuple[int, int, int]]
    calibrated: bool

    @classmethod
    def of(cls, source: Path, destination: Path, calibrated: bool = False) -> Quantization:
        """The quantisation of a checkpoint directory in the published layout, as the releases have it.

        Packed are the experts of every sparse layer but the first. `calibrated`: with the largest inputs beside them. Raises
        CheckpointError, ConfigError or InputError for a source that is refused.
        """
        if (source / RECORD).exists():
            raise CheckpointError(f"{source}: is a converted checkpoint; give the published one that it was made of")
        config = ModelConfig.from_directory(source)
        plan = WeightPlan.build(config, Checkpoint.open(source), draft=True)
        if plan.packed:
            raise InputError(f"{source}: has experts in NVFP4 already")
        text = config.text
        layers = [i for i in range(text.num_layers) if not text.dense_layers[i] and not is_first_sparse(text, i)]
        if not layers:
            raise InputError(f"{source}: no experts to quantise: those of the first sparse layer stay as they are")
        for name, columns in (("hidden_size", text.hidden_size), ("the width of an expert", text.expert_width)):
            if columns % BLOCK:
                raise ConfigError(f"{source}: {name} is {columns}, expected a multiple of {BLOCK}, the block of NVFP4")
        names = [f"model.llm.layers.{i}.mlp.experts.{matrix}_weight" for i in layers for matrix in ("w13", "w2")]
        stacks: Any = {name: plan.checkpoint.info(name).shape for name in names}
        return cls(source, Destination.of(destination), config, plan, stacks, calibrated)

    def layouts(self) -> dict[Path, Layout]:
        """The tensors of each file that is to be written, in their order, by the file that they come from."""
        found: dict[Path, Layout] = {file: {} for file in weight_files(self.plan)}
        for name, info in self.plan.checkpoint.tensors.items():
            found[info.file] |= self._stack(name) if name in self.stacks else {name: (info.dtype, info.shape)}
        return {file: {name: layout[name] for name in in_file_order(layout)} for file, layout in found.items()}

    def _stack(self, name: str) -> Layout:
        layout = packed_stack(name, self.stacks[name])
        return layout if self.calibrated else {key: entry for key, entry in layout.items() if not key.endswith(".input_amax")}

    def copied(self) -> list[Path]:
        """Files that go along as they are."""
        return [file for file in copied_files(self.source) if file.name != QUANT_FILE]

    def nbytes(self) -> int:
        """Bytes of all that is to be written."""
        weights = sum(len(file_header(layout)) + _data_bytes(layout) for layout in self.layouts().values())
        return weights + sum(file.stat().st_size for file in self.copied())

    def lines(self) -> Iterator[str]:
        """What would be written, for people."""
        experts, rows, columns = next(iter(self.stacks.values()))
        before = sum(self.plan.checkpoint.tensors[name].nbytes for name in self.stacks)
        after = sum(_data_bytes(self._stack(name)) for name in self.stacks)
        yield (
            f"{len(self.stacks)} expert stacks, such as {experts} x {rows} x {columns}, to NVFP4: {size_text(before)} become "
            f"{size_text(after)}; {len(self.plan.checkpoint.tensors) - len(self.stacks)} tensors as they are"
        )
        yield f"{size_text(self.nbytes())} in {len(self.layouts())} files; {size_text(self.place.free_space())} free"
        yield f"copied: {', '.join(file.name for file in self.copied())}"
        yield f"written anew: {QUANT_FILE}" + (f", {INDEX}" if (self.source / INDEX).exists() else "")

    def identity(self) -> dict[str, Any]:
        """What must be the same for a later run to go on with what this one wrote."""
        files = [*weight_files(self.plan), *copied_files(self.source)]
        return {"quantization": 1, "calibrated": self.calibrated, "source": state_of(files, self.source)}


def write_quantized(quantization: Quantization, calibrate: Callable[[], Amax] | None = None, *, quiet: bool = False) -> None:
    """Write the destination, going on with the files that an interrupted run of the same quantisation has finished.

    `calibrate` measures the largest inputs, where they are wanted. Host memory holds one expert and what is worked on, whatever
    the model. Raises CheckpointError for a destination or a source that is refused, CapacityError where the disk is too small.
    """
    place = quantization.place
    if (place.path / JOURNAL).is_file():  # all that was left to do
        (place.path / JOURNAL).unlink()
        return
    place.check()
    place.check_space(quantization.nbytes())
    place.partial.mkdir(parents=True, exist_ok=True)
    identity = quantization.identity()
    with Journal(place.partial / JOURNAL, identity) as journal:
        amax = _calibration(journal, calibrate) if calibrate else {}
        done = {entry["file"]: entry["bytes"] for entry in journal.entries if "file" in entry}
        layouts, tensors = quantization.layouts(), quantization.plan.checkpoint.tensors
        todo = [file for file in layouts if file.name not in done or _size(place.partial / file.name) != done[file.name]]
        total = sum(info.nbytes for info in tensors.values() if info.file in todo)
        with Progress(total, label=f"quantising to {place.path}", quiet=quiet) as progress:
            for file in todo:
                _write_file(quantization, file, layouts[file], amax, progress)
                journal.add({"file": file.name, "bytes": _size(place.partial / file.name)})
        if quantization.identity() != identity:
            raise CheckpointError(f"{quantization.source}: its files changed while they were read; remove {place.partial}")
        _write_descriptions(quantization, layouts)
    place.finish()


def _calibration(journal: Journal, calibrate: Callable[[], Amax]) -> Amax:
    for entry in journal.entries:
        if "input_amax" in entry:
            return entry["input_amax"]
    amax = dict(calibrate())
    journal.add({"input_amax": amax})
    return amax


def _write_file(q: Quantization, file: Path, layout: Layout, amax: Amax, progress: Progress) -> None:
    header = file_header(layout)
    starts, end = {}, len(header)
    for name, entry in layout.items():
        starts[name], end = end, end + tensor_bytes(*entry)
    with open(q.place.partial / file.name, "wb") as stream:
        stream.write(header)
        stream.flush()
        os.truncate(stream.fileno(), end)

        def put(name: str, offset: int, data: np.ndarray) -> None:
            view = memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
            while view:
                written = os.pwrite(stream.fileno(), view, starts[name] + offset)
                view, offset = view[written:], offset + written

        for info in (q.plan.checkpoint.tensors[name] for name in _sources(q, file)):
            if info.name in q.stacks:
                _quantize_stack(info, amax.get(info.name), put, progress)
            else:
                _copy(info, put, progress)
        os.fsync(stream.fileno())


def _sources(q: Quantization, file: Path) -> list[str]:
    """The tensors of a file of the source, in its order, so that it is read from begin to end."""
    found = [info for info in q.plan.checkpoint.tensors.values() if info.file == file]
    return [info.name for info in sorted(found, key=lambda info: info.start)]


Put = Callable[[str, int, np.ndarray], None]  # of a tensor, from this byte on, this data


def _copy(info: TensorInfo, put: Put, progress: Progress) -> None:
    for start in range(0, info.nbytes, _COPY_BYTES):
        buffer = np.empty(min(_COPY_BYTES, info.nbytes - start), np.uint8)
        read_into(info, start, buffer)
        put(info.name, start, buffer)
        progress.advance(len(buffer))


def _quantize_stack(info: TensorInfo, amax: float | None, put: Put, progress: Progress) -> None:
    """Pack an expert stack, one expert after the other."""
    experts, rows, columns = info.shape
    each, scale2, errors = info.nbytes // experts, np.empty(experts, np.float32), np.empty(experts)
    for expert in range(experts):
        buffer = np.empty(each, np.uint8)
        read_into(info, expert * each, buffer)
        try:
            found = quantize(buffer.view(DTYPES[info.dtype]).reshape(rows, columns))
        except InputError as error:
            raise CheckpointError(f"{info.file}: {info.name}: expert {expert}: {error}") from None
        put(info.name, expert * found.values.nbytes, found.values)
        put(info.name + ".scale", expert * found.scale.nbytes, found.scale)
        scale2[expert], errors[expert] = found.scale2, found.error
        progress.advance(each)
    put(info.name + ".scale2", 0, scale2)
    put(info.name + ".original_shape", 0, np.array(info.shape, np.int64))
    if amax is not None:
        put(info.name + ".input_amax", 0, np.array([amax], ml_dtypes.bfloat16))
    logger.info("%s: relative error %.4f, of the worst expert %.4f", info.name, math.sqrt(np.mean(errors**2)), errors.max())


def _write_descriptions(q: Quantization, layouts: Mapping[Path, Layout]) -> None:
    """What says what the files hold, and what goes along."""
    partial = q.place.partial
    for file in q.copied():
        shutil.copyfile(file, partial / file.name)
    write_json(partial / QUANT_FILE, quant_config(q.config))
    if (index := q.source / INDEX).exists():
        write_json(partial / INDEX, _index(index, q.stacks.keys(), layouts))
    WeightPlan.build(q.config, Checkpoint.open(partial), input_scales=q.calibrated, draft=True)  # that loading will take it
    for file in partial.iterdir():
        flush(file)


def _index(file: Path, stacks: Any, layouts: Mapping[Path, Layout]) -> dict[str, Any]:
    """The source's index with the tensors that stand for a stack in its place, and what they take."""
    if regular_file_size(file) > MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: more than the {MAX_JSON_BYTES} bytes allowed")
    index = parse_json(file.read_bytes(), str(file))
    entries = {name: (path.name, entry) for path, layout in layouts.items() for name, entry in layout.items()}
    listed = {name for name in entries if name in index["weight_map"] or _owner(name) in stacks}
    metadata = index.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    total = sum(tensor_bytes(*entries[name][1]) for name in listed)
    return index | {
        "metadata": metadata | {"total_size": total},
        "weight_map": {name: entries[name][0] for name in sorted(listed)},
    }


def _owner(name: str) -> str:
    """The stack that a tensor belongs to, if it belongs to one."""
    return name.rpartition("_weight")[0] + "_weight"


def _data_bytes(layout: Layout) -> int:
    return sum(tensor_bytes(*entry) for entry in layout.values())


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None
