"""Weights from files onto devices: each gets its own part of every parameter, read from the bytes that hold it.

A few threads read ahead, some blocks of parameters at a time, so host memory stays bounded, whatever the size of the model.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from inkling_jax.convert.accounting import Source
from inkling_jax.convert.progress import Progress
from inkling_jax.convert.slices import blocks, box_of, extents, joined, moved, within
from inkling_jax.convert.view import Box
from inkling_jax.convert.weight_map import WeightPlan

BLOCK_BYTES = 1 << 24  # of a parameter that are read, and are on their way to devices, at once
THREADS = 4  # that read; as many blocks lie ready or are being read
_ALIGNMENT = 64  # of host memory that the CPU's devices take over without a copy

Parts = dict[Box, np.ndarray]  # by what a device holds: a block of it


def stream_parameters(
    plan: WeightPlan, *, dtype: Any, device: Any, progress: Progress | None = None
) -> Iterator[tuple[str, jax.Array]]:
    """Every parameter of `plan` in turn, by path, on `device` and with `dtype` where the parameter's is the model's.

    `device` is a device, a sharding, or a mapping from path to either; of several processes each reads what its devices hold.
    `progress` hears of the bytes read. Beside the parameters, host memory holds some blocks, and device memory one block more.
    Raises CheckpointError for content that is refused.
    """
    wanted = plan.abstract(dtype)

    def steps() -> Iterator[tuple[_Placement, Box, str | None]]:
        for path, source in plan.parameters.items():
            made = _placement(source, wanted[path], device[path] if isinstance(device, Mapping) else device)
            for i, step in enumerate(made.steps):
                yield made, step, path if i == len(made.steps) - 1 else None

    todo = steps()
    with ThreadPoolExecutor(THREADS, "read-weights") as pool:
        ahead = deque((*step, pool.submit(step[0].read, step[1])) for step in itertools.islice(todo, THREADS))
        try:
            while ahead:
                made, step, path, parts = ahead.popleft()
                nbytes = made.place(step, parts.result())
                ahead += ((*step, pool.submit(step[0].read, step[1])) for step in itertools.islice(todo, 1))
                if progress is not None:
                    progress.advance(nbytes)
                if path is not None:
                    array = made.finish()
                    del made, parts
                    yield path, array
        finally:
            pool.shutdown(cancel_futures=True)


def bytes_to_read(plan: WeightPlan, device: Any) -> int:
    """What `progress` hears of in all: less than the whole where other processes hold a part."""
    total = 0
    for path, source in plan.parameters.items():
        sharding = _sharding(device[path] if isinstance(device, Mapping) else device)
        held = {box_of(index or (), source.shape) for index in sharding.addressable_devices_indices_map(source.shape).values()}
        total += source.nbytes * len(held) * math.prod(sharding.shard_shape(source.shape)) // math.prod(source.shape)
    return total


def load_parameters(plan: WeightPlan, *, dtype: Any, device: Any, progress: Progress | None = None) -> dict[str, jax.Array]:
    """All that `stream_parameters` yields."""
    return dict(stream_parameters(plan, dtype=dtype, device=device, progress=progress))


def _placement(source: Source, wanted: jax.ShapeDtypeStruct, device: Any) -> _Placement:
    """How a parameter gets to where it belongs.

    What is small is put together on the host, and so is what the CPU's devices take over as it is. The rest goes block by block:
    a transfer is staged through pinned host memory that is kept for the next, so a whole tensor would cost its size twice more.
    """
    sharding = _sharding(device)
    local = sharding.shard_shape(source.shape)
    on_cpu = all(found.platform == "cpu" for found in sharding.addressable_devices)
    small = math.prod(local) * wanted.dtype.itemsize <= BLOCK_BYTES
    return (_OnHost if on_cpu or small else _OnDevices)(source, wanted, sharding)


def _sharding(device: Any) -> Sharding:
    return device if isinstance(device, Sharding) else SingleDeviceSharding(device)


class _Placement:
    """A parameter on its way: `steps` are blocks of a device's part, read for all devices of this process together."""

    def __init__(self, source: Source, wanted: jax.ShapeDtypeStruct, sharding: Sharding):
        self.source, self.wanted, self.sharding = source, wanted, sharding
        found = sharding.addressable_devices_indices_map(source.shape)
        self.devices = {device: box_of(index or (), source.shape) for device, index in found.items()}
        self.boxes = tuple(dict.fromkeys(self.devices.values()))  # what the devices hold, each once
        self.local = extents(self.boxes[0])
        content = source.content
        limit = BLOCK_BYTES // content.stored.itemsize // len(self.boxes)
        self.steps = list(blocks(self.local, content.order, content.grain, limit))
        self._read = 0  # elements

    def reads(self, step: Box) -> Iterator[tuple[Box, list[Box]]]:
        """What to read for a step, and the devices' parts that it is for."""
        for read, members in joined([moved(step, box) for box in self.boxes], self.source.shape, self.source.content.order):
            yield read, [self.boxes[i] for i in members]

    def read(self, step: Box) -> Parts:
        """Read a step; called by several threads."""
        raise NotImplementedError

    def place(self, step: Box, parts: Parts) -> int:
        """Take what was read for a step; the bytes of the files that it stands for."""
        before, whole = self._read, math.prod(self.source.shape)
        self._read += len(self.boxes) * math.prod(extents(step))
        return self.source.nbytes * self._read // whole - self.source.nbytes * before // whole

    def finish(self) -> jax.Array:
        """The parameter, when all steps are placed."""
        raise NotImplementedError

    def _together(self, arrays: list[jax.Array]) -> jax.Array:
        return jax.make_array_from_single_device_arrays(self.source.shape, self.sharding, arrays)


