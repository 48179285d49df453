"""Where a conversion came from: the files of the source, what they are and hash to, and who converted them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Callable
from pathlib import Path

import inkling_jax
from inkling_jax.convert.weight_map import WeightPlan

_KEPT = (".json", ".jinja", ".txt", ".model", ".md")  # configuration, tokenizer, templates, licence
_READ_BYTES = 1 << 22


def copied_files(source: Path) -> list[Path]:
    """The files of a checkpoint directory that go with its weights as they are."""
    found = (file for file in sorted(source.iterdir()) if file.is_file() and not file.name.startswith("."))
    return [file for file in found if _is_kept(file.name)]


def _is_kept(name: str) -> bool:
    return (name.endswith(_KEPT) or name.startswith(("LICENSE", "NOTICE"))) and not name.endswith(".index.json")


def weight_files(plan: WeightPlan) -> list[Path]:
    """The files of the source that hold tensors."""
    return sorted({info.file for info in plan.checkpoint.tensors.values()})


def state_of(files: list[Path], directory: Path) -> dict[str, list[int]]:
    """Size and time of change of each file, by its name in `directory`: what differs when a file is another one."""
    found = {file: os.stat(file) for file in files}
    return {str(file.relative_to(directory)): [status.st_size, status.st_mtime_ns] for file, status in found.items()}


def sha256(file: Path, advance: Callable[[int], None] = lambda nbytes: None) -> str:
    """The hash of a file's content; `advance` hears of the bytes read."""
    found, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with open(file, "rb", buffering=0) as stream:
        while nbytes := stream.readinto(buffer):
            found.update(buffer[:nbytes])
            advance(nbytes)
    return found.hexdigest()


def versions() -> dict[str, str]:
    """Of this package and of what writes with it."""
    names = ("orbax-checkpoint", "tensorstore", "numpy", "ml_dtypes")
    ours = {"inkling_jax": inkling_jax.__version__, "python": platform.python_version()}
    return ours | {name: importlib.metadata.version(name) for name in names}
