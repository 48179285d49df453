"""Validation of what a chat is made of: messages and tools in the OpenAI shape, and the thinking effort (spec 6)."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inkling_jax.errors import InputError

ROLES = ("system", "user", "assistant", "tool")
EFFORT_NAMES = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "xhigh": 0.99, "max": 0.99}
DEFAULT_EFFORT = 0.9
MAX_EFFORT = 0.99
TEXT_PARTS = ("text", "thinking")
# Part types that clients use for media, the fields that hold the item, and what it is.
MEDIA_PARTS = {
    "image": ("image", "image"),
    "image_url": ("image_url", "image"),
    "input_image": ("image_url", "image"),
    "audio": ("audio", "audio"),
    "audio_url": ("audio_url", "audio"),
    "input_audio": ("input_audio", "audio"),
    "video": ("video", "video"),
    "video_url": ("video_url", "video"),
}
Frames = Callable[[Any, str], Sequence[Any]]
TOOL_NAME = re.compile(r"\S{1,128}")  # a name in front of a call is told from an answer's first words by this


def parse_effort(effort: str | float | None) -> float:
    """The effort as a number in [0, 0.99] of at most two decimals; None is the default 0.9. Raises InputError for any other."""
    if effort is None:
        return DEFAULT_EFFORT
    if isinstance(effort, str) and effort in EFFORT_NAMES:
        return EFFORT_NAMES[effort]
    try:
        value = math.nan if isinstance(effort, bool) else float(effort)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0 <= value <= MAX_EFFORT or abs(value * 100 - round(value * 100)) > 1e-6:
        names = ", ".join(EFFORT_NAMES)
        raise InputError(f"effort {effort!r} is none of {names}, nor a number from 0 to {MAX_EFFORT} with at most two decimals")
    return abs(round(value, 2))  # minus zero would be spelled "-0"


def canonical_json(value: Any, where: str) -> str:
    """JSON as in training (spec 6): no spaces, keys sorted at all depths, non-ASCII kept. InputError names `where`."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from None


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Function declarations as {"type", "function": {"name", "description", "parameters"}}, the last two never missing."""
    if tools is None:
        return []
    checked = []
    for n, tool in enumerate(_sequence(tools, "tools")):
        where = f"tools[{n}]"
        tool = _mapping(tool, where)
        function = _mapping(tool.get("function"), f"{where}.function")
        name = _string(function.get("name"), f"{where}.function.name")
        if not TOOL_NAME.fullmatch(name):
            raise InputError(f"{where}.function.name is {name!r}; it must have 1 to 128 characters and no spaces")
        spec = {
            "name": name,
            "description": _string(function.get("description") or "", f"{where}.function.description"),
            "parameters": dict(_mapping(function.get("parameters") or {}, f"{where}.function.parameters")),
        }
        canonical_json(spec, where)
        checked.append({"type": _string(tool.get("type", "function"), f"{where}.type"), "function": spec})
    return checked


def check_messages(messages: Sequence[Mapping[str, Any]], frames: Frames | None = None) -> list[dict[str, Any]]:
    """Messages with every shape that callers use made one; raises InputError naming the message and field at fault.

    Each has `role` and `content` (a str, None, or a list of parts: {"type": T, T: ...}, T being "text", "thinking" of an
    assistant, "image" or "audio" of anybody else). An assistant's may have `reasoning_content` and `tool_calls` ({"id", "type",
    "function": {"name", "arguments": dict}}); a tool's has the `name` of its function, looked up by `tool_call_id` if need be
    ("" when no call has that id). Images and audio are not looked into. `frames` gives the images that a video, named for
    errors, is shown as; without it a video is refused. Checked messages pass unchanged.
    """
    names_by_call: dict[str, str] = {}
    checked = []
    for n, message in enumerate(_sequence(messages, "messages")):
        where = f"messages[{n}]"
        message = _mapping(message, where)
        role = message.get("role")
        if role not in ROLES:
            raise InputError(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}")
        content = check_content(message.get("content"), role, f"{where}.content", frames)
        result: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant":
            reasoning = message.get("reasoning_content")
            if reasoning is not None:
                result["reasoning_content"] = _string(reasoning, f"{where}.reasoning_content")
            calls = _sequence(message.get("tool_calls") or [], f"{where}.tool_calls")
            if calls:
                result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
                names_by_call |= {c["id"]: c["function"]["name"] for c in result["tool_calls"] if c["id"]}
        elif content is None:
            raise InputError(f"{where}.content is missing; only an assistant's may be")
        if role == "tool":
            call_id = message.get("tool_call_id")
            name = message.get("name")
            result["name"] = _string(name if name else names_by_call.get(str(call_id), ""), f"{where}.name")
            if call_id is not None:
                result["tool_call_id"] = _string(call_id, f"{where}.tool_call_id")
        checked.append(result)
    if not checked:
        raise InputError("messages is empty: give at least one")
    return checked


def check_content(content: Any, role: str, where: str, frames: Frames | None) -> str | list[dict[str, Any]] | None:
    """The content of one message, called `where` in errors, in the shape that `check_messages` gives it."""
    if content is None or isinstance(content, str):
        return content
    parts = (_part(part, role, f"{where}[{n}]", frames) for n, part in enumerate(_sequence(content, where)))
    return list(itertools.chain.from_iterable(parts))


def _part(part: Any, role: str, where: str, frames: Frames | None) -> list[dict[str, Any]]:
    """The part in its one shape; a video as its frames."""
    if isinstance(part, str):
        return [{"type": "text", "text": part}]
    part = _mapping(part, where)
    kind = part.get("type")
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        if role == "assistant":
            raise InputError(f"{where} is of type {kind!r}, which an assistant message cannot hold")
        field, medium = MEDIA_PARTS[kind]
        item = _media_item(part.get(field), f"{where}.{field}")
        if medium != "video":
            return [{"type": medium, medium: item}]
        if frames is None:
            raise InputError(f"{where} is a video, which this conversation cannot take: give its frames as images")
        return [{"type": "image", "image": frame} for frame in frames(item, f"{where}.{field}")]
    if kind == "thinking" and role != "assistant":
        raise InputError(f"{where} is of type 'thinking', which only an assistant message may hold")
    if kind not in TEXT_PARTS:
        known = ", ".join([*TEXT_PARTS, *MEDIA_PARTS])
        raise InputError(f"{where} is of unknown type {kind!r}; it must be one of {known}")
    return [{"type": kind, kind: _string(part.get(kind), f"{where}.{kind}")}]


def _media_item(item: Any, where: str) -> Any:
    """The item of a media part: itself, or what the objects of the OpenAI shape stand for ({"url"}, {"data", "format"})."""
    if isinstance(item, Mapping):
        if "url" in item:
            item = item["url"]
        elif "data" in item:
            item = f"data:audio/{item.get('format', 'wav')};base64,{_string(item['data'], f'{where}.data')}"
        else:
            raise InputError(f'{where} must hold "url", or "data" in base64')
    if item is None:
        raise InputError(f"{where} is missing; it must be a path, a file:// or data: URL, bytes, or what holds the values")
    return item


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    call = _mapping(call, where)
    function = _mapping(call.get("function"), f"{where}.function")
    name = _string(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments")
    where_arguments = f"{where}.function.arguments"
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where_arguments} is a string that is not JSON: {error}") from None
    arguments = dict(_mapping({} if arguments in (None, "") else arguments, where_arguments))
    canonical_json(arguments, where_arguments)
    call_id = call.get("id")
    return {
        "id": "" if call_id is None else _string(call_id, f"{where}.id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where} must be an object, not {type(value).__name__}")
    return value


def _sequence(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{where} must be a list, not {type(value).__name__}")
    return value


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where} must be a string, not {type(value).__name__}")
    return value
