"""A prompt as the model takes it: token ids and the media that their placeholders stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids, which already hold one placeholder for each media row, and the media in order of their placeholders."""

    token_ids: Sequence[int]
    images: Sequence[Any] = ()
    audios: Sequence[Any] = ()
    videos: Sequence[Any] = ()

    @property
    def media(self) -> dict[str, int]:
        """How many items of each kind it holds, kinds without any left out."""
        counts = {"images": len(self.images), "audios": len(self.audios), "videos": len(self.videos)}
        return {kind: count for kind, count in counts.items() if count}
