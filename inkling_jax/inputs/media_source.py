"""Where a media item comes from: a path, a file:// or data: URL, or bytes. Nothing is fetched over a network."""

from __future__ import annotations

import base64
import binascii
import errno
import os
import re
import stat
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from inkling_jax.errors import InputError

# What os.stat says of a name that is at fault itself. Anything else (too many open files, a failing disk) is not the input's.
FAULTS = {
    errno.ENOENT: "no such file",
    errno.ENOTDIR: "no such file",
    errno.EACCES: "may not be read",
    errno.EPERM: "may not be read",
    errno.ENAMETOOLONG: "no such file (the name is too long)",
    errno.ELOOP: "a loop of symbolic links",
}


def find_media(source: Any, name: str) -> Path | bytes:
    """The file or the bytes that `source` stands for: str or Path, "file://..." or "data:...;base64,...", or bytes-like.

    A file is there, regular, readable and not empty, and bytes are not empty; else InputError, beginning with `name` ("audio 2").
    """
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    elif isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        if isinstance(text, bytes):
            text = os.fsdecode(text)
        if isinstance(source, str) and text[:5].lower() == "data:":
            data = _decode(text, name)
        else:
            return _check_file(_path(text, name) if isinstance(source, str) else text, name)
    else:
        raise InputError(f"{name} is a {type(source).__name__}; a path, a file:// or data: URL, or bytes would be right")
    if not data:
        raise InputError(f"{name} has no bytes")
    return data


def _path(text: str, name: str) -> str:
    """The path that a string means; a URL other than file:// is refused."""
    if not text.strip():
        raise InputError(f"{name} is an empty string; a path, a file:// or data: URL would be right")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if scheme is None:
        return text
    if scheme[1].lower() != "file":
        raise InputError(f"{name}: {_short(text)} is not fetched: download it and give the path")
    try:
        url = urlsplit(text)
    except ValueError as error:
        raise InputError(f"{name}: {_short(text)} is no file:// URL: {error}") from None
    if url.netloc not in ("", "localhost"):
        raise InputError(f"{name}: {_short(text)} names a file of another host ({url.netloc}); file:///path would be right")
    # "?" and "#" belong to the name when they are not percent-encoded: files have no query.
    return unquote(text[len(scheme[0]) + len(url.netloc) :])


def _decode(url: str, name: str) -> bytes:
    """The bytes of a data: URL, which must be base64."""
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InputError(f"{name}: {_short(url)} is no data: URL with base64; data:TYPE;base64,... would be right")
    try:
        payload = unquote(payload) if "%" in payload else payload
        return base64.b64decode("".join(payload.split()), validate=True)  # encoders break it into lines
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{name}: the base64 of {_short(url)} is broken: {error}") from None


def _check_file(text: str, name: str) -> Path:
    """The path of a regular, readable file with something in it."""
    path = Path(text)
    try:
        status = path.stat()
    except ValueError as error:  # a NUL in the name
        raise InputError(f"{name}: {_short(repr(text))} is no path: {error}") from None
    except OSError as error:
        if error.errno not in FAULTS:
            raise
        raise InputError(f"{name}: {_short(text)}: {FAULTS[error.errno]}") from None
    if stat.S_ISDIR(status.st_mode):
        raise InputError(f"{name}: {_short(text)} is a directory; a file would be right")
    if not stat.S_ISREG(status.st_mode):  # a device or a pipe may never end
        raise InputError(f"{name}: {_short(text)} is not a regular file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{name}: {_short(text)}: may not be read")
    if not status.st_size:
        raise InputError(f"{name}: {_short(text)} is empty (0 bytes)")
    return path


def _short(text: str) -> str:
    """At most 200 characters of it: a data: URL in the wrong place is no message."""
    return text if len(text) <= 200 else f"{text[:180]}... ({len(text)} characters)"
