"""The nano model's tasks: the same for the same numbers, parts that share no question, answers that are graded right."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inkling_jax.errors import InputError
from inkling_jax.evals.nano.arithmetic import steps
from inkling_jax.evals.nano.example import Example, Given
from inkling_jax.evals.nano.sequence import training_sequence
from inkling_jax.evals.nano.tasks import TASKS, grade, make_example
from inkling_jax.evals.nano.tokenizer import build_tokenizer, write_processing_files
from inkling_jax.evals.nano.tones import LOWEST, NOTES, RATE
from inkling_jax.evals.nano.tools import is_valid_call
from inkling_jax.evals.nano.world import FOLLOWING, PEOPLE
from inkling_jax.inputs import chat
from inkling_jax.inputs.control import CONTROL_TOKENS
from inkling_jax.inputs.images import ImageConfig
from inkling_jax.inputs.segments import Control, Text
from inkling_jax.inputs.tokenizer import Tokenizer

LONGEST = 768  # tokens of a sequence that the model is trained on


@functools.cache
def examples(task: str, split: Any, count: int = 300) -> list[Example]:
    """The first examples of a part."""
    return [make_example(task, 0, split, index) for index in range(count)]


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processing files lie."""
    where = tmp_path_factory.mktemp("nano")
    write_processing_files(where)
    return where


@pytest.fixture(scope="session")
def tokenizer(directory: Path) -> Tokenizer:
    """The nano model's tokenizer, read as a checkpoint's."""
    return Tokenizer.from_directory(directory, None)


