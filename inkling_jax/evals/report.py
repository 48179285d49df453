"""Results as tables for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from inkling_jax.evals.results import Results, TaskResult
from inkling_jax.evals.statistics import Interval, flips, loss_change, perplexity, share

_WIDTH = 200  # where no terminal says how wide it is


class Cells(NamedTuple):
    """A table as texts: what it is about, headings, and rows that begin with the name of a task."""

    title: str
    headings: list[str]
    rows: list[list[str]]


def results_cells(results: Results) -> Cells:
    """A row a task: accuracy, perplexity and draft acceptance by depth, with 95% intervals, and what went wrong otherwise."""
    depths = max((len(task.drafts) for task in results.tasks.values()), default=0)
    drafts = [f"draft {depth + 1}" for depth in range(depths)]
    counts = ["valid calls", "runaways", "unclosed thinking", "empty", "best blind guess"]
    rows = [[name, *_found(task, depths)] for name, task in results.tasks.items()]
    return Cells(_told(results), ["task", "items", "right", "perplexity", *drafts, *counts], rows)


def comparison_cells(before: Results, after: Results) -> Cells:
    """A row a task of both: items lost and gained, whether that is chance, how many flipped in the controls, change of loss."""
    headings = ["task", "items", "before", "after", "points", "lost", "gained", "McNemar p"]
    headings += ["control lost", "control gained", "loss x 1000"]
    both = [name for name in after.tasks if name in before.tasks]
    pairs = {name: ([before.tasks[name]], [after.tasks[name]]) for name in both}
    pairs["all"] = ([before.tasks[name] for name in both], [after.tasks[name] for name in both])
    return Cells(f"before: {_told(before)}", headings, [[name, *_compared(*pair)] for name, pair in pairs.items()])


def print_cells(cells: Cells) -> None:
    """Print to standard output."""
    table = Table(box=None, pad_edge=False)
    for n, heading in enumerate(cells.headings):
        table.add_column(heading, justify="right" if n else "left", no_wrap=True)
    for row in cells.rows:
        table.add_row(*row)
    print(cells.title)
    Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False).print(table)


def _told(results: Results) -> str:
    return ", ".join(f"{name} {value}" for name, value in results.about.items() if value is not None)


def _found(task: TaskResult, depths: int) -> list[str]:
    loss = perplexity(task.losses, task.tokens)
    drafts = [_share(*task.drafts[depth]) if depth < len(task.drafts) else "-" for depth in range(depths)]
    return [
        str(len(task.right)),
        _share(sum(task.right), len(task.right)),
        f"{loss.value:.3f} ({loss.low:.3f}-{loss.high:.3f})",
        *drafts,
        _share(sum(task.valid), len(task.valid)) if task.valid else "-",
        *(str(sum(flags)) for flags in (task.runaway, task.unclosed, task.empty)),
        f"{task.blind:.1%}" if task.blind else "-",
    ]


def _compared(before: Sequence[TaskResult], after: Sequence[TaskResult]) -> list[str]:
    first, second = ([flag for task in tasks for flag in task.right] for tasks in (before, after))
    changed = flips(first, second)
    controls = [flips(task.right, task.again) for task in (*before, *after) if task.again]
    rates = [sum(flags) / len(flags) for flags in (first, second)]
    return [
        str(len(first)),
        *(f"{rate:.1%}" for rate in rates),
        f"{100 * (rates[1] - rates[0]):+.1f}",
        str(changed.lost),
        str(changed.gained),
        f"{changed.p:.3g}",
        str(sum(control.lost for control in controls)) if controls else "-",
        str(sum(control.gained for control in controls)) if controls else "-",
        change_of_loss(before, after),
    ]


def change_of_loss(before: Sequence[TaskResult], after: Sequence[TaskResult]) -> str:
    """By how many thousandths of a nat a token the loss of the same answers has changed, and half of the 95% interval."""
    first, second = ([loss for task in tasks for loss in task.losses] for tasks in (before, after))
    change = loss_change(first, second, [count for task in before for count in task.tokens])
    return f"{1000 * change.value:+.2f} ± {1000 * (change.high - change.value):.2f}"


def _share(successes: int, total: int) -> str:
    found: Interval = share(successes, total)
    return f"{found.value:.1%} ({100 * found.low:.1f}-{100 * found.high:.1f})"
