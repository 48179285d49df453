"""A rendered conversation as control tokens and plain text, which are never one string: so text cannot become a control token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

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


Segment = Control | Text


def encode_segments(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Token ids of segments, each text encoded on its own. Raises InputError for a control token the tokenizer lacks."""
    spellings = tokenizer.control_spellings
    ids: list[int] = []
    for segment in segments:
        if isinstance(segment, Text):
            ids += tokenizer.encode(segment.text)
        elif segment.spelling in spellings:
            ids.append(spellings[segment.spelling])
        else:
            raise InputError(f"this checkpoint's tokenizer has no {segment.spelling} token, which the conversation needs")
    return ids
