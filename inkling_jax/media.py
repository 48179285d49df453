"""What a prompt holds beside text, as it goes from the processor to the engine."""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import numpy as np
from jaxtyping import Shaped


@dataclasses.dataclass(frozen=True, eq=False)
class MediaItem:
    """An image, a frame of a video or an audio clip, ready for its tower, and its place in the prompt.

    `values` are image patches [N, time, side, side, channels] or audio bins [N, mels], checked, one row of the decoder each:
    row i takes the place of token `begin + i`.
    """

    tower: str  # "vision" or "audio"
    values: Shaped[np.ndarray, "N ..."]
    begin: int

    @functools.cached_property
    def digest(self) -> bytes:
        """A hash of the content, which says nothing of the place."""
        # a still's time slots share their memory: what is there once is hashed once, with the axes that it is repeated along
        distinct = self.values[tuple(slice(None) if stride else slice(1) for stride in self.values.strides)]
        header = f"{self.tower} {self.values.dtype} {self.values.shape} {distinct.shape}".encode()
        content = hashlib.blake2b(header, digest_size=16)
        content.update(np.ascontiguousarray(distinct).data)
        return content.digest()
