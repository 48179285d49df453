"""The tasks by name: how an example is made, and how an answer is graded."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from inkling_jax.errors import InputError
from inkling_jax.evals.nano import arithmetic, lookup, shapes, talk, tones, tools, world
from inkling_jax.evals.nano.example import Example, Given, Source, Split


class Task(NamedTuple):
    """How an example is made and graded."""

    make: Callable[[Source], Example]
    grade: Callable[[Example, Given], bool]


TASKS: dict[str, Task] = {
    "talk": Task(talk.make_talk, talk.grade_talk),
    "world": Task(world.make_world, world.grade_world),
    "arithmetic": Task(arithmetic.make_arithmetic, arithmetic.grade_arithmetic),
    "effort": Task(arithmetic.make_effort, arithmetic.grade_effort),
    "lookup": Task(lookup.make_lookup, lookup.grade_text),
    "lookup_near": Task(lookup.make_lookup_near, lookup.grade_text),
    "copy": Task(lookup.make_copy, lookup.grade_text),
    "tools": Task(tools.make_tools, tools.grade_tools),
    "shapes": Task(shapes.make_shapes, shapes.grade_shapes),
    "tones": Task(tones.make_tones, tones.grade_tones),
}


def make_example(task: str, seed: int, split: Split, index: int) -> Example:
    """Example number `index` of a task: the same for the same arguments. Nothing that is asked is in both parts.

    Raises InputError for a task or part that there is not.
    """
    if task not in TASKS or split not in ("train", "held-out"):
        raise InputError(f"task {task!r}, part {split!r}: expected one of {', '.join(TASKS)}, and 'train' or 'held-out'")
    return TASKS[task].make(Source.of(task, seed, split, index))


def grade(example: Example, given: Given) -> bool:
    """Whether the answer is right."""
    return TASKS[example.task].grade(example, given)
