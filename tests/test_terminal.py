"""What a person sees of an answer, and how commands end, with an engine behind them that says what it is told to."""

from __future__ import annotations

import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from scripted import CALL, END, MODEL, SAY, THINK, Step, demo_tokenizer, ids_of, scripted_llm

from inkling_jax import Delta, InputError, Prompt, SamplingParams, command_line, generate, llm, terminal
from inkling_jax.command_line import FAILED, INTERRUPTED, OK, PIPE_CLOSED, USAGE
from inkling_jax.inputs.tokenizer import Tokenizer

PARAMS = SamplingParams()
ERASE, DIM, PLAIN = "\r\x1b[K", "\x1b[2m", "\x1b[0m"
Ids = Callable[..., tuple[int, ...]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return demo_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> Ids:
    """`ids("<|control|>", "text", ...)`: one after the other."""
    return functools.partial(ids_of, tokenizer)


class Screen(io.StringIO):
    """A stream that a person looks at."""

    def isatty(self) -> bool:
        return True


Streams = Callable[..., tuple[io.StringIO, io.StringIO]]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """`streams(terminal)`: standard output and error of a terminal or not."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def replace(terminal: bool) -> tuple[io.StringIO, io.StringIO]:
        out, err = (Screen() if terminal else io.StringIO() for _ in range(2))
        for name, stream in (("stdout", out), ("stderr", err)):
            monkeypatch.setattr(sys, name, stream)
        return out, err

    return replace


def answered(tokenizer: Tokenizer | None, *script: Step, chat: bool = False, **display: bool) -> terminal.Answer:
    shown = terminal.Display(**{"note": False, **display})
    return terminal.answer(scripted_llm(tokenizer, script), Prompt([1, 2]), PARAMS, shown, first_call=0 if chat else None)


def test_a_terminal_is_not_commanded(streams: Streams, tokenizer: Tokenizer, ids: Ids) -> None:
    """Control characters are shown there, not obeyed, line ends and tabs apart; elsewhere the text is as it is."""
    text, seen = "a\x1b[2J\x07\r\x7f\x9b\tb\nc", "a␛[2J␇␍␡�\tb\nc"
    for person, wanted in ((True, seen), (False, text)):
        out, err = streams(person)
        answered(tokenizer, ids(text), "stop")
        assert out.getvalue() == wanted + "\n"
        out, err = streams(person)
        answered(tokenizer, ids(THINK, text, END, MODEL, SAY, text), "stop", chat=True, thinking=True)
        assert out.getvalue() == wanted + "\n"
        assert err.getvalue() == (f"{DIM}{seen}{PLAIN}\n" if person else f"thinking: {text}\n")


def test_a_note_stands_until_there_is_text(streams: Streams, tokenizer: Tokenizer, ids: Ids) -> None:
    """On a terminal, and not when told to be quiet; it is erased before the text, and where none comes."""
    for script in ([ids("x"), "stop"], ["stop"], [KeyboardInterrupt()]):
        _, err = streams(True)
        answered(tokenizer, *script, note=True)
        note, _, rest = err.getvalue().removeprefix(ERASE).partition(" ...")
        assert note.startswith("working") and rest == ERASE
    for person, note in ((True, False), (False, True)):
        _, err = streams(person)
        answered(tokenizer, ids("x"), "stop", note=note)
        assert err.getvalue() == ""


def test_thinking_that_is_not_shown_is_noted(streams: Streams, tokenizer: Tokenizer, ids: Ids) -> None:
    """At a terminal, in the place of the note; the answer says the same either way."""
    script = [ids(THINK, "h"), ids("m", END, MODEL, SAY, "y"), ids("es"), "stop"]
    out, err = streams(True)
    found = answered(tokenizer, *script, chat=True, note=True)
    working, thinking = "working (a first run compiles) ...", "thinking ..."
    assert (out.getvalue(), err.getvalue()) == ("yes\n", ERASE + working + ERASE + thinking + ERASE)
    assert found.text == "yes" and found.chat is not None and found.chat.reasoning == "hm"
    out, err = streams(False)
    answered(tokenizer, *script, chat=True, note=True)
    assert (out.getvalue(), err.getvalue()) == ("yes\n", "")


def test_thinking_is_dimmed_or_named(streams: Streams, tokenizer: Tokenizer, ids: Ids, monkeypatch: pytest.MonkeyPatch) -> None:
    """On lines of its own on standard error: dim at a terminal that can, elsewhere behind its name."""
    script = [ids(THINK, "a"), ids("b\n", END, MODEL, SAY, "c"), ids(END, MODEL, THINK, "d", END, MODEL, SAY, "e"), "stop"]
    for person, before, after in ((True, DIM, PLAIN), (False, "thinking: ", "")):
        out, err = streams(person)
        answered(tokenizer, *script, chat=True, thinking=True)
        assert out.getvalue() == "c\ne\n"
        assert err.getvalue() == f"{before}ab\n{after}{before}d{after}\n"
    for variable, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        _, err = streams(True)
        monkeypatch.setenv(variable, value)
        answered(tokenizer, *script, chat=True, thinking=True)
        assert err.getvalue() == "thinking: ab\nthinking: d\n"


def test_an_interrupt_while_thinking_leaves_a_clean_line(streams: Streams, tokenizer: Tokenizer, ids: Ids) -> None:
    out, err = streams(True)
    found = answered(tokenizer, ids(THINK, "hm"), KeyboardInterrupt(), chat=True, thinking=True)
    assert (err.getvalue(), out.getvalue(), found.exit_code) == (f"{DIM}hm{PLAIN}\n", "\n", INTERRUPTED)
    assert found.chat is not None and found.chat.message == {"role": "assistant", "reasoning_content": "hm", "content": ""}


def test_calls_are_shown(streams: Streams, tokenizer: Tokenizer, ids: Ids) -> None:
    """A line each; one that cannot be made is an error of one line that holds what the model wrote."""
    good, bad = '{"name":"f","args":{"a":"é\\u0007"}}', '{"name":"g",\n'
    script = [ids(SAY, "Wait.", END, MODEL, "f", CALL, good, END, MODEL, "g", CALL, bad, END), "stop"]
    for person in (True, False):
        out, err = streams(person)
        answered(tokenizer, *script, chat=True)
        assert out.getvalue() == 'Wait.\n-> f {"a": "é\\u0007"}\n'
        assert err.getvalue().startswith("error: the model's call of g cannot be made (not JSON: ")
        assert repr(bad) in err.getvalue() and err.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("last", "reason", "code"),
    [("stop", "stop", OK), ("length", "length", OK), (KeyboardInterrupt(), "cancelled", INTERRUPTED), ("error", "error", FAILED)],
)
@pytest.mark.parametrize("chat", [False, True])
def test_how_an_answer_ends(
    last: Step, reason: str, code: int, chat: bool, streams: Streams, tokenizer: Tokenizer, ids: Ids
) -> None:
    """The reason, the exit code, what was said until then, and a line end after it."""
    out, _ = streams(False)
    made = ids(SAY, "x y")
    found = answered(tokenizer, made, last, chat=chat)
    assert (found.finish_reason, found.exit_code, found.prompt_tokens) == (reason, code, 2)
    assert found.text + "\n" == out.getvalue() == "x y\n"
    assert found.token_ids == made and found.error == ("the logits are not finite" if code == FAILED else None)
    assert "2 tokens of prompt" in found.statistics() and f"finished: {reason}" in found.statistics()


def test_ids_are_shown_without_a_tokenizer(streams: Streams) -> None:
    out, _ = streams(False)
    answered(None, (5, 6), (7,), "stop")
    assert out.getvalue() == "5,6,7\n"


@pytest.mark.parametrize("chat", [False, True])
def test_compiling_is_counted_apart(
    chat: bool, streams: Streams, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, ids: Ids
) -> None:
    """Two seconds to the first token, one of them compiling; then two seconds for three tokens, one of them compiling."""
    streams(False)
    clock = iter([10.0, 12.0, 14.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))

    def compiling(*_: object) -> Iterator[Delta]:
        for made in (ids(SAY), ids("x", "y", "z")):
            jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 1.0)
            jax.monitoring.record_event_duration_secs("/jax/another/event", 50.0)
            yield Delta(tokenizer.decode(made), made)

    monkeypatch.setattr(llm.LLM, "stream", compiling)
    found = answered(tokenizer, chat=chat)
    assert (found.first_token_s, found.compile_s, found.decode_s, found.tokens_per_second) == (2.0, 2.0, 1.0, 3.0)


def test_an_answer_that_fails_is_exit_code_1(
    streams: Streams, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ids: Ids
) -> None:
    """What was made is printed, then the error; in JSON too."""
    demo_tokenizer(tmp_path)
    for options, wanted in (((), "x\n"), (("--json",), '"finish_reason": "error"')):
        out, err = streams(False)
        assert command(monkeypatch, tokenizer, [ids(SAY, "x"), "error"], tmp_path, *options) == FAILED
        assert wanted in out.getvalue() and err.getvalue() == "error: the logits are not finite\n"


def command(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, script: list[Step], directory: Path, *options: str) -> int:
    """Exit code of a command whose model follows the script."""
    monkeypatch.setattr(generate, "start_jax", lambda: "cpu")
    monkeypatch.setattr(llm, "load", lambda *_, **__: scripted_llm(tokenizer, script))
    return generate.main(["--model", str(directory), "--prompt", "x", "--quiet", *options])


def test_json_of_a_chat(
    streams: Streams, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ids: Ids
) -> None:
    """Reasoning, content and calls apart, beside what every answer has; nothing else on standard output."""
    demo_tokenizer(tmp_path)
    (tmp_path / "tools.json").write_text('[{"type": "function", "function": {"name": "f"}}]')
    made = ids(
        THINK, "hm", END, MODEL, SAY, "Wait.", END, MODEL, "f", CALL, '{"name":"f","args":{"a":1}}', END, MODEL, CALL, "oh", END
    )
    out, err = streams(False)
    options = ("--json", "--tools", str(tmp_path / "tools.json"), "--show-thinking")
    assert command(monkeypatch, tokenizer, [made, "stop"], tmp_path, *options) == OK
    record = json.loads(out.getvalue())
    (malformed,) = record.pop("malformed_calls")
    assert (malformed["name"], malformed["text"]) == ("", "oh") and malformed["error"].startswith("not JSON")
    timings = record.pop("timings")
    assert timings.keys() >= {"load_s", "first_token_s"}
    assert record.pop("usage")["completion_tokens"] == len(made)
    calls = [{"id": "call_0", "name": "f", "arguments": {"a": 1}}]
    assert record == {
        "text": "Wait.",
        "reasoning": "hm",
        "content": "Wait.",
        "tool_calls": calls,
        "token_ids": list(made),
        "finish_reason": "stop",
    }
    assert err.getvalue().startswith("thinking: hm\nerror: the model's call of a tool")


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
def test_how_a_command_ends(error: BaseException, code: int, told: str, streams: Streams) -> None:
    """What the user can mend is one line and no stack trace."""

    def command() -> int:
        raise error

    _, err = streams(False)
    assert command_line.run(command) == code
    assert told in err.getvalue() and err.getvalue().lstrip("\n").count("\n") == 1


def test_a_fault_of_ours_keeps_its_stack_trace(streams: Streams) -> None:
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
