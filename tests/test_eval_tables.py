"""The tables of docs/evals.md are the results of bench/evals, and a difference is told."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from inkling_jax import InputError
from inkling_jax.evals.results import Results, TaskResult, save_results

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def make() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "make_eval_tables.py"))


def results(right: str, **about: Any) -> Results:
    """One task, one nat an answer of two tokens: sampling would give 37% of them."""
    flags, no = [c == "1" for c in right], [False] * len(right)
    task = TaskResult(flags, [], no, no, no, losses=[1.0] * len(right), tokens=[2] * len(right))
    return Results({"device": "X", "date": "d", "seed": 0, "limit": len(right)} | about, {"world": task})


def test_tables_are_the_committed_results(make: dict[str, Any]) -> None:
    """Raises where they differ, and where no table shows a file."""
    assert make["main"](["--check"]) == 0


def test_tables_are_made_and_differences_told(make: dict[str, Any], tmp_path: Path) -> None:
    """Each kind of table; what is not measured; a number changed by hand; a file that nothing shows."""
    document, folder = tmp_path / "evals.md", tmp_path / "evals"
    blocks = ["results: a", "comparison: a b", "mistakes: wrong", "results: none"]
    document.write_text("".join(f"<!-- {block} -->\nold\n<!-- end -->\n" for block in blocks))
    save_results(folder / "a.json", results("1101"))
    save_results(folder / "b.json", results("0101"))
    save_results(folder / "wrong" / "none.json", results("1101", mistake="none", same_choices=1.0))
    save_results(folder / "wrong" / "bad.json", results("0100", mistake="bad", same_choices=0.95706))
    save_results(folder / "wrong" / "other.json", results("1101", mistake="none, otherwise", same_choices=0.99997))
    assert make["main"]([], document, folder) == 0 == make["main"](["--check"], document, folder)
    text = document.read_text()
    assert "| world | 4 | 75.0% (30.1-95.4) | 1.649 (1.649-1.649) | - | 0 | 0 | 0 | - |" in text
    assert "| world | 4 | 75.0% | 50.0% | -25.0 | 1 | 0 | 1 | - | - | +0.00 ± 0.00 |" in text
    rows = ["| none | 75%, 37% |", "| none, otherwise | 75%, 37% |", "| bad | 25%, 37% |"]
    shares = ["100.00%", "100.00%", "95.71%"]
    assert "\n".join(f"{row} +0.00 ± 0.00 | {same} |" for row, same in zip(rows, shares, strict=True)) in text
    assert "Not measured yet." in text and "old" not in text
    document.write_text(text.replace("75.0% | 50.0%", "75.0% | 75.0%"))
    with pytest.raises(InputError, match="make_eval_tables.py"):
        make["main"](["--check"], document, folder)
    save_results(folder / "c.json", results("1"))
    with pytest.raises(InputError, match="c.json: no table shows it"):
        make["main"]([], document, folder)
