"""The payload of a tool call, read as it comes: {"name": ..., "args": {...}} (spec 6)."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

# What a payload looks like up to its arguments. The model writes the name first; one that does not is read when it is whole.
_OPENING = re.compile(r'\s*\{\s*(?:"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*)?"args"\s*:\s*(?=\{)')
_OPENING_LIMIT = 1024  # characters in which arguments must begin to be streamed, so that no long text is searched again and again


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call that can be made: `tools[call.name](**call.arguments)`. `id` is what the tool's answer refers to."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class MalformedCall:
    """A call that cannot be made, as the model wrote it: the name as far as it is known, the payload, what is wrong with it."""

    name: str
    text: str
    error: str


@dataclasses.dataclass(frozen=True)
class CallDelta:
    """A piece of the call number `index` of an answer, malformed ones counted.

    `arguments` is a piece of their JSON text. The name comes with the first piece, `finished` with the last, perhaps the same
    one; what was streamed of a call that turns out malformed is to be dropped.
    """

    index: int
    name: str = ""
    arguments: str = ""
    finished: ToolCall | MalformedCall | None = None


def joined(deltas: Sequence[CallDelta]) -> CallDelta:
    """Pieces of one call that follow each other, as one; nothing of a malformed call but that it is one."""
    last = deltas[-1]
    if isinstance(last.finished, MalformedCall):
        return last
    names, arguments = ("".join(getattr(delta, field) for delta in deltas) for field in ("name", "arguments"))
    return CallDelta(last.index, names, arguments, last.finished)


class CallReader:
    """Reads one call. Its arguments are streamed where the payload has the usual form; it is judged when it is whole."""

    def __init__(self, index: int, call_id: str, header: str):
        """`header` is the function's name as the block's opening gives it, "" where it does not."""
        self._index, self._id, self._header = index, call_id, header
        self._payload: list[str] = []
        self._opening: str | None = ""  # what came before the arguments; None once they began, or will not be streamed
        self._depth = 0  # of the brackets around the next character of the arguments; 0 outside them
        self._quoted = self._escaped = False
        self._streamed = False

    def push(self, text: str) -> list[CallDelta]:
        """What `text` adds to the arguments."""
        self._payload.append(text)
        if self._opening is None:
            arguments = self._arguments(text)
            return [CallDelta(self._index, arguments=arguments)] if arguments else []
        self._opening += text
        opened = _OPENING.match(self._opening)
        if opened is None or opened.end() > _OPENING_LIMIT:
            if len(self._opening) > _OPENING_LIMIT:
                self._opening = None
            return []
        rest, self._opening = self._opening[opened.end() :], None
        name = self._header or _unquoted(opened["name"])
        if not name:
            return []
        self._streamed, self._depth = True, 1
        return [CallDelta(self._index, name, "{" + self._arguments(rest[1:]))]

    def close(self, complete: bool) -> CallDelta:
        """The last piece, with the call. `complete` is False where the answer ended within it."""
        text = "".join(self._payload)
        finished = _read(self._id, self._header, text, complete)
        if self._streamed or isinstance(finished, MalformedCall):
            return CallDelta(self._index, finished=finished)
        arguments = json.dumps(finished.arguments, ensure_ascii=False, separators=(",", ":"))
        return CallDelta(self._index, finished.name, arguments, finished)

    def _arguments(self, text: str) -> str:
        """The part of `text` that lies in the arguments' brackets."""
        for n, char in enumerate(text):
            if not self._depth:
                return text[:n]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
        return text


def _unquoted(name: str | None) -> str:
    """The string that a JSON literal stands for; "" for none and for a broken one, which the whole payload will show."""
    try:
        return json.loads(name) if name else ""
    except ValueError:
        return ""


def _read(call_id: str, header: str, text: str, complete: bool) -> ToolCall | MalformedCall:
    try:
        payload = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
        json.dumps(payload, ensure_ascii=False, allow_nan=False).encode()  # no infinity and no half of a surrogate pair
    except (ValueError, RecursionError) as error:
        return MalformedCall(header, text, f"not JSON: {error}" if complete else "the answer ends before the call does")
    named = payload.get("name") if isinstance(payload, dict) else None
    name = named if isinstance(named, str) else ""
    wrong = ""
    if not isinstance(payload, dict) or payload.keys() != {"name", "args"}:
        wrong = 'not an object of "name" and "args"'
    elif not name:
        wrong = f"the name is {json.dumps(named)}, not a string with something in it"
    elif header and name != header:
        wrong = f"its opening names {header!r}, its payload {name!r}"
    elif not isinstance(payload["args"], dict):
        wrong = f"the arguments are {type(payload['args']).__name__}, not an object"
    return MalformedCall(header or name, text, wrong) if wrong else ToolCall(call_id, name, payload["args"])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _no_number(spelling: str) -> Any:
    raise ValueError(f"{spelling} is no JSON number")
