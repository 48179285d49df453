"""A rendered conversation as control tokens, plain text and media, never one string: so text cannot become a control token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from inkling_jax.errors import InputError
from inkling_jax.inputs.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Control:
    """One control token, by its spelling."""

    spelling: str


@dataclasses.dataclass(frozen=True)
class Text:
    """Plain text, tokenised by itself and never scanned for control tokens."""

    text: str


@dataclasses.dataclass(frozen=True)
class Media:
    """The placeholders of one media item, as many as the item has rows; the processor counts them."""

    kind: str  # "image" or "audio"; the frames of a video are images
    item: Any  # what Prompt.images or Prompt.audios takes


Segment = Control | Text | Media


def media_segments(kind: str, item: Any) -> list[Segment]:
    """An item between the control tokens that belong to it: one before an image, one on either side of audio (spec 4.3, 5)."""
    if kind == "image":
        return [Control("<|content_image|>"), Media(kind, item)]
    return [Control("<|content_audio_input|>"), Media(kind, item), Control("<|audio_end|>")]


def encode_segments(
    segments: Iterable[Segment], tokenizer: Tokenizer, expand: Callable[[Media], list[int]] | None = None
) -> list[int]:
    """Token ids of segments, each text encoded on its own; `expand` gives those of a media item.

    Raises InputError for a control token the tokenizer lacks, and for media without `expand`.
    """
    spellings = tokenizer.control_spellings
    ids: list[int] = []
    for segment in segments:
        if isinstance(segment, Text):
            ids += tokenizer.encode(segment.text)
        elif isinstance(segment, Media):
            if expand is None:
                raise InputError(f"the conversation holds {segment.kind}, which this model does not take")
            ids += expand(segment)
        elif segment.spelling in spellings:
            ids.append(spellings[segment.spelling])
        else:
            raise InputError(f"this checkpoint's tokenizer has no {segment.spelling} token, which the conversation needs")
    return ids
