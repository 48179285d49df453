"""Answers at a terminal: one streamed and timed, or a conversation."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax.monitoring

from inkling_jax.command_line import FAILED, INTERRUPTED, OK, is_terminal, print_error
from inkling_jax.engine.request import SamplingParams
from inkling_jax.errors import InklingError
from inkling_jax.inputs.prompt import Prompt
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.llm import LLM

_COMPILED = "/jax/core/compile/backend_compile_duration"
# A model may write any byte, and a terminal obeys some: show those below space as their pictures, the others as unknown.
_VISIBLE = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"} | {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


@dataclasses.dataclass
class Answer:
    """One completion and its times in seconds; compiling is counted apart, wherever it took place."""

    prompt_tokens: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "cancelled"
    error: str | None = None
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
    """Shows an answer as it comes, on standard output; until then, a note on standard error where a person looks at it."""

    def __init__(self, *, text: bool = True, note: bool = True):
        self._text, self._note = text, note and is_terminal(sys.stderr)
        self._last = ""

    def __enter__(self) -> Display:
        if self._note:
            print("working (a first run compiles) ...", end="", file=sys.stderr, flush=True)
        return self

    def show(self, text: str) -> None:
        """Write a piece; on a terminal, with its control characters made visible."""
        self._erase_note()
        if self._text and text:
            self._last = text[-1]
            print(text.translate(_VISIBLE) if is_terminal(sys.stdout) else text, end="", flush=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._erase_note()
        if self._text and self._last != "\n" and kind is None:
            print(flush=True)

    def _erase_note(self) -> None:
        if self._note:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._note = False


def answer(llm: LLM, prompt: Prompt, params: SamplingParams, display: Display) -> Answer:
    """Stream one completion to `display`, and return it with its times. Ctrl-C ends it as "cancelled"."""
    result = Answer(len(prompt.token_ids))
    start = first = last = time.monotonic()
    compiled_before_first = 0.0
    with (
        _compile_seconds() as compiled,
        display,
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(llm.stream(prompt, params)) as deltas,
    ):
        for delta in deltas:
            last = time.monotonic()
            if result.token_ids:
                result.decode_tokens += len(delta.token_ids)
            else:
                first, compiled_before_first = last, sum(compiled)
            ids = "".join(f"{',' if result.token_ids or i else ''}{token}" for i, token in enumerate(delta.token_ids))
            result.token_ids += delta.token_ids
            result.text += delta.text
            result.error = delta.error
            result.finish_reason = delta.finish_reason or result.finish_reason
            display.show(delta.text if llm.tokenizer else ids)
    result.first_token_s, result.compile_s = first - start, sum(compiled)
    result.decode_s = last - first - (sum(compiled) - compiled_before_first)
    return result


def converse(llm: LLM, params: SamplingParams, *, system: str | None, effort: str | None, quiet: bool) -> int:
    """Answer line after line until the input ends or Ctrl-C comes at the prompt; the exit code.

    A turn that cannot be answered is told and forgotten where a person types, and ends the program where a file does.
    """
    assert llm.tokenizer is not None, "checked before the model was loaded"
    person = is_terminal(sys.stdin)
    history: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if person and not quiet:
        print("Ctrl-C stops an answer; Ctrl-D, or Ctrl-C at the prompt, leaves", file=sys.stderr)
    for line in _lines(person):
        asked = {"role": "user", "content": line}
        try:
            result = answer(llm, llm.chat_prompt([*history, asked], effort=effort), params, Display(note=not quiet))
        except InklingError as error:
            if not person:
                raise
            print_error(f"{error} (this turn is forgotten)")
            continue
        if not quiet:
            print(result.statistics(), file=sys.stderr)
        if result.error:
            print_error(result.error)
            if not person:
                return FAILED
        history += [asked, _message(llm.tokenizer, result.token_ids)]
    return OK


def _lines(person: bool) -> Iterator[str]:
    """Lines of standard input that are not blank, asked for where a person types them."""
    if not person:
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() then edits lines and remembers them
    try:
        while True:
            line = input("> ") if is_terminal(sys.stdout) else _ask_on_stderr()
            if line.strip():
                yield line
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)


def _ask_on_stderr() -> str:
    """`input` with its prompt kept out of a standard output that goes elsewhere."""
    print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _message(tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> dict[str, Any]:
    """An answer as a message of the history, what it thought apart from what it said (spec 6)."""
    fields = {"content_thinking": "reasoning_content", "content_text": "content"}
    openers = {tokenizer.control[role]: field for role, field in fields.items() if role in tokenizer.control}
    parts: dict[str, list[int]] = {"reasoning_content": [], "content": []}
    field = "content"
    for token in token_ids:
        field = openers.get(token, field)
        parts[field].append(token)
    texts = {field: tokenizer.decode(ids) for field, ids in parts.items()}
    return {"role": "assistant", **{field: text for field, text in texts.items() if text or field == "content"}}


@contextlib.contextmanager
def _compile_seconds() -> Iterator[list[float]]:
    """A list that grows by the seconds of each compilation inside."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
