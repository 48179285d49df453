"""A conversation line by line: what it remembers, what its commands do, and what a wrong line costs."""

from __future__ import annotations

import functools
import io
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from scripted import CALL, END, MODEL, SAY, THINK, ScriptedEngine, Step, demo_tokenizer, ids_of, scripted_llm

from inkling_jax import LLM, CapacityError, InputError, SamplingParams
from inkling_jax.chat_loop import ChatLoop
from inkling_jax.command_line import FAILED, OK
from inkling_jax.inputs.processor import Processor
from inkling_jax.inputs.tokenizer import Tokenizer

Ids = Callable[..., tuple[int, ...]]
Talk = Callable[..., tuple[int, LLM, str, str]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return demo_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> Ids:
    return functools.partial(ids_of, tokenizer)


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    """A picture of 41 x 41 pixels, which pre-scaling makes 82: three tiles by three."""
    Image.new("RGB", (41, 41), "red").save(tmp_path / "a cat.png")
    return tmp_path / "a cat.png"


class Screen(io.StringIO):
    """A stream that a person looks at, or types into."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def talk(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """`talk(typed, scripts, person=False, **options)`: exit code, model, standard output and error of a conversation."""

    def hold(typed: str, scripts: list[list[Step]], person: bool = False, **options: Any) -> tuple[int, LLM, str, str]:
        kind = Screen if person else io.StringIO
        out, err = kind(), kind()
        for name, stream in (("stdout", out), ("stderr", err), ("stdin", kind(typed))):
            monkeypatch.setattr(sys, name, stream)
        llm = scripted_llm(tokenizer, *scripts)
        code = ChatLoop(llm, SamplingParams(), **{"quiet": True, **options}).run()
        return code, llm, out.getvalue(), err.getvalue()

    return hold


def engine_of(llm: LLM) -> ScriptedEngine:
    assert isinstance(llm.engine, ScriptedEngine)
    return llm.engine


def prompts(llm: LLM) -> list[tuple[int, ...]]:
    return [request.prompt_ids for request in engine_of(llm).requests]


def wanted(llm: LLM, messages: list, **options: Any) -> tuple[int, ...]:
    return tuple(llm.chat_prompt(messages, **options).token_ids)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_conversation_remembers_what_was_said_and_thought(talk: Talk, ids: Ids) -> None:
    """Thinking apart from the text, as spec 6 separates them; the system message stays first; an interrupted answer counts."""
    first = [ids(THINK, "hm", END, MODEL, SAY, "yes", END), "stop"]
    system = {"role": "system", "content": "be brief"}
    scripts = [first, [ids("a"), KeyboardInterrupt()], ["stop"]]
    code, llm, out, _ = talk("one\n \ntwo\nthree", scripts, history=[system], effort="low")
    assert code == OK
    assert out == "yes\n\n\n"
    one = [user("one"), {"role": "assistant", "reasoning_content": "hm", "content": "yes"}]
    two = [user("two"), {"role": "assistant", "content": "a"}]
    turns = ([system, one[0]], [system, *one, two[0]], [system, *one, *two, user("three")])
    assert prompts(llm) == [wanted(llm, messages, effort="low") for messages in turns]


def test_a_failed_turn_ends_a_conversation_that_no_person_holds(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the exit code of what went wrong; a person goes on."""
    code, llm, _, err = talk("one\ntwo\n", [["error"], ["stop"]])
    assert (code, err, len(prompts(llm))) == (FAILED, "error: the logits are not finite\n", 1)
    code, llm, _, err = talk("one\ntwo\n", [["error"], ["stop"]], person=True)
    assert (code, len(prompts(llm))) == (OK, 2) and "error: the logits are not finite\n" in err

    def refuse(*_: object) -> int:
        raise CapacityError("too long")

    monkeypatch.setattr(ScriptedEngine, "add", refuse)
    with pytest.raises(CapacityError):
        talk("one\n", [])
    code, llm, _, err = talk("one\ntwo\n", [], person=True)
    assert code == OK and err.count("error: too long (this turn is forgotten)\n") == 2


@pytest.mark.parametrize("person", [False, True])
def test_items_go_with_the_next_turn(talk: Talk, ids: Ids, cat: Path, tmp_path: Path, person: bool) -> None:
    """In order of the commands, before the text; read when attached, so that a file may go; kept in later prompts."""
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(2 * 1600))
    lines = f"/image {cat}\n/audio '{tmp_path}/a.wav'\nWhat?\nAnd?\n/quit\nnever"
    code, llm, _, err = talk(lines, [[ids(SAY, "a"), "stop"], ["stop"]], person, quiet=False)
    assert code == OK
    first, second = engine_of(llm).requests
    content = [{"type": "image", "image": str(cat)}, {"type": "audio", "audio": f"{tmp_path}/a.wav"}, "What?"]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}, user("And?")]
    assert [first.prompt_ids, second.prompt_ids] == [wanted(llm, messages[:1]), wanted(llm, messages)]
    for request in (first, second):
        assert [(item.tower, len(item.values)) for item in request.media] == [("vision", 9), ("audio", 2)]
    assert f"attached to your next line: {cat}\n" in err and "[" in err