def plain(value: Any) -> Any:
    """A value that can be compared: arrays as lists."""
    if isinstance(value, dict | list | tuple):
        return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else [plain(v) for v in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def answer_of(example: Example) -> Given:
    """The right answer, as a model would give it."""
    message = example.messages[-1]
    calls = tuple(SimpleNamespace(**call["function"]) for call in message.get("tool_calls", ()))
    return Given(message["content"] or "", message.get("reasoning_content", ""), calls)


def asked(example: Example) -> str:
    """All texts that the user says."""
    texts: list[str] = []
    for message in example.messages:
        if message["role"] == "user":
            content = message["content"]
            texts += [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
    return "\n".join(texts)


@pytest.mark.parametrize("task", TASKS)
def test_examples_are_the_same_each_time(task: str) -> None:
    """An example depends on its four arguments alone, and on each of them."""
    made = plain(make_example(task, 3, "train", 7).messages)
    assert plain(make_example(task, 3, "train", 7).messages) == made
    others = (make_example(task, 4, "train", 7), make_example(task, 3, "held-out", 7), make_example(task, 3, "train", 8))
    assert all(plain(other.messages) != made for other in others)


def test_unknown_task_is_told() -> None:
    """The error names the task and those that there are."""
    with pytest.raises(InputError, match="'singing'.*arithmetic"):
        make_example("singing", 0, "train", 0)


def questions(task: str, example: Example) -> Iterator[object]:
    """What must not be asked in both parts, as it is found in the messages and not by what drew them."""
    text = asked(example)
    if task in ("arithmetic", "effort"):
        (operands,) = re.findall(r"(\d+) ?([+*-]|plus|minus|times) ?(\d+)", text)
        yield operands[0], {"plus": "+", "minus": "-", "times": "*"}.get(operands[1], operands[1]), operands[2]
    elif task.startswith("lookup"):
        yield from ((key, re.findall(rf" {key}=(\d+)", text)[0]) for key in re.findall(r"(\w+)[.?](?:\n|$)", text))
    elif task == "world":
        following = {phrase.split("{")[0].lower() for phrases in FOLLOWING.values() for phrase in phrases}
        known = (line.lower().rstrip("?.") for line in text.split("\n"))
        yield from (line for line in known if not re.search(r"\b(s?he|her|his)\b", line) and line + "?" not in following)
    elif task == "shapes":
        (image,) = [part["image"] for part in example.messages[0]["content"] if part["type"] == "image"]
        yield image.tobytes()
    elif task == "tones":
        yield example.answer if " are " in example.answer else example.messages[0]["content"][0]["audio"][0].tobytes()
    elif task == "tools":
        yield text
    else:
        yield text if task == "copy" else text.split("\n")[-1]


@pytest.mark.parametrize("task", TASKS)
def test_parts_share_no_question(task: str) -> None:
    """What is asked of the held-out part is not asked in training, but for what everybody says first."""
    trained = {question for example in examples(task, "train", 600) for question in questions(task, example)}
    held_out = {question for example in examples(task, "held-out") for question in questions(task, example)}
    assert len(trained) > 100 and len(held_out) > 20
    assert trained.isdisjoint(held_out), sorted(map(str, trained & held_out))[:5]


def test_arithmetic_of_one_task_is_not_trained_in_the_other() -> None:
    """The two tasks draw from the same problems: what one holds out, the other does too."""
    trained = {q for task in ("arithmetic", "effort") for e in examples(task, "train", 600) for q in questions(task, e)}
    for task in ("arithmetic", "effort"):
        assert trained.isdisjoint(q for example in examples(task, "held-out") for q in questions(task, example))


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_count_and_others_do_not(task: str) -> None:
    """The answer itself is right; that to another question, none at all and one with a word more are not."""
    for example, other in pairwise(examples(task, "held-out")[:60]):
        right, wrong = answer_of(example), answer_of(other)
        assert grade(example, right)
        assert not grade(example, Given(""))
        if right.tool_calls or task in ("arithmetic", "effort"):
            assert not grade(example, dataclasses.replace(right, content="none", tool_calls=()))
        else:
            assert not grade(example, dataclasses.replace(right, content=right.content + " again"))
        if other.answer != example.answer:
            assert not grade(example, wrong)


def test_thoughts_are_true_arithmetic() -> None:
    """Every equation of every thought holds, the digits written make the result, and more effort thinks more."""
    for example in examples("arithmetic", "train") + examples("effort", "train"):
        thought = example.messages[-1].get("reasoning_content", "")
        assert bool(thought) == (steps(example.effort) > 0)
        for equation in re.findall(r"\d+(?:[+*-]\d+)*(?:=\d+(?:[+*-]\d+)*)+", thought):
            *sides, last = equation.split("=")
            for side, result in zip(sides, [*sides[1:], last], strict=True):  # digits and signs alone reach eval
                assert eval(side) == int(re.findall(r"\d+", result)[0]), equation
        written = re.findall(r"write (\d)", thought) or re.findall(r"=(\d), borrow", thought)
        left, sign, right, result = re.fullmatch(r"(\d+) ([+*-]) (\d+) = (-?\d+)", example.messages[-1]["content"]).groups()  # pyright: ignore
        assert (
            {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(left), int(right)) == int(result) == example.answer
        )
        if written:
            carry = re.findall(r"carry (\d+)", thought)[-1:] or ["0"]
            assert int("".join([carry[0], *reversed(written)])) == abs(example.answer)
    lengths = {level: [] for level in range(4)}
    for example in examples("effort", "train"):
        lengths[steps(example.effort)].append(len(example.messages[-1].get("reasoning_content", "")))
    means = [np.mean(lengths[level]) for level in range(4)]
    assert means[0] == 0 and all(less * 1.5 < more for less, more in pairwise(means))


def test_looked_up_pair_is_beyond_the_window(tokenizer: Tokenizer) -> None:
    """More than 128 tokens lie between the pair and the question about it; the answer is the pair's value."""
    for example in examples("lookup", "held-out")[:40]:
        text = asked(example)
        key = re.findall(r"(\w+)[.?]$", text)[0]
        start, value = re.findall(rf"^(.*? {key}=)(\d+)", text, re.DOTALL)[0]
        assert value == example.answer
        assert len(tokenizer.encode(text)) - len(tokenizer.encode(start)) > 128 + 8


def test_copies_are_the_words_asked_for() -> None:
    """What is said back is what was said."""
    for example in examples("copy", "held-out")[:40]:
        assert asked(example).endswith(example.answer.removeprefix("You said: ")) and example.answer.startswith("You said: ")


def test_calls_are_valid_and_broken_ones_are_not() -> None:
    """A right call has a declared name and its parameters; another name, a parameter less or another type is none."""
    calls = [example for example in examples("tools", "held-out") if not isinstance(example.answer, str)]
    assert len(calls) > 100
    for example in calls:
        (call,) = answer_of(example).tool_calls
        assert is_valid_call(example, Given("", tool_calls=(call,)))
        broken = [
            SimpleNamespace(name="nonesuch", arguments=call.arguments),
            SimpleNamespace(name=call.name, arguments={}),
            SimpleNamespace(name=call.name, arguments=dict.fromkeys(call.arguments)),
            SimpleNamespace(name=call.name, arguments=call.arguments | {"more": 1}),
        ]
        assert not any(is_valid_call(example, Given("", tool_calls=(one,))) for one in broken)
        assert not is_valid_call(example, Given("done"))


def test_pictures_show_what_is_said() -> None:
    """The most frequent colour that is no ground is the one named, and lies where it is said to be."""
    hues = {"red": 0, "orange": 34, "yellow": 57, "green": 120, "blue": 240, "purple": 285}
    places = {"top": (1, 0), "bottom": (1, 2), "left": (0, 1), "right": (2, 1), "middle": (1, 1)}
    located = 0
    for example in examples("shapes", "train"):
        (image,) = [part["image"] for part in example.messages[0]["content"] if part["type"] == "image"]
        pixels = image.astype(int)
        coloured = pixels.max(-1) - pixels.min(-1) > 60
        red, green, blue = pixels[coloured].mean(0)
        hue = np.degrees(np.arctan2(np.sqrt(3) * (green - blue), 2 * red - green - blue)) % 360
        named = next(colour for colour in hues if colour in example.answer)
        distance = {colour: abs((hue - angle + 180) % 360 - 180) for colour, angle in hues.items()}
        assert min(distance, key=distance.__getitem__) == named, (hue, example.answer)
        found = re.search(r"(?:in|at|on) the (top|bottom|left|right|middle)(?: (left|right))?", example.answer)
        if found:
            y, x = np.argwhere(coloured).mean(0) / image.shape[:2] * 3
            column, row = places[found[1]]
            column = {"left": 0, "right": 2}.get(found[2], column)
            assert (int(x), int(y)) == (column, row), example.answer
            located += 1
    assert located > 60


def test_tones_sound_as_they_are_named() -> None:
    """The loudest frequency of a single note is its own; clips are at most two seconds."""
    found = 0
    for example in examples("tones", "train"):
        (sound, rate), answer = example.messages[0]["content"][0]["audio"], example.answer
        assert rate == RATE and len(sound) <= 2 * RATE and np.abs(sound).max() < 1.2
        if answer.startswith("The note is"):
            note = answer.removeprefix("The note is ").removesuffix(".")
            spectrum = np.abs(np.fft.rfft(sound))
            loudest = np.argmax(spectrum) * RATE / len(sound)
            assert abs(np.log2(loudest / LOWEST) * 12 - NOTES[note]) < 0.3
            found += 1
    assert found > 20


def test_every_fact_is_trained_in_several_ways() -> None:
    """What is held out of a fact is a way to ask: others are trained."""
    texts = "\n".join(asked(example) for example in (make_example("world", 1, "train", index) for index in range(4000)))
    for name in PEOPLE:
        for relation in ("lives? |town|from|home", "job|work|do\\b|does for", "animal|pet", "eat|food|cook|like"):
            assert len(set(re.findall(rf"^.*(?:{relation}).*\b{name}\b.*$|^.*\b{name}\b.*(?:{relation}).*$", texts, re.M))) >= 3


def test_tokenizer_is_small_and_keeps_digits_apart(tokenizer: Tokenizer, directory: Path) -> None:
    """1024 ids, the control tokens last; numbers are their digits; building it again gives the same."""
    assert tokenizer.vocab_size == 1024 == 8 * 128
    assert tokenizer.control.keys() == CONTROL_TOKENS.keys()
    assert sorted(tokenizer.control.values()) == list(range(1024 - len(CONTROL_TOKENS), 1024))
    text = "In 1977 it was 305+28=333, naïve 12\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in tokenizer.encode("305")] == ["3", "0", "5"]
    assert json.loads((directory / "tokenizer.json").read_text()) == json.loads(build_tokenizer().to_str())


def test_images_are_not_grown(directory: Path) -> None:
    """The processing files say what training does: a picture of 64 x 64 is two rows of two tiles."""
    config = ImageConfig.from_directory(directory)
    assert config == ImageConfig(rescale_frac=None)
    assert config.num_patches(64, 64) == 2 * 2


def ids_of(example: Example, count: int, opening: bool, tokenizer: Tokenizer, rows: list[int]) -> list[int]:
    """Token ids of the first messages as the chat format has them, media items having `rows` in order."""
    ids: list[int] = []
    items = iter(rows)
    shown = example.messages[:count]
    for segment in chat.render(shown, tools=example.tools, effort=example.effort, add_generation_prompt=opening):
        if isinstance(segment, Control):
            ids.append(tokenizer.control_spellings[segment.spelling])
        elif isinstance(segment, Text):
            ids += tokenizer.encode(segment.text)
        else:
            ids += [tokenizer.control[f"{segment.kind}_slot"]] * next(items)
    return ids


@pytest.mark.parametrize("task", TASKS)
def test_sequence_is_what_is_served(tokenizer: Tokenizer, task: str) -> None:
    """The tokens before an answer are the prompt of that conversation, those of the answer are all that is learned."""
    for example in examples(task, "train")[:40]:
        sequence = training_sequence(example, tokenizer)
        ids, wanted = list(sequence.token_ids), np.zeros(len(sequence.token_ids), bool)
        rows = [len(item) for item in (*sequence.images, *sequence.audios)]
        whole: list[int] = []
        for n, message in enumerate(example.messages):
            if message["role"] == "assistant":
                prompt = ids_of(example, n, True, tokenizer, rows)
                whole = ids_of(example, n + 1, False, tokenizer, rows)
                assert ids[: len(prompt)] == prompt and ids[: len(whole)] == whole
                wanted[len(prompt) : len(whole)] = True
        assert np.array_equal(sequence.loss_mask, wanted)
        assert len(whole) == len(ids) <= LONGEST and ids[-1] == tokenizer.control["content_model_end_sampling"]
        assert all(patches.shape[1:] == (2, 40, 40, 3) for patches in sequence.images)
        assert all(bins.shape[1:] == (80,) for bins in sequence.audios)
        assert len(sequence.images) == (task == "shapes") and len(sequence.audios) == (task == "tones")
