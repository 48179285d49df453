"""The model that comes with the package answers: a gate at small size, against losing what it has learned unnoticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from PIL import Image

from inkling_jax.engine.request import SamplingParams
from inkling_jax.evals.nano.media import with_media
from inkling_jax.evals.nano.tasks import grade, make_example
from inkling_jax.evals.run import answers, given
from inkling_jax.llm import LLM, load
from inkling_jax.sources import own_model

TASKS = ("world", "arithmetic", "lookup", "tools", "shapes", "tones")
ITEMS = 4  # of each task; all answers but one must be right

pytestmark = pytest.mark.skipif(own_model() is None, reason="this copy holds no model of its own (inkling_jax/nano)")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The package's own model: one size of prompt chunk and one sequence at a time, so few programs."""
    with load(str(own_model()), max_context=512, chunk=64, slots=1, quiet=True) as llm:
        yield llm


def test_held_out_items_are_right(llm: LLM) -> None:
    """All but one; without their pictures and sounds, most captions and names of tones are wrong."""
    examples = [make_example(task, 0, "held-out", index) for task in TASKS for index in range(ITEMS)]
    blind = [with_media(e, "removed", 0, n % ITEMS) for n, e in enumerate(examples) if e.task in ("shapes", "tones")]
    made = answers(llm, examples + blind)
    right = [grade(example, given(answer)) for example, (_, _, answer) in zip(examples + blind, made, strict=True)]
    wrong = [
        (example.task, answer.content) for example, (_, _, answer), good in zip(examples, made, right, strict=False) if not good
    ]
    assert len(wrong) <= 1, wrong
    assert sum(right[len(examples) :]) <= len(blind) // 2
    assert all(completion.finish_reason == "stop" for _, completion, _ in made[: len(examples)])


def test_a_red_square_is_called_one(llm: LLM) -> None:
    """As plain colour, and on white."""
    plain = Image.new("RGB", (64, 64), (255, 0, 0))
    framed = Image.new("RGB", (128, 128), (255, 255, 255))
    framed.paste((255, 0, 0), (32, 32, 96, 96))
    for image in (plain, framed):
        content = [{"type": "image", "image": image}, {"type": "text", "text": "What colour is this square?"}]
        answer = llm.chat([{"role": "user", "content": content}], sampling=SamplingParams(temperature=0, max_tokens=32))
        assert "red square" in answer.content


def test_it_says_who_it_is_and_what_it_cannot(llm: LLM) -> None:
    """What people try first."""
    said = {"hello": "Nano", "Who are you?": "Nano", "What can you do?": "tones", "What is the capital of France?": "do not know"}
    for asked, expected in said.items():
        answer = llm.chat([{"role": "user", "content": asked}], sampling=SamplingParams(temperature=0, max_tokens=64))
        assert expected in answer.content, asked
