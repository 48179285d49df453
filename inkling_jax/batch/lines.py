"""The lines of a batch's input, which is read twice: once to see what there is to do, once to do it."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from inkling_jax.errors import InputError

MAX_LINE = 256 << 20  # bytes of a line that are read; a longer one is refused


@contextlib.contextmanager
def open_input(name: str) -> Iterator[BinaryIO]:
    """The file called `name`, or standard input for "-". What can be read but once is copied into a temporary file first.

    Raises InputError for what is not there or may not be read.
    """
    with contextlib.ExitStack() as stack:
        if name == "-":
            if sys.stdin is None:
                raise InputError("--input -: standard input is closed")
            file = sys.stdin.buffer
        else:
            if Path(name).is_dir():
                raise InputError(f"--input {name}: is a directory; a file of JSON lines would be right")
            try:
                file = stack.enter_context(open(name, "rb"))
            except (OSError, ValueError) as error:
                raise InputError(f"--input {name}: {getattr(error, 'strerror', None) or error}") from None
        if name == "-" or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            copy = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(file, copy)
            file = copy
        yield file


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Number, counted from 1, and content of each line that is not blank; of a long one the first `MAX_LINE` bytes."""
    file.seek(0)
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        rest = line
        while len(rest) == MAX_LINE and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE)
        content = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
        if content:
            yield number, content
