"""One example of a task, and where its randomness comes from: questions of two parts, none of which is in both."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, TypeVar

Split = Literal["train", "held-out"]
Question = TypeVar("Question", bound=Hashable)

HELD_OUT = 0.1  # of all questions
MAX_TRIES = 10_000  # to draw a question of one part


@dataclasses.dataclass(frozen=True)
class Example:
    """A conversation whose last message, an assistant's, is the answer to learn and to be graded by."""

    task: str
    messages: list[dict[str, Any]]  # as `llm.chat` takes them
    tools: list[dict[str, Any]] | None = None
    effort: str | float | None = None
    answer: Any = None  # what `grade` compares with, beside the last message


@dataclasses.dataclass(frozen=True)
class Given:
    """What a model answered, as `grade` needs it: of a ChatCompletion these fields are taken."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[Any, ...] = ()  # with `name` and `arguments`


@dataclasses.dataclass(frozen=True)
class Source:
    """Random choices of one example. `question` draws what must not be in both parts; `random` is for all else."""

    random: random.Random
    split: Split

    @classmethod
    def of(cls, task: str, seed: int, split: Split, index: int) -> Source:
        """The source of one example: the same for the same arguments, on every machine."""
        return cls(random.Random(f"{task} {seed} {split} {index}"), split)

    def question(
        self, draw: Callable[[random.Random], Question], key: Callable[[Question], Hashable] = lambda question: question
    ) -> Question:
        """A question of this part, drawn until it is one. Those of one `key` are in one part, those of None in training."""
        for _ in range(MAX_TRIES):
            question = draw(self.random)
            if is_held_out(key(question)) == (self.split == "held-out"):
                return question
        raise AssertionError(f"no question of the part {self.split!r} in {MAX_TRIES} drawn by {draw}")

    def effort(self) -> str | float | None:
        """Mostly none, which is the default; for tasks whose answers do not depend on it."""
        return self.random.choice([None, None, None, *EFFORTS])


EFFORTS = ("none", "low", "medium", "high")


def is_held_out(key: Hashable) -> bool:
    """Whether a key, told apart by its repr, belongs to the held-out part: by a hash, so none is in both. None does not."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return key is not None and int.from_bytes(digest) < HELD_OUT * 2**64


def conversation(*turns: str | Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn, the user first; a turn that is no text is a message."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": turn} if isinstance(turn, str) else dict(turn) for n, turn in enumerate(turns)]


def same_text(answer: str, content: str) -> bool:
    """Whether two answers are one, but for spaces, case and the full stop."""
    return _plain(answer) == _plain(content)


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).removesuffix(".")
