"""The ledger of a load: what each parameter is made of, and for every tensor of the checkpoint what becomes of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Protocol

import numpy as np

from inkling_jax.convert.assemble import Assembly, Check, check_ones
from inkling_jax.convert.header import TensorInfo, show
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.view import Box, View
from inkling_jax.errors import CheckpointError

FLOATS = ("BF16", "F16", "F32")
_UNUSED = re.compile(r"\.mlp\.experts\.w(13|2)_weight\.(input_amax|original_shape)$")
_EXTRA_SCALE = re.compile(r"^model\.llm\.layers\.\d+\.mlp\.[a-z0-9_.]*scale$")
_EXTRA_SCALE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A tensor that the model needs: the shapes and dtypes it may have; `leading` says what its first axis counts."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = FLOATS
    leading: str = ""


class Content(Protocol):
    """What a parameter of shape `shape` can be read from, part by part."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stored(self) -> np.dtype:
        """What is read without a cast."""
        ...

    @property
    def order(self) -> tuple[int, ...]:
        """The axes from the one that jumps furthest in the file to the one that runs along it."""
        ...

    @property
    def grain(self) -> tuple[int, ...]:
        """The size of the pieces that can only be read whole."""
        ...

    def read(self, box: Box, out: np.ndarray) -> None:
        """Fill `out` with the part `box`, cast to its dtype. Raises CheckpointError for content that is refused."""
        ...


@dataclasses.dataclass(frozen=True)
class Source:
    """How one parameter is made: the tensors it reads (`nbytes` of them), its dtype (None: the model's), and their content."""

    tensors: tuple[str, ...]
    nbytes: int
    dtype: np.dtype | None
    content: Content

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        return self.content.shape


class Ledger:
    """Collects the sources of all parameters, checking each tensor against its header as it is claimed."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.parameters: dict[str, Source] = {}
        self._missing: list[str] = []
        self._used: set[str] = set()

    def add(
        self,
        path: str,
        shape: tuple[int, ...],
        form: Callable[[TensorInfo], View],
        *wanted: Wanted,
        axis: int = 0,
        dtype: np.dtype | None = None,
        check: Check | None = None,
    ) -> None:
        """Record the parameter at `path`: these tensors, each seen as `form` says, side by side along `axis`, then zeros.

        Raises CheckpointError for a wrong shape or dtype.
        """
        infos = [self._claim(tensor) for tensor in wanted]
        found = [info for info in infos if info is not None]
        if len(found) < len(infos):
            return  # `settle` will say so
        content = Assembly(shape, tuple(form(info) for info in found), axis, check)
        nbytes = sum(info.nbytes for info in found)
        self.parameters[path] = Source(tuple(tensor.name for tensor in wanted), nbytes, dtype, content)

    def _claim(self, wanted: Wanted) -> TensorInfo | None:
        self._used.add(wanted.name)
        info = self.checkpoint.tensors.get(wanted.name)
        if info is None:
            self._missing.append(wanted.name)
            return None
        if info.shape not in wanted.shapes:
            why = ""
            if wanted.leading and info.shape and info.shape[0] != wanted.shapes[0][0]:
                why = f"; its first axis contradicts config.json: {wanted.leading}"
            expected = " or ".join(str(shape) for shape in wanted.shapes)
            raise CheckpointError(f"{place(info)}: expected shape {expected}, found {info.shape}{why}")
        if info.dtype not in wanted.dtypes:
            raise CheckpointError(f"{place(info)}: expected dtype {' or '.join(wanted.dtypes)}, found {info.dtype}")
        return info

    def settle(self, deferred: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names deferred, which begin with one of `deferred`, and names known to be unused.

        CheckpointError for missing tensors, then for what is left over.
        """
        directory = self.checkpoint.directory
        if self._missing:
            unlisted = self.checkpoint.unlisted
            hint = f"; files here that the index does not name: {', '.join(unlisted)}" if unlisted else ""
            raise CheckpointError(f"{directory}: missing {_some(self._missing)}{hint}")
        rest = sorted(self.checkpoint.tensors.keys() - self._used)
        waiting = tuple(name for name in rest if name.startswith(deferred))
        others = [name for name in rest if not name.startswith(deferred)]
        unused = tuple(name for name in others if self._is_unused(name))
        unexpected = sorted(set(others) - set(unused))
        if unexpected:
            raise CheckpointError(f"{directory}: the model has no place for {_some(unexpected)}")
        return waiting, unused

    def _is_unused(self, name: str) -> bool:
        """Calibration of 4-bit activations, where they are not simulated, or a scale that was checked to be all ones."""
        if _UNUSED.search(name):
            return True
        if _EXTRA_SCALE.search(name) and self.checkpoint.tensors[name].nbytes <= _EXTRA_SCALE_BYTES:
            check_ones(self.checkpoint, name)
            return True
        return False


def place(info: TensorInfo) -> str:
    """File and name of a tensor, to begin an error with."""
    return f"{info.file}: tensor {show(info.name)}"


def _some(names: list[str]) -> str:
    """The first few names and how many there are."""
    listed = ", ".join(show(name) for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {listed}{more}"
