"""Write a checkpoint in the published layout: of random weights, a block at a time, or of tensors that are there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from inkling_jax.config import ModelConfig
from inkling_jax.config_quant import NVFP4_BLOCK, QUANT_FILE
from inkling_jax.convert.header import DTYPES
from inkling_jax.convert.progress import Progress
from inkling_jax.convert.published import Layout, is_first_sparse, published_tensors
from inkling_jax.convert.random_tensors import original_shape, random_blocks
from inkling_jax.convert.safetensors_reader import DRAFT_HEAD, INDEX
from inkling_jax.errors import InputError


def write_checkpoint(
    directory: str | Path,
    config: ModelConfig,
    *,
    seed: int = 0,
    nvfp4: bool = False,
    shards: int = 3,
    quiet: bool = True,
) -> int:
    """Write config.json, index, `shards` shards and mtp.safetensors with random weights of a sound size; returns data bytes.

    A tensor depends on `seed`, its name, dtype and shape alone. Memory stays bounded, whatever the model. Progress is reported
    unless `quiet`. No tokenizer is written. Raises InputError for a directory that already holds weights, or no shards.
    """
    layout = published_tensors(config, nvfp4)
    total = sum(tensor_bytes(*entry) for entry in layout.values())
    with Progress(total, label=f"writing {directory}", quiet=quiet) as progress:

        def write(stream: BinaryIO, name: str) -> None:
            _write_tensor(stream, config, layout, seed, name, progress)

        _write_files(Path(directory), config, layout, shards, write)
    if nvfp4:
        write_json(Path(directory) / QUANT_FILE, quant_config(config))
    return total


def write_tensors(directory: str | Path, config: ModelConfig, tensors: Mapping[str, np.ndarray], *, shards: int = 1) -> int:
    """Write config.json, index, `shards` shards and mtp.safetensors with these tensors, by name; returns data bytes.

    Raises InputError for a directory that already holds weights, or no shards.
    """
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    layout = {name: (spelled[tensor.dtype], tensor.shape) for name, tensor in tensors.items()}

    def write(stream: BinaryIO, name: str) -> None:
        stream.write(np.ascontiguousarray(tensors[name]).reshape(-1).view("u1").data)

    _write_files(Path(directory), config, layout, shards, write)
    return sum(tensor.nbytes for tensor in tensors.values())


def _write_files(
    directory: Path, config: ModelConfig, layout: Layout, shards: int, write: Callable[[BinaryIO, str], None]
) -> None:
    """Shards, index and config.json; `write` writes a tensor's data."""
    if shards < 1:
        raise InputError(f"shards {shards}: at least one is needed")
    if directory.is_dir() and any(directory.glob("*.safetensors")):
        raise InputError(f"{directory}: already holds .safetensors files; give an empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    files = _distribute(layout, shards)
    for file, names in files.items():
        with open(directory / file, "wb") as stream:
            stream.write(file_header({name: layout[name] for name in names}))
            for name in names:
                write(stream, name)
    weight_map = {name: file for file, names in files.items() for name in names}
    total = sum(tensor_bytes(*entry) for entry in layout.values())
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(directory / "config.json", config.to_dict())


def _distribute(layout: Layout, shards: int) -> dict[str, list[str]]:
    """File -> tensors: the draft head apart, the rest spread evenly by bytes."""
    names = [f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" for shard in range(shards)]
    files: dict[str, list[str]] = {name: [] for name in names}
    loads = [0] * shards
    for name in sorted(layout, key=lambda name: (-tensor_bytes(*layout[name]), name)):
        if name.startswith("model.mtp."):
            files.setdefault(DRAFT_HEAD, []).append(name)
            continue
        shard = loads.index(min(loads))
        files[names[shard]].append(name)
        loads[shard] += tensor_bytes(*layout[name])
    return {file: in_file_order({name: layout[name] for name in part}) for file, part in files.items()}


def in_file_order(part: Layout) -> list[str]:
    """The names of a file's tensors, wide dtypes first so that all stay aligned."""
    return sorted(part, key=lambda name: (-DTYPES[part[name][0]].itemsize, name))


def file_header(part: Layout) -> bytes:
    """What a safetensors file of these tensors, in this order, begins with."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in part.items():
        start, end = end, end + tensor_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(stream: BinaryIO, config: ModelConfig, layout: Layout, seed: int, name: str, progress: Progress) -> None:
    dtype, shape = layout[name]
    if dtype == "I64":
        _, packed = layout[name.removesuffix(".original_shape")]
        stream.write(original_shape(packed).tobytes())
        return
    for block in random_blocks(config, seed, name, dtype, shape):
        stream.write(block.view("u1").data)
        progress.advance(block.nbytes)


def quant_config(config: ModelConfig) -> dict[str, object]:
    """hf_quant_config.json (spec 1.3): what is left in BF16 is listed by module."""
    text = config.text
    exclude = ["model.llm.embed", "model.llm.unembed", "model.audio*", "model.visual*", "model.mtp*"]
    for layer in range(text.num_layers):
        prefix = f"model.llm.layers.{layer}."
        exclude.append(prefix + "attn")
        if text.dense_layers[layer]:
            exclude += [prefix + "mlp.w13_dn", prefix + "mlp.w2_md"]
            continue
        exclude += [prefix + "mlp.gate", prefix + "mlp.shared_experts"]
        if is_first_sparse(text, layer):
            exclude.append(prefix + "mlp.experts")
    quantization = {"quant_algo": "NVFP4", "group_size": NVFP4_BLOCK, "kv_cache_quant_algo": None, "exclude_modules": exclude}
    return {"quantization": quantization}


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor's data."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def write_json(file: Path, content: object) -> None:
    """A JSON file as checkpoints have them."""
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
