"""The nano model's tasks: the same for the same numbers, parts that share no question, answers that are graded right."""

from __future__ import annotations

import pytest

from inkling_jax.errors import InputError
from inkling_jax.evals.nano.tasks import TASKS, make_example


@pytest.mark.parametrize("task", TASKS)
def test_examples_are_the_same_each_time(task: str) -> None:
    """An example depends on its four arguments alone, and on each of them."""
    made = make_example(task, 3, "train", 7)
    assert repr(make_example(task, 3, "train", 7).messages) == repr(made.messages)
    others = [make_example(task, *rest) for rest in ((4, "train", 7), (3, "held-out", 7), (3, "train", 8))]
    assert all(repr(other.messages) != repr(made.messages) for other in others)


def test_unknown_task_is_told() -> None:
    """The error names the task and those that there are."""
    with pytest.raises(InputError, match="'singing'.*arithmetic"):
        make_example("singing", 0, "train", 0)
