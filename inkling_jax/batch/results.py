"""The file of results: a record a line, each added whole and only once, so that whatever ends the process leaves whole lines.

A record is one write at the end of the file. The last line may lack its end where a process or the machine was stopped within
the write: it is cut off when the file is opened again. Records reach the disk at least every second and when the file is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inkling_jax.errors import CapacityError, InputError

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_SYNCS = 1.0
_BEGINNING = b'{"id": '  # of every record: no other last line is cut


class ResultFile:
    """A file that one process at a time may add to. Read it before adding to it; `close` (or `with`) when done."""

    def __init__(self, name: str):
        """Open or create it. Raises InputError where that cannot be, or another process has it."""
        self.path = Path(name)
        if not self.path.parent.is_dir():
            raise InputError(f"--output {name}: there is no directory {self.path.parent}")
        self._end = 0
        self._synced = time.monotonic()
        self._written = False  # anything since then
        try:
            self._fd = os.open(name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            self._take()
        except OSError as error:
            raise InputError(f"--output {name}: {error.strerror}") from None

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> None:
        """See that it can be gone on with, and keep others out; closed again where that is not so."""
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise InputError(f"--output {self.path}: not a regular file, which alone can be gone on with")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (InputError, OSError) as error:
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                raise InputError(f"--output {self.path}: another process is writing to it") from None
            raise

    def is_file(self, descriptor: int) -> bool:
        """Whether another open file is this one."""
        return os.path.samestat(os.fstat(self._fd), os.fstat(descriptor))

    def records(self) -> Iterator[dict[str, Any]]:
        """The records that are there; a last line without its end is cut. Raises InputError for a line that is no record."""
        end = 0
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    begun = line.rstrip(b"\0")  # a machine that lost power may have left the place alone
                    if not (begun.startswith(_BEGINNING) or _BEGINNING.startswith(begun)):
                        raise self._foreign(number)
                    os.ftruncate(self._fd, end)
                    logger.info("%s: cut off line %d, which an interrupted run left without its end", self.path, number)
                    break
                record = _record(line)
                if record is None:
                    raise self._foreign(number)
                end += len(line)
                yield record
        self._end = end

    def add(self, record: dict[str, Any]) -> None:
        """Add a record. Raises CapacityError where the disk does not take it: then nothing of it is there."""
        data = memoryview(_encode(record))
        size = len(data)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            self._written = True
            if time.monotonic() - self._synced >= _SECONDS_BETWEEN_SYNCS:
                self._sync()
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise CapacityError(
                f"{self.path}: {error.strerror}; the records before are whole, and the same command goes on after them"
            ) from None
        self._end += size

    def close(self) -> None:
        """Wait until all is on the disk."""
        if self._written:
            self._sync()
        os.close(self._fd)

    def _sync(self) -> None:
        os.fsync(self._fd)
        self._synced, self._written = time.monotonic(), False

    def _foreign(self, number: int) -> InputError:
        return InputError(f"--output {self.path}: line {number} is no record of a batch; give another file")


def _encode(record: dict[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, from an id
        return json.dumps(record).encode() + b"\n"


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line) if line.startswith(_BEGINNING) else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and digest_in(record) is not None else None


def digest_in(record: dict[str, Any]) -> str | None:
    """The digest of the line that a record is of; None where it is no record."""
    found = record.get("digest")
    if "custom_id" in record and isinstance(record["id"], str):
        found = record["id"].removeprefix("batch_req_")
    try:
        int(found, 16)  # pyright: ignore[reportArgumentType]  what does not fit raises
    except (TypeError, ValueError):
        return None
    return found if isinstance(found, str) and len(found) == 16 else None
