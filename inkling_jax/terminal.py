"""One answer at a terminal: shown as it comes, and timed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time

from inkling_jax.command_line import FAILED, INTERRUPTED, OK, is_terminal, print_error
from inkling_jax.compiling import compile_seconds
from inkling_jax.conversation import ChatCompletion, ChatDelta, ChatStream
from inkling_jax.engine.request import SamplingParams
from inkling_jax.inputs.prompt import Prompt
from inkling_jax.llm import LLM
from inkling_jax.outputs.tool_calls import MalformedCall, ToolCall

# A model may write any byte, and a terminal obeys some: show those below space as their pictures, the others as unknown.
_VISIBLE = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"} | {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_ERASE, _DIM, _PLAIN = "\r\x1b[K", "\x1b[2m", "\x1b[0m"


@dataclasses.dataclass
class Answer:
    """One completion and its times in seconds; compiling is counted apart, wherever it took place."""

    prompt_tokens: int
    text: str = ""  # of a chat: what was said, not what was thought
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "cancelled"
    error: str | None = None
    chat: ChatCompletion | None = None
    first_token_s: float = 0.0  # from the request to the first token, compiling included
    compile_s: float = 0.0
    decode_s: float = 0.0  # from the first token to the last, without compiling
    decode_tokens: int = 0  # made in that time

    @property
    def exit_code(self) -> int:
        """What a command that was asked for this answer exits with."""
        return {"error": FAILED, "cancelled": INTERRUPTED}.get(self.finish_reason, OK)

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of decoding; None where too little was decoded to tell."""
        return self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s > 0 else None

    def statistics(self) -> str:
        """A line for people."""
        first = f", the first after {self.first_token_s:.2f} s" if self.token_ids else ""
        compiling = f" ({self.compile_s:.1f} s of compiling)" if self.compile_s >= 0.05 else ""
        speed = f", then {self.tokens_per_second:.1f} tokens/s" if self.tokens_per_second else ""
        made = f"{len(self.token_ids)} tokens made{first}{compiling}{speed}"
        return f"[{self.prompt_tokens} tokens of prompt; {made}; finished: {self.finish_reason}]"


class Display:
    """Shows an answer as it comes: what is said on standard output, what is thought on standard error, dimmed where people look.

    Until there is something to show, a note stands on standard error where a person looks at it.
    """

    def __init__(self, *, text: bool = True, thinking: bool = False, note: bool = True):
        self._text, self._thinking, self._note = text, thinking, note and is_terminal(sys.stderr)
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self._before, self._after = (_DIM, _PLAIN) if is_terminal(sys.stderr) and not plain else ("thinking: ", "")
        self._noted = ""
        self._last = ""  # character of what was said
        self._thought = ""  # last character of the thinking that is being shown

    def __enter__(self) -> Display:
        self._write_note("working (a first run compiles) ...")
        return self

    def show(self, text: str) -> None:
        """Write a piece of what is said; on a terminal, with its control characters made visible."""
        self._end_thinking()
        self._erase_note()
        if self._text and text:
            self._last = text[-1]
            print(visible(text) if is_terminal(sys.stdout) else text, end="", flush=True)

    def think(self, text: str) -> None:
        """Write a piece of what is thought, or note that there is some."""
        if not self._thinking:
            self._write_note("thinking ...")
            return
        self._erase_note()
        if not self._thought:
            self._end_line()
            print(self._before, end="", file=sys.stderr)
        self._thought = text[-1]
        print(visible(text) if is_terminal(sys.stderr) else text, end="", file=sys.stderr, flush=True)

    def call(self, call: ToolCall | MalformedCall) -> None:
        """Write a call on a line of its own, one that cannot be made as an error."""
        self._end_thinking()
        self._erase_note()
        if isinstance(call, MalformedCall):
            self._end_line()
            print_error(f"the model's call of {call.name or 'a tool'} cannot be made ({call.error}): {call.text!r}")
        else:
            self._end_line()
            self.show(f"-> {call.name} {json.dumps(call.arguments, ensure_ascii=False)}\n")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end_thinking()
        self._erase_note()
        if self._text and self._last != "\n" and kind is None:
            print(flush=True)

    def _end_line(self) -> None:
        """Begin a new line where something was said on this one."""
        if self._text and self._last not in ("", "\n"):
            self._last = "\n"
            print(flush=True)

    def _end_thinking(self) -> None:
        if self._thought:
            print(self._after, end="" if self._thought == "\n" else "\n", file=sys.stderr, flush=True)
            self._thought = ""

    def _write_note(self, text: str) -> None:
        if self._note and text != self._noted:
            self._noted = text
            print(f"{_ERASE}{text}", end="", file=sys.stderr, flush=True)

    def _erase_note(self) -> None:
        if self._note:
            print(_ERASE, end="", file=sys.stderr, flush=True)
            self._note = False


def visible(text: str) -> str:
    """Text with the characters that a terminal obeys made visible, line ends and tabs apart."""
    return text.translate(_VISIBLE)


def answer(llm: LLM, prompt: Prompt, params: SamplingParams, display: Display, *, first_call: int | None = None) -> Answer:
    """Stream one completion to `display`, and return it with its times. Ctrl-C ends it as "cancelled".

    `first_call`: the number in the id of the first tool call, of a chat; None: the prompt is plain text, and so is what follows.
    """
    result = Answer(len(prompt.token_ids))
    start = first = last = time.monotonic()
    compiled_before_first = 0.0
    deltas = llm.stream(prompt, params) if first_call is None else ChatStream(llm, prompt, params, first_call)
    with compile_seconds() as compiled, display, contextlib.suppress(KeyboardInterrupt), contextlib.closing(deltas):
        for delta in deltas:
            last = time.monotonic()
            if result.token_ids:
                result.decode_tokens += len(delta.token_ids)
            else:
                first, compiled_before_first = last, sum(compiled)
            if isinstance(delta, ChatDelta):
                _show_chat(delta, display)
            else:
                ids = "".join(f"{',' if result.token_ids or i else ''}{token}" for i, token in enumerate(delta.token_ids))
                result.text += delta.text
                display.show(delta.text if llm.tokenizer else ids)
            result.token_ids += delta.token_ids
            result.error = delta.error
            result.finish_reason = delta.finish_reason or result.finish_reason
    if isinstance(deltas, ChatStream):
        result.chat = deltas.completion()
        result.text = result.chat.content
    result.first_token_s, result.compile_s = first - start, sum(compiled)
    result.decode_s = last - first - (sum(compiled) - compiled_before_first)
    return result


def _show_chat(delta: ChatDelta, display: Display) -> None:
    if delta.reasoning:
        display.think(delta.reasoning)
    if delta.content:
        display.show(delta.content)
    if delta.tool_call is not None and delta.tool_call.finished is not None:
        display.call(delta.tool_call.finished)