class _OnHost(_Placement):
    """Put together in host memory, in the dtype wanted, and given to the devices whole."""

    def __init__(self, source: Source, wanted: jax.ShapeDtypeStruct, sharding: Sharding):
        super().__init__(source, wanted, sharding)
        self.buffers = {box: _aligned(self.local, wanted.dtype) for box in self.boxes}

    def read(self, step: Box) -> Parts:
        content = self.source.content
        for read, members in self.reads(step):
            if len(members) == 1:
                content.read(read, self.buffers[members[0]][(*step, ...)])
                continue
            found = np.empty(extents(read), content.stored)
            content.read(read, found)
            for box in members:
                self.buffers[box][step] = found[within(moved(step, box), read)]
        return {}

    def finish(self) -> jax.Array:
        return self._together([jax.device_put(self.buffers[box], device) for device, box in self.devices.items()])


class _OnDevices(_Placement):
    """Filled in on the devices, and cast there, block by block.

    The devices' parts lie side by side in one array, so that one program fills them all.
    """

    def __init__(self, source: Source, wanted: jax.ShapeDtypeStruct, sharding: Sharding):
        super().__init__(source, wanted, sharding)
        self.row = NamedSharding(Mesh(np.array(list(self.devices)), "device"), PartitionSpec("device"))
        self.filled: jax.Array | None = None

    def read(self, step: Box) -> Parts:
        content, parts = self.source.content, {}
        for read, members in self.reads(step):
            found = np.empty(extents(read), content.stored)
            content.read(read, found)
            parts |= {box: np.ascontiguousarray(found[within(moved(step, box), read)]) for box in members}
        return parts

    def place(self, step: Box, parts: Parts) -> int:
        if self.filled is None:
            self.filled = jnp.zeros(self._side_by_side(self.local), self.wanted.dtype, device=self.row)
        arrays = [jax.device_put(parts[box], device) for device, box in self.devices.items()]
        block = jax.make_array_from_single_device_arrays(self._side_by_side(extents(step)), self.row, arrays)
        self.filled = jax.block_until_ready(_filler(self.row)(self.filled, block, tuple(part.start for part in step)))
        return super().place(step, parts)

    def finish(self) -> jax.Array:
        assert self.filled is not None
        return self._together([shard.data for shard in self.filled.addressable_shards])

    def _side_by_side(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self.devices) * shape[0], *shape[1:])


@functools.cache
def _filler(row: NamedSharding) -> Callable[[jax.Array, jax.Array, tuple[int, ...]], jax.Array]:
    """Each device's block written into its part from the given place on, in place."""

    def fill(whole: jax.Array, block: jax.Array, start: tuple[int, ...]) -> jax.Array:
        return jax.lax.dynamic_update_slice(whole, block.astype(whole.dtype), start)

    split = jax.shard_map(fill, mesh=row.mesh, in_specs=(row.spec, row.spec, PartitionSpec()), out_specs=row.spec)
    return jax.jit(split, donate_argnums=0)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised host memory that a CPU device takes over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    return buffer[-buffer.ctypes.data % _ALIGNMENT :][:nbytes].view(dtype).reshape(shape)
