"""Several processes, one model: all run the same program on the same requests, each on its own devices, and the first speaks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from inkling_jax.errors import InklingError, InputError

if TYPE_CHECKING:
    import numpy as np

JOIN_S = 300  # that a process waits for the others to start
LOST_S = 30  # without a sign of life, after which a process counts as dead and jax ends the others

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Place:
    """Which of `count` processes this is; `coordinator`, HOST:PORT, is None where the launcher's variables say it."""

    index: int
    count: int
    coordinator: str | None


def find_place(
    coordinator: str | None, count: int | None, index: int | None, environment: Mapping[str, str] = os.environ
) -> Place | None:
    """This process's place as the options or the variables of srun or mpirun (Open MPI) say; None for a lone process.

    Raises InputError for options that do not go together.
    """
    given = {"--coordinator": coordinator, "--num-processes": count, "--process-id": index}
    if all(value is None for value in given.values()):
        return _launched(environment)
    for name, value in given.items():
        if value is None:
            raise InputError(f"{', '.join(given)} belong together, and {name} is missing")
    assert coordinator is not None and count is not None and index is not None
    if count < 1:
        raise InputError(f"--num-processes {count}: at least one is needed")
    if not 0 <= index < count:
        raise InputError(f"--process-id {index}: of {count} processes the first is 0 and the last {count - 1}")
    if not re.fullmatch(r".+:[0-9]{1,5}", coordinator) or not 0 < int(coordinator.rpartition(":")[2]) < 1 << 16:
        raise InputError(f"--coordinator {coordinator!r}: expected HOST:PORT, the first process's, such as node1:12355")
    return Place(index, count, coordinator) if count > 1 else None


def _launched(environment: Mapping[str, str]) -> Place | None:
    """The place that a launcher gave. Of srun's step: in a shell of an allocation the job's task count may be more than run."""
    for count, index in (("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")):
        if index in environment and int(environment.get(count, "1")) > 1:
            return Place(int(environment[index]), int(environment[count]), None)
    return None


def join(place: Place) -> None:
    """Meet the other processes; before jax looks for devices. From here on libraries' own messages go to standard error.

    jax itself ends the process, with exit code 134, where the others do not come within JOIN_S seconds, and where one of them
    has been dead for LOST_S seconds later. Raises InputError where the launcher's variables or the address are of no use.
    """
    import jax

    if place.index:
        logging.getLogger("inkling_jax").setLevel(logging.ERROR)
    _keep_standard_output()
    where = f" at {place.coordinator}" if place.coordinator else ""
    logger.info("process %d of %d: waiting for the others%s", place.index, place.count, where)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            initialization_timeout=JOIN_S,
            heartbeat_timeout_seconds=LOST_S,
            shutdown_timeout_seconds=LOST_S,
            cluster_detection_method="deactivate" if place.coordinator else None,
        )
    except (RuntimeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"process {place.index} of {place.count} cannot join the others{where}: {reason}") from None


def _keep_standard_output() -> None:
    """Leave standard output to Python's own prints: gloo and NCCL write to its descriptor, in the middle of a JSON object."""
    if sys.stdout is None:
        return
    old = sys.stdout
    old.flush()
    sys.stdout = open(os.dup(1), "w", encoding=old.encoding, errors=old.errors, buffering=1 if old.isatty() else -1)
    os.dup2(2, 1)


@contextlib.contextmanager
def only_first_speaks(place: Place | None) -> Iterator[None]:
    """What processes other than the first print goes nowhere; their errors are raised."""
    if place is None or not place.index:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def together(place: Place | None) -> Iterator[None]:
    """Raise InklingError on one line where a step fails that all processes take together."""
    try:
        yield
    except Exception as error:
        if place is None or type(error).__name__ != "JaxRuntimeError" or "RESOURCE_EXHAUSTED" in str(error):
            raise
        who, reason = f"process {place.index} of {place.count}", next(iter(str(error).splitlines()), "")
        raise InklingError(f"{who}: a step that all take together failed, another has ended or is late: {reason}") from None


def leave(code: int) -> int:
    """The exit code, for a process that has done its part. One that failed ends here, without waiting for the others.

    The first, with which all end, first gives them a second to say what is wrong with them.
    """
    jax = sys.modules.get("jax")
    if code and jax is not None and jax.distributed.is_initialized():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        time.sleep(0 if jax.process_index() else 1)
        os._exit(code)
    return code


def check_processes(sizes: Mapping[str, int]) -> None:
    """Raise InputError unless a mesh of these axis sizes takes every device of every process, as many of each."""
    import jax

    count = jax.process_count()
    if count == 1:
        return
    held = [sum(device.process_index == index for device in jax.devices()) for index in range(count)]
    if len(set(held)) > 1:
        raise InputError(f"the {count} processes have {', '.join(map(str, held))} devices: each must have as many")
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "tensor=1"
    if math.prod(sizes.values()) != sum(held):
        raise InputError(
            f"mesh {mesh!r} is for {math.prod(sizes.values())} devices, {count} processes have {sum(held)}: give a mesh that "
            f"takes them all, such as tensor={sum(held)}, or start fewer processes"
        )


def of_all_processes(numbers: Sequence[int]) -> list[list[int]]:
    """What each process gave for the same numbers (64 bits, with sign), in the order of processes."""
    import jax
    import numpy as np

    if jax.process_count() == 1:
        return [list(numbers)]
    from jax.experimental.multihost_utils import process_allgather

    halves = np.asarray(numbers, np.int64).view(np.uint32)  # jax has no 64 bits unless told so
    return process_allgather(halves).view(np.int64).tolist()


def of_the_first(flags: np.ndarray) -> np.ndarray:
    """The first process's array of bools, in all, which give as many."""
    import jax
    import numpy as np

    if jax.process_count() == 1:
        return flags
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return np.unpackbits(broadcast_one_to_all(np.packbits(flags)), count=len(flags)).astype(bool)


def first_on_host() -> bool:
    """Whether no process before this one runs on the same host."""
    import socket
    import zlib

    import jax

    hosts = of_all_processes([zlib.crc32(socket.gethostname().encode())])
    return hosts.index(hosts[jax.process_index()]) == jax.process_index()
