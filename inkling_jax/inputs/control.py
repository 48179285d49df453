"""Control tokens of the family: a name for each role, its published spellings and its published id (spec 6)."""

from __future__ import annotations

import dataclasses
import re

# Every published control token is spelled this way, so a tokenizer entry of this form is never left to user text.
CONTROL_FORM = re.compile(r"<\|[^|<>]+\|>")


@dataclasses.dataclass(frozen=True)
class ControlToken:
    """A role's spellings, the usual one first, and the id that it has in the released tokenizers."""

    spellings: tuple[str, ...]
    published_id: int


def _plain(name: str, published_id: int) -> ControlToken:
    return ControlToken((f"<|{name}|>",), published_id)


CONTROL_TOKENS: dict[str, ControlToken] = {
    "endoftext": _plain("endoftext", 199999),
    "message_user": _plain("message_user", 200000),
    "message_model": _plain("message_model", 200001),
    "message_system": _plain("message_system", 200002),
    "message_tool": _plain("message_tool", 200003),
    "content_text": _plain("content_text", 200004),
    "content_image": _plain("content_image", 200005),
    "content_model_end_sampling": _plain("content_model_end_sampling", 200006),
    "content_thinking": _plain("content_thinking", 200008),
    "end_message": _plain("end_message", 200010),
    "content_audio_input": _plain("content_audio_input", 200020),
    "content_tool_error": _plain("content_tool_error", 200022),
    "content_xml": ControlToken(("<|content_xml|>", "<|unused_200024|>"), 200024),
    "audio_end": _plain("audio_end", 200043),
    "content_invoke_tool_json": _plain("content_invoke_tool_json", 200049),
    "audio_slot": _plain("unused_200053", 200053),
    "image_slot": _plain("unused_200054", 200054),
    "content_invoke_tool_text": _plain("content_invoke_tool_text", 200057),
}
