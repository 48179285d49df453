"""The tables of docs/benchmarks.md are the rows of bench/results, and a difference is told."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from inkling_jax import InputError
from inkling_jax.benchmarks.rows import read_rows

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def make() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "make_tables.py"))


def test_tables_are_the_committed_rows(make: dict[str, Any]) -> None:
    """Raises where they differ, where a row has no table or a table no rows."""
    assert make["main"](["--check"]) == 0


def test_the_share_of_the_bound_is_that_of_the_rows() -> None:
    """The results that prose repeats: of plain JAX, and of the kernels at the largest model."""
    rows = read_rows(ROOT / "bench/results/step.json")
    ratios = [row["ratio"] for row in rows if row["kernels"] == "reference"]
    for name in ("README.md", "docs/benchmarks.md"):
        assert f"{min(ratios):.0%} to {max(ratios):.0%} of" in (ROOT / name).read_text()
    ratios = [row["ratio"] for row in rows if row["kernels"] == "sm90" and row["case"].startswith("inkling tensor=8")]
    assert f"{min(ratios):.0%} to {max(ratios):.0%} of" in (ROOT / "README.md").read_text()


def test_a_table_that_differs_is_told_and_mended(make: dict[str, Any], tmp_path: Path) -> None:
    """A number changed by hand, a row that changed, a row that no table holds, a table without rows."""
    fields = ("batch", "context", "busy_us", "launches", "bytes", "expert_bytes", "kv_bytes", "experts", "ceiling_gbs")
    row = dict.fromkeys(fields, 1) | {"bench": "step", "case": "a b", "phase": "decode", "kernels": "reference", "device": "X"}
    row |= {"devices": 1, "jax": "0", "date": "d", "time_us": 4321.0, "bound_us": 2160.5, "ratio": 0.5, "ceiling": "c"}
    document, results = tmp_path / "doc.md", tmp_path / "step.json"
    document.write_text("before\n<!-- table: step a -->\n<!-- end -->\nafter\n")
    results.write_text(json.dumps([row]))

    def main(*arguments: str) -> int:
        return make["main"](arguments, document, tmp_path)

    with pytest.raises(InputError, match="run python scripts/make_tables.py"):
        main("--check")
    assert main() == 0 and main("--check") == 0
    assert re.search(r"^before\n(?s:.*)\| 4\.32 \| 2\.16 \| 50\.0% \|(?s:.*)\nafter$", document.read_text())
    for change in ({"time_us": 4500.0, "ratio": 0.4801}, {"jax": "1"}, {"ceiling": "d"}):
        results.write_text(json.dumps([row | change]))
        with pytest.raises(InputError, match="not what it is made from"):
            main("--check")
    results.write_text(json.dumps([row, row | {"case": "ab"}]))
    with pytest.raises(InputError, match="no table holds the row 'ab'"):
        main("--check")
    results.write_text(json.dumps([row | {"case": "b"}]))
    with pytest.raises(InputError, match="begins so"):
        main("--check")
