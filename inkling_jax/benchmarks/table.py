"""Result rows as a table on standard output."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from inkling_jax.benchmarks.rows import Row

_WIDTH = 160  # where no terminal says how wide it is


def print_table(rows: Sequence[Row], columns: Mapping[str, str]) -> None:
    """Case, time, bound and ratio of each row, and the fields that `columns` maps to a heading."""
    table = Table(box=None, pad_edge=False)
    table.add_column("case", no_wrap=True)
    for heading in ("time us", "bound us", "ratio", *columns.values()):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [_text(row[name]) for name in ("time_us", "bound_us")] + [f"{row['ratio']:.3f}"]
        table.add_row(row["case"], *cells, *(_text(row.get(name)) for name in columns))
    if rows:
        table.caption = f"{rows[0]['device']}, bounds from {rows[0]['ceiling']}, kernels: {rows[0]['kernels']}"
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return (
        f"{value:,.0f}"
        if isinstance(value, int | float) and abs(value) >= 10
        else f"{value:.3g}"
        if isinstance(value, float)
        else str(value)
    )
