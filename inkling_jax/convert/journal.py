"""What a conversion has finished, a JSON object a line: what a later run with the same source need not do again."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from inkling_jax.errors import CheckpointError


class Journal:
    """A file that one process at a time may add to. Each entry is on the disk before `add` returns.

    Its first entry says which conversion it is of. An entry cut short by a kill is dropped.
    """

    def __init__(self, file: Path, conversion: dict[str, Any]):
        """Open or begin the journal of `conversion`; CheckpointError where it is another's or another process has it."""
        self._file = open(file, "a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise CheckpointError(f"{file.parent}: another process is converting into it") from None
        self.entries = self._read()
        if not self.entries:
            self.add(conversion)
        elif self.entries[0] != conversion:
            self._file.close()
            raise CheckpointError(
                f"{file.parent}: begun from other files, or with other options; give those, or delete it to begin anew"
            )

    def add(self, entry: dict[str, Any]) -> None:
        """Add an entry."""
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.entries.append(entry)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def _read(self) -> list[dict[str, Any]]:
        self._file.seek(0)
        found, end = [], 0
        for line in self._file:
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or not isinstance(entry, dict):
                break
            found.append(entry)
            end += len(line)
        self._file.truncate(end)
        return found
