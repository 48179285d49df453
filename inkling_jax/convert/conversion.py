"""What a conversion will write and where, decided from headers before anything is read or written."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from inkling_jax.config import ModelConfig
from inkling_jax.config_ranks import spread
from inkling_jax.convert.converted import RECORD, VERSION, declared_parameters
from inkling_jax.convert.destination import Destination
from inkling_jax.convert.orbax_store import Grid
from inkling_jax.convert.progress import size_text
from inkling_jax.convert.provenance import copied_files, state_of, weight_files
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.errors import CheckpointError
from inkling_jax.sharding.collectives import MODEL_AXES
from inkling_jax.sharding.rules import RULES, Axes, local_shape, ways

WAYS = 16  # devices that an axis may be split over without a chunk that two of them read, if no mesh is named
_SLACK = 1.01  # checksums, and the last block of every file


@dataclasses.dataclass(frozen=True)
class Conversion:
    """From `source`, read as `plan` says, to `destination`: each parameter with the dtype and the grid it is stored with."""

    source: Path
    destination: Path
    plan: WeightPlan
    dtypes: dict[str, np.dtype]
    grids: dict[str, Grid]
    mesh: dict[str, int] | None

    @classmethod
    def of(cls, source: Path, destination: Path, mesh: Mapping[str, int] | None = None) -> Conversion:
        """The conversion of a checkpoint directory in the published layout, its chunks those of the devices of `mesh`.

        Raises ConfigError for a mesh over which a parameter does not divide, CheckpointError for a source that is refused.
        """
        if (source / RECORD).exists():
            raise CheckpointError(f"{source}: is converted already")
        config = ModelConfig.from_directory(source)
        plan = WeightPlan.build(config, Checkpoint.open(source), draft=True)
        if mesh is not None:
            _check_mesh(config, plan, mesh)
        axes = {path: leaf.axes for path, leaf in declared_parameters(config, plan.packed, plan.towers, plan.draft).items()}
        dtypes = {path: made.dtype or made.content.stored for path, made in plan.parameters.items()}
        grids = {
            path: Grid.of(made.shape, dtypes[path].itemsize, _ways(made.shape, axes[path], mesh))
            for path, made in plan.parameters.items()
        }
        place = Destination.of(destination).path
        return cls(source, place, plan, dtypes, grids, dict(mesh) if mesh is not None else None)

    @property
    def place(self) -> Destination:
        """The destination, and what lies beside it."""
        return Destination(self.destination)

    @property
    def partial(self) -> Path:
        """Where it is written until it is finished."""
        return self.place.partial

    def nbytes(self, path: str) -> int:
        """Bytes that a parameter takes."""
        return int(np.prod(self.grids[path].shape)) * self.dtypes[path].itemsize

    def identity(self) -> dict[str, Any]:
        """What must be the same for a later run to go on with what this one wrote."""
        files = [*weight_files(self.plan), *copied_files(self.source)]
        return {"conversion": VERSION, "mesh": self.mesh, "source": state_of(files, self.source)}

    def check_destination(self) -> None:
        """Raise CheckpointError for a place that holds something else."""
        if (self.destination / RECORD).exists():
            raise CheckpointError(f"{self.destination}: holds a finished conversion; --verify compares it with the source")
        self.place.check()

    def check_space(self) -> None:
        """Raise CapacityError unless the disk holds what is still to be written."""
        total = sum(map(self.nbytes, self.dtypes)) + sum(file.stat().st_size for file in copied_files(self.source))
        self.place.check_space(int(total * _SLACK))

    def lines(self) -> Iterator[str]:
        """What would be written, for people: like parameters of all layers on one line, then the files."""
        alike: dict[tuple[str, str, str], list[str]] = {}
        for path, dtype in self.dtypes.items():
            shape = " x ".join(map(str, self.grids[path].shape)) or "one number"
            alike.setdefault((re.sub(r"^(layers|draft)\.\d+\.", r"\1.*.", path), dtype.name, shape), []).append(path)
        for (pattern, dtype, shape), paths in alike.items():
            nbytes = sum(self.nbytes(path) for path in paths)
            yield f"{pattern}: {f'{len(paths)} of ' if len(paths) > 1 else ''}{shape}, {dtype}, {size_text(nbytes)}"
        total = sum(map(self.nbytes, self.dtypes))
        files = sum(1 for grid in self.grids.values() for _ in grid.files())
        yield f"{len(self.dtypes)} parameters, {size_text(total)} in {files} files; {size_text(self.place.free_space())} free"
        yield f"copied: {', '.join(file.name for file in copied_files(self.source))}"
        left_out = len(self.plan.deferred) + len(self.plan.unused)
        if left_out:
            yield f"left out: {left_out} tensors that the model does not use"


def _ways(shape: tuple[int, ...], axes: Axes, mesh: Mapping[str, int] | None) -> tuple[int, ...]:
    """Over how many devices each axis of a parameter may be split, where those that share a head read the same."""
    if mesh is None:
        return tuple(WAYS if axis and RULES[axis] else 1 for axis in axes)
    return tuple(math.gcd(size, ways(axis, mesh)) for size, axis in zip(shape, axes, strict=True))


def _check_mesh(config: ModelConfig, plan: WeightPlan, mesh: Mapping[str, int]) -> None:
    """Raise ConfigError for a mesh over which a parameter does not divide."""
    over = spread(config, math.prod(mesh.get(axis, 1) for axis in MODEL_AXES))
    for path, leaf in declared_parameters(over, plan.packed, plan.towers, plan.draft).items():
        local_shape(path, leaf.get_value().shape, leaf.axes, mesh)
