"""What a run over the tasks found, item by item, so that runs can be compared; kept as a JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from inkling_jax.errors import InputError


@dataclasses.dataclass
class TaskResult:
    """One task: for each item, in order, whether it was right and what else is to be known of it."""

    right: list[bool] = dataclasses.field(default_factory=list)
    again: list[bool] = dataclasses.field(default_factory=list)  # right in the control: the same model, items in another order
    runaway: list[bool] = dataclasses.field(default_factory=list)  # made as many tokens as it was allowed to
    unclosed: list[bool] = dataclasses.field(default_factory=list)  # was still thinking then
    empty: list[bool] = dataclasses.field(default_factory=list)  # said nothing and called nothing
    valid: list[bool] = dataclasses.field(default_factory=list)  # of tool calls alone: could be made
    losses: list[float] = dataclasses.field(default_factory=list)  # summed over an item's target tokens, in nats
    tokens: list[int] = dataclasses.field(default_factory=list)  # target tokens of an item
    drafts: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # by depth: tokens guessed, of so many
    blind: float = 0.0  # share that the best guess without media would get; 0 for tasks without


@dataclasses.dataclass
class Results:
    """A run: what was run, and its tasks by name."""

    about: dict[str, Any]  # model, format, activations, dtype, kernels, device, jax, date, seed, limit, media
    tasks: dict[str, TaskResult]


_FLAGS = ("right", "again", "runaway", "unclosed", "empty", "valid")  # stored as texts of 0 and 1


def save_results(path: Path, results: Results) -> None:
    """Write a file of results, never half."""
    tasks = {}
    for name, task in results.tasks.items():
        fields = dataclasses.asdict(task) | {"losses": [round(loss, 6) for loss in task.losses]}
        tasks[name] = fields | {flag: "".join("1" if value else "0" for value in getattr(task, flag)) for flag in _FLAGS}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(fields)}" for name, fields in tasks.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(f'{{\n "about": {json.dumps(results.about)},\n "tasks": {{\n{lines}\n }}\n}}\n', encoding="utf-8")
    os.replace(partial, path)


def read_results(path: Path) -> Results:
    """A file that `save_results` wrote. Raises InputError for any other."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tasks = {}
        for name, fields in content["tasks"].items():
            flags = {flag: [value == "1" for value in fields[flag]] for flag in _FLAGS}
            tasks[name] = TaskResult(**(fields | flags | {"drafts": [(good, total) for good, total in fields["drafts"]]}))
        return Results(dict(content["about"]), tasks)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a file of results ({type(error).__name__}: {error})") from None


def read_baseline(path: Path, *, tasks: Collection[str], seed: int, limit: int) -> Results:
    """Results to compare a run with. Raises InputError where they are of other items than the run's."""
    results = read_results(path)
    for field, value in (("seed", seed), ("limit", limit)):
        if results.about.get(field) != value:
            told = f"{field} {results.about.get(field)!r}, this run {value!r}"
            raise InputError(f"{path}: has other items ({told}): runs are compared on the same ones")
    if results.tasks.keys().isdisjoint(tasks):
        raise InputError(f"{path}: has no task of this run ({', '.join(tasks)})")
    return results
