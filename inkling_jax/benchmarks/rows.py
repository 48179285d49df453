"""Result rows: what each holds at least, and the JSON files that keep them."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from inkling_jax.errors import InputError

Row = dict[str, Any]

_REQUIRED: dict[str, type | tuple[type, ...]] = {
    "bench": str,
    "case": str,  # a stable string of the parameters, without the implementation
    "phase": str,
    "kernels": str,  # the implementation
    "device": str,
    "devices": int,
    "jax": str,
    "date": str,
    "time_us": (int, float),
    "bound_us": (int, float),
    "ratio": (int, float),  # bound over time: 1.0 is the limit
    "ceiling": str,  # what the bound was measured by
}
_SAME = ("bench", "case", "device", "kernels")  # a row that agrees in these is replaced by a newer one


def make_row(
    bench: str,
    case: str,
    phase: str,
    device: Any,
    *,
    kernels: str,
    time_us: float,
    bound_us: float,
    devices: int = 1,
    **fields: Any,
) -> Row:
    """A checked row of today; `fields` are the bench's parameters and findings, the ceiling among them."""
    row = {
        "bench": bench,
        "case": case,
        "phase": phase,
        "kernels": kernels,
        "device": device.device_kind,
        "devices": devices,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "time_us": round(time_us, 3),
        "bound_us": round(bound_us, 3),
        "ratio": round(bound_us / time_us, 4) if time_us > 0 else 0.0,
    } | fields
    check_row(row, "new row")
    return row


def check_row(row: Any, where: str) -> None:
    """Raise InputError naming `where` and the field for a row that lacks something or contradicts itself."""
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a JSON object, found {type(row).__name__}")
    for name, kind in _REQUIRED.items():
        if not isinstance(row.get(name), kind) or isinstance(row[name], bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            raise InputError(f"{where}: {name!r} is {row.get(name)!r}; expected {' or '.join(k.__name__ for k in kinds)}")
    if row["phase"] not in ("decode", "prefill"):
        raise InputError(f"{where}: 'phase' is {row['phase']!r}; expected 'decode' or 'prefill'")
    for name in ("time_us", "bound_us"):
        if not (math.isfinite(row[name]) and row[name] > 0):
            raise InputError(f"{where}: {name!r} is {row[name]!r}; expected microseconds above zero")
    if not math.isclose(row["ratio"], row["bound_us"] / row["time_us"], rel_tol=1e-2, abs_tol=1e-4):
        raise InputError(f"{where}: 'ratio' is {row['ratio']!r}; bound_us / time_us is {row['bound_us'] / row['time_us']:.4f}")


def read_rows(path: Path) -> list[Row]:
    """The rows of a result file, none where it does not exist. Raises InputError for a file that is not one."""
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a file of result rows ({error}); give another --output") from None
    if not isinstance(rows, list):
        raise InputError(f"{path}: expected a JSON list of rows, found {type(rows).__name__}; give another --output")
    for index, row in enumerate(rows):
        check_row(row, f"{path}, row {index}")
    return rows


def merge_rows(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """The old rows, each replaced by a new one of the same bench, case, device and kernels, and after them the other new ones."""
    merged = {tuple(row[name] for name in _SAME): row for row in old}
    merged.update({tuple(row[name] for name in _SAME): row for row in new})
    return list(merged.values())


def save_rows(path: Path, new: Iterable[Row]) -> None:
    """Merge rows into a result file, one a line, so that a change reads as the lines that changed. It is never half written."""
    rows = merge_rows(read_rows(path), new)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    os.replace(partial, path)
