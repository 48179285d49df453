"""Results as tables for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from inkling_jax.evals.results import Results, TaskResult
from inkling_jax.evals.statistics import flips, perplexity, share

_WIDTH = 200  # where no terminal says how wide it is


def results_table(results: Results) -> Table:
    """A line a task: its accuracy and perplexity, each with its 95% interval, drafts by depth, and what went wrong otherwise."""
    depths = max((len(task.drafts) for task in results.tasks.values()), default=0)
    about = {name: value for name, value in results.about.items() if value not in (None, "")}
    table = _table(", ".join(f"{name} {value}" for name, value in about.items()))
    headings = ["items", "right", "95%", "perplexity", "95%", *(f"draft {k + 1}" for k in range(depths))]
    for heading in (*headings, "valid calls", "runaways", "unclosed thinking", "empty", "best blind guess"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, task in results.tasks.items():
        table.add_row(name, *_cells(task, depths))
    return table


def comparison_table(before: Results, after: Results) -> Table:
    """A line a task of both: items lost and gained, whether that is chance, and how many flipped in the control of either."""
    table = _table("before: " + ", ".join(f"{name} {value}" for name, value in before.about.items()))
    for heading in ("items", "before", "after", "points", "lost", "gained", "McNemar p", "control lost", "control gained"):
        table.add_column(heading, justify="right", no_wrap=True)
    both = [name for name in after.tasks if name in before.tasks]
    for name in both:
        table.add_row(name, *_compared([before.tasks[name]], [after.tasks[name]]))
    if len(both) > 1:
        table.add_row("all", *_compared([before.tasks[name] for name in both], [after.tasks[name] for name in both]))
    return table


def print_table(table: Table) -> None:
    """Print to standard output."""
    Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False).print(table)


def _table(title: str) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("task", no_wrap=True)
    return table


def _cells(task: TaskResult, depths: int) -> list[str]:
    right, loss = share(sum(task.right), len(task.right)), perplexity(task.losses, task.tokens)
    drafts = [_percent(share(*task.drafts[k]).value) if k < len(task.drafts) else "-" for k in range(depths)]
    valid = _percent(sum(task.valid) / len(task.valid)) if task.valid else "-"
    return [
        str(len(task.right)),
        _percent(right.value),
        f"{_percent(right.low)} to {_percent(right.high)}",
        f"{loss.value:.3f}",
        f"{loss.low:.3f} to {loss.high:.3f}",
        *drafts,
        valid,
        *(str(sum(flags)) for flags in (task.runaway, task.unclosed, task.empty)),
        _percent(task.blind) if task.blind else "-",
    ]


def _compared(before: Sequence[TaskResult], after: Sequence[TaskResult]) -> list[str]:
    first, second = ([flag for task in tasks for flag in task.right] for tasks in (before, after))
    changed = flips(first, second)
    controls = [flips(task.right, task.again) for task in (*before, *after) if task.again]
    rates = [sum(flags) / len(flags) for flags in (first, second)]
    return [
        str(len(first)),
        *map(_percent, rates),
        f"{100 * (rates[1] - rates[0]):+.1f}",
        str(changed.lost),
        str(changed.gained),
        f"{changed.p:.3g}",
        str(sum(control.lost for control in controls)) if controls else "-",
        str(sum(control.gained for control in controls)) if controls else "-",
    ]


def _percent(value: float) -> str:
    return f"{value:.1%}"
