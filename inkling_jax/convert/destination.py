"""Where a conversion goes: a directory that is not there until it is whole, and beside it what has been written so far."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from inkling_jax.convert.progress import size_text
from inkling_jax.errors import CapacityError, CheckpointError

JOURNAL = "conversion.journal"  # of a conversion under way: what is finished, one JSON object a line


@dataclasses.dataclass(frozen=True)
class Destination:
    """An absolute path that is to become a directory."""

    path: Path

    @classmethod
    def of(cls, path: Path) -> Destination:
        """`path` made absolute: "." has no name to put ".partial" after."""
        return cls(Path(os.path.abspath(path)))

    @property
    def partial(self) -> Path:
        """Where it is written until it is finished."""
        return self.path.with_name(self.path.name + ".partial")

    def check(self) -> None:
        """Raise CheckpointError for a place that holds something else."""
        if os.path.ismount(self.path) or self.path.is_symlink():  # nothing can be renamed to that
            raise CheckpointError(f"{self.path}: is a mount or a link; give a directory that is not there yet, in it")
        for place in (self.path, self.partial):
            if os.path.lexists(place) and not place.is_dir():
                raise CheckpointError(f"{place}: exists and is not a directory; give a new one, or an empty one")
        if self.path.is_dir() and any(self.path.iterdir()):
            raise CheckpointError(f"{self.path}: is not empty; give a new directory, or an empty one")
        if self.partial.is_dir() and any(self.partial.iterdir()) and not (self.partial / JOURNAL).is_file():
            raise CheckpointError(f"{self.partial}: is no conversion under way, but where one would be written; remove it")

    def check_space(self, total: int) -> None:
        """Raise CapacityError unless the disk holds what is still to be written of `total` bytes."""
        written = sum(file.stat().st_size for file in self.partial.rglob("*") if file.is_file())
        need, free = total - written, self.free_space()
        if need > free:
            raise CapacityError(f"{self.path}: {size_text(need)} are to be written, the disk has {size_text(free)} free")

    def free_space(self) -> int:
        """Bytes that its disk has left."""
        return shutil.disk_usage(next(place for place in self.partial.parents if place.exists())).free

    def finish(self) -> None:
        """Put what was written in its place; the journal goes last, so that a kill leaves one that says what it is."""
        flush(self.partial)
        os.rename(self.partial, self.path)  # over an empty directory, if there is one
        flush(self.path.parent)
        (self.path / JOURNAL).unlink()


def flush(file: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
