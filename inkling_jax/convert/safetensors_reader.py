"""A checkpoint directory opened for reading: names, shapes and places of all tensors from headers alone, bytes on demand."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import UInt8

from inkling_jax.convert.foreign import refuse_foreign_directory, refuse_foreign_names
from inkling_jax.convert.header import (
    DTYPES,
    MAX_JSON_BYTES,
    TensorInfo,
    parse_json,
    read_header,
    regular_file_size,
    show,
)
from inkling_jax.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DRAFT_HEAD = "mtp.safetensors"
_READ_BYTES = 1 << 30  # the kernel reads at most 2 GiB a call


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """All tensors of a checkpoint directory; `unlisted` are its .safetensors files that the index does not name."""

    directory: Path
    tensors: dict[str, TensorInfo]
    unlisted: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the headers of a directory with model.safetensors.index.json or a single model.safetensors.

        mtp.safetensors is read too when it is there, listed or not. No weights are read. Raises CheckpointError for a missing
        directory, a foreign layout, a missing or truncated shard, an index and shards that disagree, or a hostile header.
        """
        directory = Path(path)
        if not directory.is_dir():
            kind = "is a file" if directory.exists() else "does not exist"
            layout = "; GGUF layout is not supported" if directory.suffix == ".gguf" else ""
            raise CheckpointError(f"{directory}: {kind}; expected a checkpoint directory{layout}")
        if (directory / "adapter_config.json").exists():
            raise CheckpointError(f"{directory}: LoRA adapter layout is not supported: found adapter_config.json")
        listed: dict[str, set[str] | None] = {SINGLE: None}
        if (directory / INDEX).exists():
            listed = _read_index(directory)
        elif not (directory / SINGLE).exists():
            refuse_foreign_directory(directory)
        if (directory / DRAFT_HEAD).exists():
            listed.setdefault(DRAFT_HEAD, None)
        tensors = _merge(directory, listed)
        refuse_foreign_names(tensors, directory)
        unlisted = sorted(file.name for file in directory.glob("*.safetensors") if file.name not in listed)
        return cls(directory, tensors, tuple(unlisted))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def info(self, name: str) -> TensorInfo:
        """Where `name` lies; CheckpointError when there is no such tensor."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory}: no tensor {show(name)}")
        return self.tensors[name]

    def read(self, name: str) -> np.ndarray:
        """The whole tensor in a buffer of its own (not a map of the file, so memory held is what is returned)."""
        info = self.info(name)
        buffer = np.empty(info.nbytes, np.uint8)
        read_into(info, 0, buffer)
        return buffer.view(DTYPES[info.dtype]).reshape(info.shape)


def _read_index(directory: Path) -> dict[str, set[str] | None]:
    """Shard file name -> the tensors that the index places there."""
    file = directory / INDEX
    size = regular_file_size(file)
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: {size} bytes, more than the {MAX_JSON_BYTES} allowed")
    weight_map: Any = parse_json(file.read_bytes(), str(file)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: 'weight_map' is missing or empty; expected tensor names with their shard")
    refuse_foreign_names(weight_map, file)  # before any shard is opened
    listed: dict[str, set[str] | None] = {}
    for name, shard in weight_map.items():
        where = f"{file}: tensor {show(name)} is placed in {show(shard)}"
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or "\0" in shard:
            raise CheckpointError(f"{where}; expected the name of a .safetensors file")
        # Lexical on purpose: a shard may be a symlink out of the directory (hub caches are), the index may not point there.
        if PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
            raise CheckpointError(f"{where}, outside the checkpoint directory")
        names = listed.setdefault(shard, set())
        assert names is not None
        names.add(name)
    return listed


def _merge(directory: Path, listed: dict[str, set[str] | None]) -> dict[str, TensorInfo]:
    """Tensors of all shards; each must hold what the index says (None: no say), and no tensor may lie in two."""
    tensors: dict[str, TensorInfo] = {}
    for shard, names in sorted(listed.items()):
        file = directory / shard
        if not os.path.exists(file):  # False, not an exception, for names no file can have
            raise CheckpointError(f"{file}: this shard is missing; {INDEX} places {len(names or ())} tensors in it")
        found = read_header(file)
        absent = sorted((names or set()) - found.keys())
        if absent:
            count = f"{len(absent)} tensor{'s' if len(absent) > 1 else ''}"
            raise CheckpointError(f"{file}: lacks {count} that {INDEX} places here: {show(absent[0])}")
        for name, info in found.items():
            if name in tensors:
                raise CheckpointError(f"tensor {show(name)} lies in two files: {tensors[name].file} and {file}")
            tensors[name] = info
    return tensors


def read_into(info: TensorInfo, start: int, buffer: UInt8[np.ndarray, " n"]) -> None:
    """Fill `buffer` with the tensor's bytes from `start` on; CheckpointError where the file no longer has them."""
    view, done = memoryview(buffer), 0
    try:
        descriptor = os.open(info.file, os.O_RDONLY)
        try:
            while done < len(buffer):
                count = os.preadv(descriptor, [view[done : done + _READ_BYTES]], info.start + start + done)
                if count == 0:
                    raise CheckpointError(f"{info.file}: truncated since it was opened, inside tensor {show(info.name)}")
                done += count
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read: {error}") from None
