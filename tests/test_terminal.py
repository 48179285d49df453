"""What a person sees of an answer, what a conversation remembers, and how commands end, without a model behind them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from text_checkpoint import USABLE

from inkling_jax import CapacityError, Delta, InputError, Prompt, SamplingParams, command_line, generate, llm, terminal
from inkling_jax.command_line import FAILED, INTERRUPTED, OK, PIPE_CLOSED, USAGE
from inkling_jax.inputs.demo_tokenizer import write_demo_tokenizer
from inkling_jax.inputs.tokenizer import Tokenizer

PARAMS = SamplingParams()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_demo_tokenizer(directory, USABLE)
    return Tokenizer.from_directory(directory, None)


class Scripted:
    """A model that says what it is told to: for each turn a list of deltas, or of what to raise in their place."""

    def __init__(self, tokenizer: Tokenizer | None, *turns: list[Any]):
        self.tokenizer, self.turns = tokenizer, list(turns)
        self.asked: list[list[dict[str, Any]]] = []

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def chat_prompt(self, messages: list[dict[str, Any]], effort: str | None = None) -> Prompt:
        self.asked.append(messages)
        return Prompt([1] * len(messages))

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Delta]:
        for item in self.turns.pop(0):
            if not isinstance(item, Delta):
                raise item
            yield item


class Screen(io.StringIO):
    """A stream that a person looks at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[io.StringIO, io.StringIO]]:
    """`streams(terminal, typed="")`: standard output and error of a terminal or not, and what comes in."""

    def replace(terminal: bool, typed: str = "") -> tuple[io.StringIO, io.StringIO]:
        kind = Screen if terminal else io.StringIO
        out, err = kind(), kind()
        for name, stream in (("stdout", out), ("stderr", err), ("stdin", io.StringIO(typed))):
            monkeypatch.setattr(sys, name, stream)
        return out, err

    return replace


def said(*pieces: str, end: str | None = "stop") -> list[Delta]:
    return [*(Delta(piece, (7,)) for piece in pieces), Delta("", (), end)]


def test_a_terminal_is_not_commanded(streams: Callable, tokenizer: Tokenizer) -> None:
    """Control characters are shown there, not obeyed, line ends and tabs apart; elsewhere the text is as it is."""
    text = "a\x1b[2J\x07\r\x7f\x9b\tb\nc"
    for person, wanted in ((True, "a␛[2J␇␍␡�\tb\nc\n"), (False, text + "\n")):
        out, _ = streams(person)
        terminal.answer(Scripted(tokenizer, said(text)), Prompt([1]), PARAMS, terminal.Display())  # pyright: ignore
        assert out.getvalue() == wanted


def test_a_note_stands_until_there_is_text(streams: Callable, tokenizer: Tokenizer) -> None:
    """On a terminal, and not when told to be quiet; it is erased before the text, and where none comes."""
    for turn in (said("x"), said(), [KeyboardInterrupt()]):
        _, err = streams(True)
        terminal.answer(Scripted(tokenizer, turn), Prompt([1]), PARAMS, terminal.Display())  # pyright: ignore
        note, _, rest = err.getvalue().partition(" ...")
        assert note.startswith("working") and rest == "\r\x1b[K"
    for person, note in ((True, False), (False, True)):
        _, err = streams(person)
        terminal.answer(Scripted(tokenizer, said("x")), Prompt([1]), PARAMS, terminal.Display(note=note))  # pyright: ignore
        assert err.getvalue() == ""


@pytest.mark.parametrize(
    ("turn", "reason", "code"),
    [
        (said("x", "y"), "stop", OK),
        (said("x", end="length"), "length", OK),
        ([Delta("x", (7,)), KeyboardInterrupt()], "cancelled", INTERRUPTED),
        ([Delta("x", (7,)), Delta("", (), "error", "not finite")], "error", FAILED),
    ],
)
def test_how_an_answer_ends(turn: list[Any], reason: str, code: int, streams: Callable, tokenizer: Tokenizer) -> None:
    """The reason, the exit code, what was said until then, and a line end after it."""
    out, _ = streams(False)
    found = terminal.answer(Scripted(tokenizer, turn), Prompt([1, 2]), PARAMS, terminal.Display())  # pyright: ignore
    assert (found.finish_reason, found.exit_code, found.prompt_tokens) == (reason, code, 2)
    assert found.text + "\n" == out.getvalue()
    assert found.token_ids == (7,) * len(found.text)
    assert "2 tokens of prompt" in found.statistics() and f"finished: {reason}" in found.statistics()


