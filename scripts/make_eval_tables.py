"""Write the tables of docs/evals.md from the results in bench/evals, or check that they agree.

    python scripts/make_eval_tables.py            # after a run has written its results
    python scripts/make_eval_tables.py --check    # changes nothing; an error where a table and its results differ

A table stands between `<!-- results: NAME -->`, `<!-- comparison: BEFORE AFTER -->` or `<!-- mistakes: FOLDER -->` and
`<!-- end -->`, names being those of files without their ending. What has no results yet says so.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean as mean

from documents import write_or_check

from inkling_jax.command_line import run
from inkling_jax.errors import InputError
from inkling_jax.evals.report import Cells, change_of_loss, comparison_cells, results_cells
from inkling_jax.evals.results import read_results

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- (?P<kind>results|comparison|mistakes): (?P<names>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
UNCHANGED = "none"  # the mistake of that name; that of its control begins with it


def fill(text: str, folder: Path) -> str:
    """The document with its tables made from the files in `folder`. Raises InputError for a file that no table shows."""
    shown: set[Path] = set()

    def block(match: re.Match[str]) -> str:
        names = match["names"].split()
        if match["kind"] == "mistakes":
            files = sorted((folder / names[0]).glob("*.json"))
        else:
            files = [folder / f"{name}.json" for name in names]
        if not files or not all(file.exists() for file in files):
            return f"{match[1]}\nNot measured yet.\n\n{match[4]}"
        shown.update(files)
        results = [read_results(file) for file in files]
        kind = match["kind"]
        cells = (
            mistakes(files)
            if kind == "mistakes"
            else results_cells(*results)
            if kind == "results"
            else comparison_cells(*results)
        )
        return f"{match[1]}\n{markdown(cells)}\n{match[4]}"

    text = BLOCK.sub(block, text)
    for file in sorted(folder.rglob("*.json")):
        if file not in shown:
            raise InputError(f"{file}: no table shows it")
    return text


def mistakes(files: Sequence[Path]) -> Cells:
    """A row a mistake, the model without one first: each task's accuracy and perplexity, the change of loss over all, and the
    share of choices on random tokens that stay."""
    found = {str(results.about["mistake"]): results for results in map(read_results, files)}
    names = sorted(found, key=lambda name: (name != UNCHANGED, UNCHANGED not in name, name))
    tasks = list(found[names[0]].tasks)
    first = found[names[0]].about
    rows = []
    for name in names:
        each = [found[name].tasks[task] for task in tasks]
        change = change_of_loss(list(found[names[0]].tasks.values()), each)
        told = (f"{mean(task.right):.0%}, {mean(math.exp(-loss) for loss in task.losses):.0%}" for task in each)
        rows.append([name, *told, change, f"{found[name].about['same_choices']:.2%}"])
    title = f"{first['device']}, {first['date']}, {first['limit']} items a task: share right, greedy and sampled"
    return Cells(title, ["mistake", *tasks, "loss x 1000, all", "same choices"], rows)


def markdown(cells: Cells) -> str:
    """A line that says what it is, and the table."""
    lines = [cells.headings, ["---"] * len(cells.headings), *cells.rows]
    return "\n".join([cells.title, "", *("| " + " | ".join(line) + " |" for line in lines), ""])


def main(argv: Sequence[str] | None = None, document: Path = ROOT / "docs/evals.md", results: Path | None = None) -> int:
    """Write the tables, or with --check compare them; 0 where all is well."""
    folder = results or ROOT / "bench/evals"
    return write_or_check("make_eval_tables.py", __doc__ or "", argv, document, lambda text: fill(text, folder))


if __name__ == "__main__":
    sys.exit(run(main))
