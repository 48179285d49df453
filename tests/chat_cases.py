"""Conversations written out by hand (data/chat.json), with items in place of their media, and texts that spell control tokens."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import strategies as st

from inkling_jax.inputs.control import CONTROL_TOKENS
from inkling_jax.inputs.segments import Control, Media, Segment

CASES = json.loads((Path(__file__).parent / "data" / "chat.json").read_text(encoding="utf-8"))["cases"]
MEDIA = [c for c in CASES if any("image_slots" in s or "audio_slots" in s for s in c["expect"])]
SPELLINGS = [s for token in CONTROL_TOKENS.values() for s in token.spellings]
HOSTILE = st.lists(
    st.one_of(st.sampled_from([*SPELLINGS, "<|", "|>", "<", "|", ">", "end_message", " ", "\ue000", "{{ 7*7 }}"]), st.text()),
    max_size=6,
).map("".join)
USER = {"role": "user", "content": "Hi"}


class Item:
    """Stands for an image or a clip: renderers look into none, whatever it is."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("an array has no one truth value")

    __hash__ = object.__hash__


def with_items(case: dict) -> tuple[list, list[Item]]:
    """The messages of a case, which says only how large its media are, with items in them, and these in order."""
    items: list[Item] = []
    messages = json.loads(json.dumps(case["messages"]))
    for part in (p for m in messages if isinstance(m["content"], list) for p in m["content"] if p["type"] in ("image", "audio")):
        items.append(Item())
        part[part["type"]] = items[-1]
    return messages, items


def as_written(segments: list[Segment], case: dict, items: list[Item]) -> list[dict]:
    """Segments in the form of the cases, each item as the slots that the case wants in its place."""
    slots = [s for s in case["expect"] if not s.keys() & {"control", "text"}]
    written = []
    for segment in segments:
        if isinstance(segment, Media):
            assert segment.item is items.pop(0)
            written.append(slots.pop(0))
            assert f"{segment.kind}_slots" in written[-1]
        else:
            written.append({"control": segment.spelling} if isinstance(segment, Control) else {"text": segment.text})
    assert not items
    return written


def options(case: dict) -> dict:
    return {key: case[key] for key in ("tools", "effort", "add_generation_prompt") if key in case}
