"""The header of one safetensors file: parsed by hand and trusted in nothing.

A file is an 8-byte little-endian length, that many bytes of JSON (tensor name -> dtype, shape, byte range), then the data,
which the ranges must cover exactly. We parse it ourselves because the library hands out no F8_E4M3 through numpy.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from inkling_jax.errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I64": np.dtype(np.int64),
}
MAX_JSON_BYTES = 100_000_000  # of a header or an index: ours have a few thousand names, a hostile length would ask for all memory
_MAX_RANK = 16
_PREFIX = 8


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `start` is the absolute byte offset in `file`, `dtype` the format's own spelling ("BF16", "U8")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


def show(name: object) -> str:
    """A name from a file, safe to print: quoted, escaped and at most 200 characters."""
    text = repr(name)
    return text if len(text) <= 200 else text[:197] + "..."


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`; CheckpointError naming `where` when it is not JSON, not an object, or repeats a key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{where}: the name {show(key)} appears twice")
            found[key] = value
        return found

    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise CheckpointError(f"{where}: not JSON that can be read: nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: not JSON: {str(error)[:200]}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(parsed).__name__}")
    return parsed


def regular_file_size(file: Path) -> int:
    """Bytes of a regular file (symlinks are followed); CheckpointError when it is missing or something else."""
    try:
        status = os.stat(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be opened: {error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: not a regular file")
    return status.st_size


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Every tensor of one safetensors file, from its header alone.

    Raises CheckpointError, naming the file and the tensor, for a header that is too long or not JSON, for unknown dtypes,
    negative shapes, ranges that do not match dtype x shape, overlap, leave holes or lie outside, and for a file that is
    truncated or too long.
    """
    size = regular_file_size(file)
    try:
        with open(file, "rb") as stream:
            prefix = stream.read(_PREFIX)
            if len(prefix) < _PREFIX:
                raise CheckpointError(f"{file}: truncated: {size} bytes, a safetensors file has at least {_PREFIX}")
            length = int.from_bytes(prefix, "little")
            if length > MAX_JSON_BYTES:
                raise CheckpointError(f"{file}: its header claims {length} bytes, more than the {MAX_JSON_BYTES} allowed")
            if _PREFIX + length > size:
                raise CheckpointError(f"{file}: truncated: its header needs {_PREFIX + length} bytes, the file has {size}")
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    entries = parse_json(text, f"{file}: header")
    entries.pop("__metadata__", None)
    base = _PREFIX + length
    tensors = {name: _tensor(file, name, entry, base) for name, entry in entries.items()}
    _check_cover(file, tensors, base, size)
    return tensors


def _tensor(file: Path, name: str, entry: Any, base: int) -> TensorInfo:
    where = f"{file}: tensor {show(name)}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: expected an object with dtype, shape and data_offsets, found {show(entry)}")
    dtype, shape, offsets = entry.get("dtype"), _sizes(entry, "shape"), _sizes(entry, "data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {show(dtype)}; known: {', '.join(DTYPES)}")
    if shape is None or len(shape) > _MAX_RANK:
        found = show(entry.get("shape"))
        raise CheckpointError(f"{where}: bad shape {found}; expected at most {_MAX_RANK} integers, none negative")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        found = show(entry.get("data_offsets"))
        raise CheckpointError(f"{where}: bad data_offsets {found}; expected [begin, end] with 0 <= begin <= end")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{where}: data_offsets span {offsets[1] - offsets[0]} bytes, {dtype} of shape {shape} takes {nbytes}"
        )
    return TensorInfo(name, dtype, shape, file, base + offsets[0], nbytes)


def _sizes(entry: dict[str, Any], key: str) -> tuple[int, ...] | None:
    value = entry.get(key)
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value):
        return tuple(value)
    return None


def _check_cover(file: Path, tensors: dict[str, TensorInfo], base: int, size: int) -> None:
    """The ranges, in order, must cover the data exactly: that rules out overlap, holes, truncation and trailing bytes."""
    end, before = base, None
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.nbytes)):
        if info.start != end:
            fault = "overlaps" if info.start < end else "leaves a hole after"
            other = f"tensor {show(before)}" if before is not None else "the header"
            raise CheckpointError(f"{file}: tensor {show(info.name)} {fault} {other}")
        end, before = info.start + info.nbytes, info.name
    if size < end:
        raise CheckpointError(f"{file}: truncated: expected {end} bytes, the file has {size}; download it again")
    if size > end:
        raise CheckpointError(f"{file}: {size - end} bytes too many: expected {end}, the file has {size}")