def test_a_wrong_path_is_told_and_the_talk_goes_on(talk: Talk, ids: Ids, tmp_path: Path) -> None:
    """One line; where no person types, it ends the program."""
    (tmp_path / "x.png").write_text("no picture")
    wrong = {
        "/image nowhere.png": "nowhere.png: no such file",
        f"/image {tmp_path}/x.png": "x.png",
        f"/audio {tmp_path}": "is a directory",
        "/image": "/image wants a path: /image PATH",
        "/image https://a.b/c.png": "is not fetched: download it and give the path",
        "/imag x": "unknown command /imag: /help lists them; a line that begins with a space is none",
    }
    code, llm, out, err = talk("\n".join([*wrong, "Hi"]), [[ids(SAY, "a"), "stop"]], person=True)
    assert code == OK and prompts(llm) == [wanted(llm, [user("Hi")])] and out.endswith("a\n> ")
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == len(wrong) and all(told in line for told, line in zip(wrong.values(), lines, strict=True))
    for line, told in wrong.items():
        with pytest.raises(InputError) as error:
            talk(line + "\nHi", [])
        assert told in str(error.value)


def test_lines_that_only_look_like_commands_are_said(talk: Talk) -> None:
    code, llm, _, _ = talk("/etc/hosts\n /help\n//\n", [["stop"]] * 3, person=True)
    assert code == OK
    said = ["/etc/hosts", " /help", "//"]
    assert prompts(llm) == [wanted(llm, [user(text) for text in said[: n + 1]]) for n in range(3)]


def test_help_and_reset(talk: Talk, ids: Ids, cat: Path) -> None:
    """Forgotten: what was said, what is attached, and what a tool was to answer; the system message is not."""
    system = {"role": "system", "content": "be brief"}
    call = ids("f", CALL, '{"name":"f","args":{}}', END)
    lines = f"one\n/help\n/image {cat}\n/reset\ntwo\n"
    code, llm, _, err = talk(lines, [[call, "stop"], ["stop"]], person=True, history=[system])
    assert code == OK
    assert prompts(llm) == [wanted(llm, [system, user("one")]), wanted(llm, [system, user("two")])]
    assert "/image PATH, /audio PATH, /video PATH" in err and "Ctrl-C stops an answer" in err


def test_what_tools_answer(talk: Talk, ids: Ids) -> None:
    """Asked for call by call, under the name of the tool, which commands nothing; then the model goes on."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    calls = ids("f", CALL, '{"name":"f","args":{"a":1}}', END, MODEL, "g\x1b", CALL, '{"name":"g\\u001b","args":{}}', END)
    scripts: list[list[Step]] = [[calls, "stop"], [ids(SAY, "warm", END), "stop"]]
    code, llm, out, err = talk("Warm?\n7 C\nyes\n", scripts, person=True, tools=tools)
    assert code == OK
    assert out == '> -> f {"a": 1}\n-> g␛ {}\nf answers> g␛ answers> warm\n> '
    made = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate([("f", {"a": 1}), ("g\x1b", {})])
    ]
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": text} for n, text in enumerate(["7 C", "yes"])]
    messages = [user("Warm?"), {"role": "assistant", "content": "", "tool_calls": made}, *results]
    assert prompts(llm) == [wanted(llm, messages[:1], tools=tools), wanted(llm, messages, tools=tools)]
    code, llm, out, _ = talk("Warm?\n7 C\nyes\n", scripts, tools=tools)
    assert (code, len(prompts(llm)), out) == (OK, 2, '-> f {"a": 1}\n-> g\x1b {}\nwarm\n')


def test_an_interrupt_while_an_item_is_read(talk: Talk, monkeypatch: pytest.MonkeyPatch, cat: Path) -> None:
    """The loop goes on, nothing is attached; at the prompt it leaves."""
    monkeypatch.setattr(Processor, "prompt", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    code, llm, _, err = talk(f"/image {cat}\nHi\n", [["stop"]], person=True)
    assert (code, prompts(llm)) == (OK, [wanted(llm, [user("Hi")])]) and "stopped\n" in err
    with pytest.raises(KeyboardInterrupt):
        talk(f"/image {cat}\nHi\n", [["stop"]])


def test_a_model_that_is_closed_ends_the_talk(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a second Ctrl-C within one step does: no turn could be answered any more."""

    def close(self: ScriptedEngine) -> list:
        self.closed = True
        return []

    monkeypatch.setattr(ScriptedEngine, "step", close)
    with pytest.raises(InputError, match="this model was closed"):
        talk("one\ntwo\n", [[]], person=True)


def test_thinking_is_shown_where_asked_for(talk: Talk, ids: Ids) -> None:
    script = [ids(THINK, "hm", END, MODEL, SAY, "y"), "stop"]
    assert talk("x\n", [script], show_thinking=True)[3] == "thinking: hm\n"
    assert talk("x\n", [script])[3] == ""
