"""Tasks without their media: what shows that pictures and sounds are looked at and listened to."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from typing import Any, Literal

from inkling_jax.evals.nano.example import Example, Given
from inkling_jax.evals.nano.tasks import grade, make_example

Media = Literal["kept", "removed", "replaced"]
MEDIA_TASKS = ("shapes", "tones")
GUESSES = 800  # other held-out examples that the best guess is taken from
GUESS_SEED = 77


def with_media(example: Example, media: Media, seed: int, index: int) -> Example:
    """The example as asked for: as it is, without its item, or with that of the next one that has another answer."""
    if media == "kept" or example.task not in MEDIA_TASKS:
        return example
    item = None
    if media == "replaced":
        others = (make_example(example.task, seed, "held-out", index + step) for step in range(1, 1000))
        item = next(_item(other) for other in others if other.answer != example.answer)
    content = [part if part["type"] == "text" else item for part in example.messages[0]["content"]]
    first = {"role": "user", "content": [part for part in content if part is not None]}
    return dataclasses.replace(example, messages=[first, *example.messages[1:]])


def best_guess(examples: list[Example]) -> float:
    """The share that is right of guesses by the question alone: the answer that it most often has in the held-out part.

    A picture's question may name a colour or shape, so a guess is not worth nothing.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for index in range(GUESSES):
        other = make_example(examples[0].task, GUESS_SEED, "held-out", index)
        counts[_question(other)][other.answer] += 1
    guesses = {question: answers.most_common(1)[0][0] for question, answers in counts.items()}
    return sum(grade(example, Given(guesses.get(_question(example), ""))) for example in examples) / len(examples)


def _item(example: Example) -> dict[str, Any]:
    return next(part for part in example.messages[0]["content"] if part["type"] != "text")


def _question(example: Example) -> str:
    return next(part["text"] for part in example.messages[0]["content"] if part["type"] == "text")
