"""A converted checkpoint: its record, which is written last, and the plan of reading it.

DIRECTORY/conversion.json     what it was made of and what it holds: without it a conversion is not finished
DIRECTORY/weights/            an Orbax checkpoint, one array a parameter (orbax_store.py)
DIRECTORY/config.json, ...    configuration, tokenizer and templates, as the source had them
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from inkling_jax.config import ModelConfig
from inkling_jax.convert.accounting import Source
from inkling_jax.convert.destination import JOURNAL
from inkling_jax.convert.header import DTYPES, MAX_JSON_BYTES, TensorInfo, parse_json, regular_file_size, show
from inkling_jax.convert.orbax_store import STATE, StoredArray
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.weight_map import TOWERS, WeightPlan
from inkling_jax.errors import CheckpointError
from inkling_jax.layers.mtp import DraftHead
from inkling_jax.model import Inkling, flat_parameters
from inkling_jax.towers import Towers

RECORD = "conversion.json"
WEIGHTS = "weights"
VERSION = 1
_BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}
_PACKED = re.compile(r"layers\.(\d{1,9})\.mlp\.experts\.(w13|w2)\.values")
_PARTIAL = "; the same conversion, run again, goes on with it"


def open_weights(config: ModelConfig, directory: Path, *, input_scales: bool = False, draft: bool = False) -> WeightPlan:
    """How to read the weights in `directory`, published or converted. CheckpointError for what is neither, or not whole.

    `input_scales`: of packed experts as well, which a conversion leaves out. `draft`: of the draft head, where there is one.
    """
    if (directory / RECORD).exists():
        if input_scales:
            raise CheckpointError(f"{directory}: a conversion has no input_amax, calibrated inputs: load what it was made of")
        return _plan(config, directory, draft)
    if (directory / JOURNAL).exists():
        raise CheckpointError(f"{directory}: a conversion that is not finished{_PARTIAL}")
    if (directory / WEIGHTS / STATE).is_dir():
        raise CheckpointError(f"{directory}: its {RECORD} is missing, so its {WEIGHTS}/ cannot be trusted; convert again")
    return WeightPlan.build(config, Checkpoint.open(directory), input_scales=input_scales, draft=draft)


def read_record(directory: Path) -> dict[str, Any]:
    """The record of a finished conversion; CheckpointError where it is damaged or of another version."""
    file = directory / RECORD
    if regular_file_size(file) > MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: more than the {MAX_JSON_BYTES} bytes allowed")
    record = parse_json(file.read_bytes(), str(file))
    if record.get("version") != VERSION:
        raise CheckpointError(f"{file}: version {show(record.get('version'))}, this release reads {VERSION}; convert again")
    return record


def _plan(config: ModelConfig, directory: Path, draft: bool) -> WeightPlan:
    record = read_record(directory)
    where = f"{directory / RECORD}"
    held = record.get("parameters")
    if not isinstance(held, dict):
        raise CheckpointError(f"{where}: 'parameters' is missing; expected an object")
    packed = frozenset((int(found[1]), found[2]) for path in held if (found := _PACKED.fullmatch(path)))
    towers = frozenset(name for name in TOWERS if any(path.startswith(name + ".") for path in held))
    drafted = any(path.startswith("draft") for path in held)
    declared = {
        path: (value.shape, None if value.dtype == jnp.bfloat16 else np.dtype(value.dtype))
        for path, leaf in declared_parameters(config, packed, towers, drafted).items()
        for value in (leaf.get_value(),)
    }
    for fault, paths in (("lacks", declared.keys() - held.keys()), ("has no place for", held.keys() - declared.keys())):
        if paths:
            raise CheckpointError(f"{where}: the model of config.json {fault} {len(paths)} of its parameters: {show(min(paths))}")
    _check_copies(record, directory)
    sources = {path: _source(directory, path, held[path], *declared[path]) for path in held}
    tensors = {path: _tensor(directory, path, source) for path, source in sources.items()}
    read = {path: source for path, source in sources.items() if draft or not path.startswith("draft")}
    waiting = tuple(sources.keys() - read.keys())
    return WeightPlan(Checkpoint(directory, tensors), read, packed, towers, waiting, (), drafted and draft)


def _check_copies(record: dict[str, Any], directory: Path) -> None:
    """Raise CheckpointError for a missing file that went along with the weights: without its template a model chats otherwise.

    That they are still what they were is not asked: they are there to be edited, as those of a source are.
    """
    copied = record.get("copied")
    for name in copied if isinstance(copied, dict) else ():
        if name.endswith((".json", ".jinja")) and not (directory / name).is_file():
            raise CheckpointError(f"{directory / name}: is missing; the source had it, copy it from there")


def declared_parameters(
    config: ModelConfig, packed: frozenset[tuple[int, str]], towers: frozenset[str], draft: bool
) -> dict[str, nnx.Param]:
    """The parameters that a conversion may hold, by path, as bfloat16 models declare them."""
    dtype = jnp.dtype("bfloat16")
    head = DraftHead.of(config, dtype) if draft else None
    modules = (Inkling(config.text, packed, dtype), Towers.of(config, towers, dtype), *([head] if head else []))
    return {path: leaf for module in modules for path, leaf in flat_parameters(module).items()}


def _source(directory: Path, path: str, entry: Any, shape: tuple[int, ...], dtype: np.dtype | None) -> Source:
    where = f"{directory / RECORD}: parameter {show(path)}"
    stored = _BY_NAME.get(str(entry.get("dtype"))) if isinstance(entry, dict) else None
    files = entry.get("files") if isinstance(entry, dict) else None
    if stored is None or not isinstance(files, dict) or not isinstance(entry.get("shape"), list):
        raise CheckpointError(f"{where}: expected an object with shape, dtype and files")
    if tuple(entry["shape"]) != shape:
        raise CheckpointError(f"{where}: shape {show(entry['shape'])}, config.json makes it {shape}")
    if stored != dtype if dtype is not None else stored not in (_BY_NAME["bfloat16"], _BY_NAME["float16"], _BY_NAME["float32"]):
        raise CheckpointError(f"{where}: dtype {stored}, expected {dtype or 'a float'}")
    place = directory / WEIGHTS / STATE / path
    for name, size in files.items():
        file = place / name
        try:
            found = os.stat(file).st_size
        except (OSError, ValueError) as error:  # the latter for a name that no file can have
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(f"{file}: is missing ({reason}); convert again") from None
        if found != size:
            raise CheckpointError(f"{file}: {found} bytes, expected {size}: truncated or damaged; convert again")
    content = StoredArray(place, shape, stored)
    return Source((path,), int(np.prod(shape)) * stored.itemsize, dtype, content)


def _tensor(directory: Path, path: str, source: Source) -> TensorInfo:
    spelling = next(name for name, dtype in DTYPES.items() if dtype == source.content.stored)
    return TensorInfo(path, spelling, source.shape, directory / RECORD, 0, source.nbytes)
