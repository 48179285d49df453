"""The command line of scripts that make a document, or its tables, from what is measured or declared elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from inkling_jax.errors import InputError


def write_or_check(script: str, about: str, argv: Sequence[str] | None, document: Path, make: Callable[[str], str]) -> int:
    """Write what `make` makes of the document's text; with --check change nothing, and raise InputError where they differ."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where the document is another")
    options = parser.parse_args(argv)
    found = document.read_text() if document.is_file() else ""
    wanted = make(found)
    if wanted == found:
        return 0
    if options.check:
        raise InputError(f"{document.name} is not what it is made from: run python scripts/{script}")
    document.write_text(wanted)
    print(f"wrote {document}")
    return 0
