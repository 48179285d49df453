"""`bench load`: from files to the first token, as published and as converted, beside the disk's own speed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from inkling_jax.benchmarks.disk import ReadSpeed, bytes_from_disk, forget, read_speed
from inkling_jax.benchmarks.rows import Row, make_row, save_rows
from inkling_jax.benchmarks.table import print_table
from inkling_jax.compiling import compile_seconds
from inkling_jax.config import ModelConfig, preset
from inkling_jax.convert.conversion import Conversion
from inkling_jax.convert.converted import open_weights
from inkling_jax.convert.converter import convert
from inkling_jax.convert.header import DTYPES
from inkling_jax.convert.progress import size_text
from inkling_jax.convert.published import published_tensors
from inkling_jax.convert.write import write_checkpoint
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.errors import CapacityError
from inkling_jax.expert_storage import choose_kernels
from inkling_jax.loading import load_model
from inkling_jax.memory import parse_bytes

LAYERS = 6  # of every kind there is: dense and sparse, local and global
FEWEST_EXPERTS = 8
CONTEXT = 1024

logger = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, load it in each form with a cold and a warm page cache, keep the rows, and print them."""
    start = time.monotonic()
    config, size = shape_of(preset(args.preset), parse_bytes(args.size))
    name = f"{args.preset} layers={config.text.num_layers} experts={config.text.num_experts}"
    rows: list[Row] = []
    with _folder(args.directory, 2 * size) as folder:
        published, converted = folder / "published", folder / "converted"
        write_checkpoint(published, config, nvfp4=True, shards=8, quiet=args.quiet)
        for form, directory in (("direct", published), ("converted", converted)):
            made: dict[str, Any] = {}
            if form == "converted":
                begun = time.monotonic()
                convert(Conversion.of(published, converted, None), quiet=args.quiet)
                made = {"convert_s": round(time.monotonic() - begun, 2)}
            files = _weight_files(directory)
            forget(files)
            disk = read_speed(files, cached=False)
            logger.info("%s: the disk gives %.2f GB/s (%s)", form, disk.bytes_per_second / 1e9, disk.method)
            for state in ("cold", "warm"):
                if time.monotonic() - start > args.time_limit:
                    logger.warning("%s %s is left out: %d s have passed", form, state, args.time_limit)
                    continue
                ceiling = disk if state == "cold" else read_speed(files, cached=True)
                rows.append(measure(f"{name} {form} {state}", directory, args.kernels, ceiling, **made))
                save_rows(Path(args.output), rows[-1:])
    print_table(
        rows, {"gbs": "GB/s", "ceiling_gbs": "disk GB/s", "first_token_s": "first token s", "compile_s": "of it compiling"}
    )
    return 0


def measure(case: str, directory: Path, kernels: str, ceiling: ReadSpeed, **fields: Any) -> Row:
    """Load a checkpoint and make a token; the row. The page cache stays warm."""
    config, device, before = ModelConfig.from_directory(directory), jax.devices()[0], bytes_from_disk()
    size = open_weights(config, directory).total_bytes
    begun = time.monotonic()
    loaded = load_model(directory, kernels=kernels, max_context=CONTEXT, slots=1, quiet=True)
    load_s = time.monotonic() - begun
    read, engine = bytes_from_disk(), loaded.engine
    with compile_seconds() as compiled:
        begun = time.monotonic()
        engine.add(Request(tuple(range(1, 17)), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)))
        tokens = [token for output in engine.run() for token in output.token_ids]
        first_token_s = time.monotonic() - begun
    engine.close()
    assert len(tokens) == 1, "one was asked for"
    logger.info("%s: %s in %.2f s, the first token %.2f s later", case, size_text(size), load_s, first_token_s)
    chosen = choose_kernels(kernels, config.text, engine.programs.dtype, device.device_kind, {}, engine.shape.page_size)
    return make_row(
        "load",
        case,
        "prefill",
        device,
        kernels="sm90" if chosen else "reference",
        time_us=load_s * 1e6,
        bound_us=size / ceiling.bytes_per_second * 1e6,
        bytes=size,
        gbs=round(size / load_s / 1e9, 3),
        disk_bytes=None if read is None or before is None else read - before,
        first_token_s=round(first_token_s, 3),
        compile_s=round(sum(compiled), 3),
        **ceiling.fields(),
        **fields,
    )


def shape_of(config: ModelConfig, size: int) -> tuple[ModelConfig, int]:
    """The first layers of a model without towers, with as many experts as `size` bytes of NVFP4 files hold; and their bytes."""
    text = config.text
    layers = min(LAYERS, text.num_layers)
    cut = dataclasses.replace(
        text, num_layers=layers, local_layers=text.local_layers[:layers], dense_layers=text.dense_layers[:layers]
    )

    def sized(experts: int) -> tuple[ModelConfig, int]:
        made = dataclasses.replace(
            config, text=dataclasses.replace(cut, num_experts=experts), vision=None, audio=None, mtp=None, quant_algo="NVFP4"
        )
        tensors = published_tensors(made, True).values()
        return made, sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in tensors)

    choices = range(text.num_experts, FEWEST_EXPERTS, -FEWEST_EXPERTS)
    return next((found for found in map(sized, choices) if found[1] <= size), sized(min(FEWEST_EXPERTS, text.num_experts)))


@contextlib.contextmanager
def _folder(parent: str | None, size: int) -> Iterator[Path]:
    """A new folder with room for `size` bytes, which is removed afterwards. Raises CapacityError."""
    with tempfile.TemporaryDirectory(prefix="bench-load-", dir=parent) as folder:
        free = shutil.disk_usage(folder).free
        if free < size:
            raise CapacityError(f"{folder}: two checkpoints take {size} bytes, the disk has {free}: give --size or --directory")
        yield Path(folder)


def _weight_files(directory: Path) -> list[Path]:
    """The large files of a checkpoint in either form."""
    return sorted((f for f in directory.rglob("*") if f.is_file() and f.suffix != ".json"), key=lambda f: -f.stat().st_size)
