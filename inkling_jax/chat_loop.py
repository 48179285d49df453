"""A conversation at a terminal or from a file: each line is a turn, a command, or what a tool answers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from inkling_jax.command_line import FAILED, OK, is_terminal, print_error
from inkling_jax.conversation import next_call
from inkling_jax.engine.request import SamplingParams
from inkling_jax.errors import InklingError, InputError
from inkling_jax.inputs.processor import Processor
from inkling_jax.llm import LLM
from inkling_jax.outputs.tool_calls import ToolCall
from inkling_jax.terminal import Display, answer, visible

_COMMAND = re.compile(r"/(\w+)(?:\s+(.*?))?\s*")  # "/etc/hosts" is none
HELP = """\
/image PATH, /audio PATH, /video PATH   attach to your next line
/reset                                  forget what was said and attached
/help                                   say this
/quit                                   leave, as Ctrl-D does
Any other line is your turn; begin it with a space if it looks like a command. Ctrl-C stops an answer.
Where the model has called a tool, the next line is what the tool answers."""


def attached(processor: Processor, items: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Parts of a message for (kind, path or URL) items, read and prepared. Raises InputError for one that cannot be."""
    parts: list[dict[str, Any]] = []
    for kind, source in items:
        prompt = processor.prompt([{"type": kind, kind: source}])
        parts += [{"type": "image", "image": image} for image in prompt.images]
        parts += [{"type": "audio", "audio": audio} for audio in prompt.audios]
    return parts


def user_message(text: str, attachments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A turn of the user: the attachments, then the text, which stays a plain string without any."""
    return {"role": "user", "content": [*attachments, {"type": "text", "text": text}] if attachments else text}


@dataclasses.dataclass
class ChatLoop:
    """A conversation held line by line."""

    llm: LLM
    params: SamplingParams
    effort: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    show_thinking: bool = False
    quiet: bool = False
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    attachments: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of the next turn
    waiting: list[ToolCall] = dataclasses.field(default_factory=list)  # calls whose answers come next

    def run(self) -> int:
        """Take line after line until the input ends, /quit comes, or Ctrl-C at the prompt; the exit code.

        What cannot be done is told and forgotten where a person types, and ends the program where a file does.
        """
        person = is_terminal(sys.stdin)
        if person:
            self._say("Ctrl-C stops an answer; Ctrl-D, or Ctrl-C at the prompt, leaves; /help lists the commands")
        for line in _lines(person, self._asks):
            command = _COMMAND.fullmatch(line)
            if command is not None and command[1] == "quit":
                return OK
            try:
                failed = self._obey(command[1], command[2] or "") if command else self._take(line)
            except (InklingError, OSError) as error:
                if not person or self.llm.engine.closed:
                    raise
                print_error(f"{error}{'' if command else ' (this turn is forgotten)'}")
                continue
            except KeyboardInterrupt:  # while an item is read or a prompt made; in an answer it is not an error
                if not person:
                    raise
                print("\nstopped", file=sys.stderr)
                continue
            if failed and not person:
                return FAILED
        return OK

    def _asks(self) -> str:
        """What to print where a line is to be typed."""
        return f"{visible(self.waiting[0].name)} answers> " if self.waiting else "> "

    def _obey(self, name: str, argument: str) -> bool:
        """Do what a command says; never a failure of the model."""
        if name in ("image", "audio", "video"):
            if not argument:
                raise InputError(f"/{name} wants a path: /{name} PATH")
            source = os.path.expanduser(argument.strip("'\""))
            parts = attached(self.llm.processor, [(name, source)])
            self.attachments += parts
            self._say(f"attached to your next line: {source}")
        elif name == "reset":
            self.history = [message for message in self.history[:1] if message["role"] == "system"]
            self.attachments, self.waiting = [], []
            self._say("forgotten")
        elif name == "help":
            print(HELP, file=sys.stderr)
        else:
            raise InputError(f"unknown command /{name}: /help lists them; a line that begins with a space is none")
        return False

    def _take(self, line: str) -> bool:
        """Answer a turn, or go on once every call has its answer; whether the model failed."""
        if self.waiting:
            call, *self.waiting = self.waiting
            self.history.append({"role": "tool", "tool_call_id": call.id, "content": line})
            return False if self.waiting else self._answer([])
        asked, self.attachments = user_message(line, self.attachments), []
        return self._answer([asked])

    def _answer(self, turn: list[dict[str, Any]]) -> bool:
        """Have the conversation with `turn` answered; whether the model failed."""
        messages = [*self.history, *turn]
        prompt = self.llm.chat_prompt(messages, tools=self.tools, effort=self.effort)
        display = Display(thinking=self.show_thinking, note=not self.quiet)
        result = answer(self.llm, prompt, self.params, display, first_call=next_call(messages))
        self._say(result.statistics())
        if result.error:
            print_error(result.error)
        assert result.chat is not None, "it was asked for as a chat"
        self.history = [*messages, result.chat.message]
        self.waiting = list(result.chat.tool_calls)
        return result.error is not None

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr)


def _lines(person: bool, asks: Callable[[], str]) -> Iterator[str]:
    """Lines of standard input that are not blank, asked for where a person types them."""
    if not person:
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() then edits lines and remembers them
    try:
        while True:
            line = input(asks()) if is_terminal(sys.stdout) else _ask_on_stderr(asks())
            if line.strip():
                yield line
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)


def _ask_on_stderr(prompt: str) -> str:
    """`input` with its prompt kept out of a standard output that goes elsewhere."""
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