def test_compiling_is_counted_apart(streams: Callable, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds to the first token, one of them compiling; then two seconds for three tokens, one of them compiling."""
    streams(False)
    clock = iter([10.0, 12.0, 14.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))

    def compiling(model: Scripted, *_: object) -> Iterator[Delta]:
        for ids in ((7,), (8, 9, 10)):
            jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 1.0)
            jax.monitoring.record_event_duration_secs("/jax/another/event", 50.0)
            yield Delta("x", ids)

    monkeypatch.setattr(Scripted, "stream", compiling)
    found = terminal.answer(Scripted(tokenizer), Prompt([1]), PARAMS, terminal.Display())  # pyright: ignore
    assert (found.first_token_s, found.compile_s, found.decode_s, found.tokens_per_second) == (2.0, 2.0, 1.0, 3.0)


def test_a_conversation_remembers_what_was_said_and_thought(streams: Callable, tokenizer: Tokenizer) -> None:
    """Thinking apart from the text, as spec 6 separates them by control tokens; the system message stays first."""
    role, encode = tokenizer.control, tokenizer.encode
    thinking = [role["content_thinking"], *encode("hm"), role["end_message"], role["message_model"]]
    first = [Delta("hmyes", (*thinking, role["content_text"], *encode("yes"), role["end_message"])), Delta("", (), "stop")]
    model = Scripted(tokenizer, first, [Delta("a", tuple(encode("a"))), KeyboardInterrupt()], said())
    streams(False, "one\n \ntwo\nthree")
    assert terminal.converse(model, PARAMS, system="be brief", effort=None, quiet=True) == OK  # pyright: ignore
    system = {"role": "system", "content": "be brief"}
    one = [{"role": "user", "content": "one"}, {"role": "assistant", "reasoning_content": "hm", "content": "yes"}]
    two = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "a"}]
    assert model.asked == [[system, one[0]], [system, *one, two[0]], [system, *one, *two, {"role": "user", "content": "three"}]]


def test_a_failed_turn_ends_a_conversation_that_no_person_holds(streams: Callable, tokenizer: Tokenizer) -> None:
    """By the exit code of what went wrong."""
    model = Scripted(tokenizer, [Delta("", (), "error", "not finite")], said("never"))
    _, err = streams(False, "one\ntwo\n")
    assert terminal.converse(model, PARAMS, system=None, effort=None, quiet=True) == FAILED  # pyright: ignore
    assert err.getvalue() == "error: not finite\n" and len(model.asked) == 1
    model = Scripted(tokenizer, [CapacityError("too long")])
    streams(False, "one\n")
    with pytest.raises(CapacityError):
        terminal.converse(model, PARAMS, system=None, effort=None, quiet=True)  # pyright: ignore


def test_an_answer_that_fails_is_exit_code_1(
    streams: Callable, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was made is printed, then the error; in JSON too."""
    write_demo_tokenizer(tmp_path, USABLE)
    monkeypatch.setattr(generate, "start_jax", lambda: "cpu")
    for options, wanted in (((), "x\n"), (("--json",), '"finish_reason": "error"')):
        model = Scripted(tokenizer, [Delta("x", (7,)), Delta("", (), "error", "the logits of step 3 are not finite")])
        monkeypatch.setattr(llm, "load", lambda *_, model=model, **__: model)
        out, err = streams(False)
        assert generate.main(["--model", str(tmp_path), "--prompt", "x", "--quiet", *options]) == FAILED
        assert wanted in out.getvalue() and err.getvalue() == "error: the logits of step 3 are not finite\n"


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (InputError("field x is\nwrong"), USAGE, "error: field x is wrong\n"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), USAGE, "error: [Errno 2] No such file or directory: 'a/b'\n"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand more"), USAGE, "(RESOURCE_EXHAUSTED: Out of memory)"),
        (MemoryError(), USAGE, "error: out of memory"),
        (KeyboardInterrupt(), INTERRUPTED, "\ninterrupted\n"),
    ],
)
def test_how_a_command_ends(error: BaseException, code: int, told: str, streams: Callable) -> None:
    """What the user can mend is one line and no stack trace."""

    def command() -> int:
        raise error

    _, err = streams(False)
    assert command_line.run(command) == code
    assert told in err.getvalue() and err.getvalue().lstrip("\n").count("\n") == 1


def test_a_fault_of_ours_keeps_its_stack_trace(streams: Callable) -> None:
    """It is for the bug report; and the code of a command that ends well is its own."""

    def command() -> int:
        raise RuntimeError("not ours to explain")

    streams(False)
    with pytest.raises(RuntimeError, match="not ours"):
        command_line.run(command)
    assert command_line.run(lambda: 7) == 7


def test_a_closed_pipe_found_at_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text still buffered when the reader has gone: as quiet as one that was written."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        stream.write("never read")
        assert command_line.run(lambda: 0) == PIPE_CLOSED
        stream.write("nor this, into nothing")
