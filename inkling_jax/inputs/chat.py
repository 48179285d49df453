"""The built-in chat format of the family (spec 6), for checkpoints that bring no template of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inkling_jax.inputs.messages import TEXT_PARTS, canonical_json, check_messages, check_tools, parse_effort
from inkling_jax.inputs.segments import Control, Segment, Text, media_segments

_ROLE_TOKENS = {"system": "message_system", "user": "message_user", "assistant": "message_model", "tool": "message_tool"}


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    effort: str | float | None = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """Segments of a conversation: tools, leading system messages, the effort line, the turns, the model's opening (spec 6).

    `effort` is a name or a number in [0, 0.99]. Raises InputError naming the message, part or field at fault.
    """
    checked = check_messages(messages)
    effort_line = f"Thinking effort level: {_effort_text(parse_effort(effort))}"
    leading = next((n for n, message in enumerate(checked) if message["role"] != "system"), len(checked))
    segments: list[Segment] = []
    declared = [{**tool["function"], "type": tool["type"]} for tool in check_tools(tools)]
    if declared:
        segments += _block("message_system", _text("content_xml", canonical_json(declared, "tools")), name="tool_declare")
    for message in checked[:leading]:
        segments += _turn(message)
    segments += _block("message_system", _text("content_text", effort_line))
    for message in checked[leading:]:
        segments += _turn(message)
    if add_generation_prompt:
        segments.append(_control("message_model"))
    return segments


def _turn(message: Mapping[str, Any]) -> list[Segment]:
    """Blocks of one message: one a part, never joined; a model's turn, unless it is empty, ends with its end of sampling."""
    opener = _ROLE_TOKENS[message["role"]]
    segments = [s for part in _parts(message) for s in _block(opener, part, name=message.get("name", ""))]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        name, args = (canonical_json(function[key], f"tool call {key}") for key in ("name", "arguments"))
        payload = f'{{"name":{name},"args":{args}}}'  # the envelope keeps this order, only what is inside it is sorted
        segments += _block(opener, _text("content_invoke_tool_json", payload), name=function["name"])
    if message["role"] == "assistant" and segments:
        segments.append(_control("content_model_end_sampling"))
    return segments


def _parts(message: Mapping[str, Any]) -> Iterator[list[Segment]]:
    """What each block of a message holds besides its tool calls."""
    if message.get("reasoning_content"):
        yield _text("content_thinking", message["reasoning_content"])
    content = message["content"]
    if isinstance(content, str):
        # A client that has nothing to say beside a tool call sends "" as often as null.
        if content or message["role"] != "assistant":
            yield _text("content_text", content)
        return
    for part in content or ():
        kind = part["type"]
        yield _text(f"content_{kind}", part[kind]) if kind in TEXT_PARTS else media_segments(kind, part[kind])


def _block(opener: str, payload: list[Segment], *, name: str = "") -> list[Segment]:
    body: list[Segment] = [_control(opener), Text(name), *payload, _control("end_message")]
    return [s for s in body if s != Text("")]


def _text(kind: str, text: str) -> list[Segment]:
    return [_control(kind), Text(text)]


def _control(role: str) -> Control:
    return Control(f"<|{role}|>")


def _effort_text(effort: float) -> str:
    """At most two decimals, zero as "0": how the family spells it (spec 6)."""
    return f"{effort:.2f}".rstrip("0").rstrip(".")
