"""Write a converted checkpoint: in pieces, each on the disk before it is noted as done, and in its place only when all are."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from inkling_jax.convert.conversion import Conversion
from inkling_jax.convert.converted import RECORD, VERSION, WEIGHTS
from inkling_jax.convert.destination import JOURNAL, flush
from inkling_jax.convert.journal import Journal
from inkling_jax.convert.orbax_store import STATE, ArrayWriter, write_tree
from inkling_jax.convert.progress import Progress
from inkling_jax.convert.provenance import copied_files, sha256, versions, weight_files
from inkling_jax.convert.slices import extents
from inkling_jax.convert.view import Box
from inkling_jax.errors import CheckpointError

THREADS = 4  # that read and write; each holds a file's worth of numbers, and their encoding


def convert(conversion: Conversion, *, quiet: bool = False) -> None:
    """Write the destination, going on with what an interrupted run of the same conversion has finished.

    Until it is whole it lies beside its place, under the name with ".partial". Host memory is bounded, whatever the model.
    Raises CheckpointError for a destination or a source that is refused, CapacityError where the disk is too small.
    """
    conversion.check_destination()
    conversion.check_space()
    state = conversion.partial / WEIGHTS / STATE
    state.mkdir(parents=True, exist_ok=True)
    identity = conversion.identity()
    with Journal(conversion.partial / JOURNAL, identity) as journal:
        written, hashes = _finished(journal, state)
        arrays = [path for path in conversion.plan.parameters if path not in written]
        files = [file for file in weight_files(conversion.plan) if _name(conversion, file) not in hashes]
        total = sum(map(conversion.nbytes, arrays)) + sum(file.stat().st_size for file in files)
        with Progress(total, label=f"converting to {conversion.destination}", quiet=quiet) as progress:
            written |= _write_arrays(conversion, arrays, journal, progress)
            hashes |= _hash_files(conversion, files, journal, progress)
        if conversion.identity() != identity:
            raise CheckpointError(f"{conversion.source}: its files changed while they were read; remove {conversion.partial}")
        _finish(conversion, written, hashes)


def _finished(journal: Journal, state: Path) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """Of parameters that are on the disk, the files with their sizes; of files of the source, the hashes."""
    written, hashes = {}, {}
    for entry in journal.entries:
        if "parameter" in entry and _sizes(state / entry["parameter"]) == entry["files"]:
            written[entry["parameter"]] = entry["files"]
        elif "file" in entry:
            hashes[entry["file"]] = entry["sha256"]
    return written, hashes


def _sizes(directory: Path) -> dict[str, int]:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {file.relative_to(directory).as_posix(): file.stat().st_size for file in files}


def _write_arrays(conversion: Conversion, paths: list[str], journal: Journal, progress: Progress) -> dict[str, dict[str, int]]:
    """Write parameters, some files at a time; the files of each. What is noted in the journal is on the disk."""
    state, written = conversion.partial / WEIGHTS / STATE, {}

    def tasks() -> Iterator[tuple[str, ArrayWriter, Box, bool]]:
        for path in paths:
            grid = conversion.grids[path]
            writer, boxes = ArrayWriter(state / path, grid, conversion.dtypes[path]), list(grid.files())
            for i, box in enumerate(boxes):
                yield path, writer, box, i == len(boxes) - 1

    def write(path: str, writer: ArrayWriter, box: Box) -> int:
        values = np.empty(extents(box), conversion.dtypes[path])
        conversion.plan.parameters[path].content.read(box, values)
        writer.write(box, values)
        return values.nbytes

    todo = tasks()
    with ThreadPoolExecutor(THREADS, "convert") as pool:
        ahead: deque[tuple[str, bool, Future[int]]] = deque()
        try:
            while True:
                for path, writer, box, last in itertools.islice(todo, THREADS - len(ahead)):
                    ahead.append((path, last, pool.submit(write, path, writer, box)))
                if not ahead:
                    return written
                path, last, nbytes = ahead.popleft()
                progress.advance(nbytes.result())
                if last:
                    written[path] = _sizes(state / path)
                    journal.add({"parameter": path, "files": written[path]})
        finally:
            pool.shutdown(cancel_futures=True)


def _hash_files(conversion: Conversion, files: list[Path], journal: Journal, progress: Progress) -> dict[str, str]:
    """The SHA-256 of files of the source."""
    lock, hashes = threading.Lock(), {}

    def advance(nbytes: int) -> None:
        with lock:
            progress.advance(nbytes)

    with ThreadPoolExecutor(THREADS, "hash") as pool:
        try:
            for file, found in zip(files, pool.map(lambda file: sha256(file, advance), files), strict=True):
                hashes[_name(conversion, file)] = found
                journal.add({"file": _name(conversion, file), "sha256": found})
        finally:
            pool.shutdown(cancel_futures=True)
    return hashes


def _name(conversion: Conversion, file: Path) -> str:
    return str(file.relative_to(conversion.source))


def _finish(conversion: Conversion, written: dict[str, dict[str, int]], hashes: dict[str, str]) -> None:
    """Copy what goes with the weights, describe it all, and only then put it in its place."""
    partial, copies = conversion.partial, {}
    for file in copied_files(conversion.source):
        shutil.copyfile(file, partial / file.name)
        flush(partial / file.name)
        copies[file.name] = sha256(partial / file.name)
    write_tree(partial / WEIGHTS, conversion.dtypes)
    for file in (*(partial / WEIGHTS).glob("*"), *(partial / WEIGHTS / STATE).glob("*"), partial / WEIGHTS / STATE):
        flush(file)
    plan = conversion.plan
    record = {
        "version": VERSION,
        "source": {name: {"bytes": (conversion.source / name).stat().st_size, "sha256": hashes[name]} for name in sorted(hashes)},
        "copied": copies,
        "versions": versions(),
        "mesh": conversion.mesh,
        "left_out": sorted((*plan.deferred, *plan.unused)),
        "parameters": {path: _entry(conversion, path, written[path]) for path in plan.parameters},
    }
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    (partial / (RECORD + ".new")).write_text(text, encoding="utf-8")
    flush(partial / (RECORD + ".new"))
    (partial / (RECORD + ".new")).replace(partial / RECORD)
    conversion.place.finish()


def _entry(conversion: Conversion, path: str, files: dict[str, int]) -> dict[str, Any]:
    made = conversion.plan.parameters[path]
    return {"shape": made.shape, "dtype": conversion.dtypes[path].name, "tensors": made.tensors, "files": files}
