"""The towers of a model: what turns images and audio into rows of the decoder's width (spec 4.2, 5)."""

from __future__ import annotations

from collections.abc import Collection

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Shaped

from inkling_jax.config import AudioConfig, ModelConfig, VisionConfig
from inkling_jax.layers.audio import AudioTower
from inkling_jax.layers.vision import VisionTower


class Towers(nnx.Module):
    """Both towers, each where its configuration is given, declared without memory like the decoder and apart from it.

    So a step of the decoder neither takes their parameters nor reads them. Every device holds all of them.
    """

    def __init__(self, vision: VisionConfig | None, audio: AudioConfig | None, dtype: jnp.dtype):
        self.vision = VisionTower(vision, dtype) if vision is not None else None
        self.audio = AudioTower(audio, dtype) if audio is not None else None

    @classmethod
    def of(cls, config: ModelConfig, names: Collection[str], dtype: jnp.dtype) -> Towers:
        """Those of the towers in `names`, "vision" and "audio", that the configuration has."""
        vision, audio = (getattr(config, name) if name in names else None for name in ("vision", "audio"))
        return cls(vision, audio, dtype)

    @property
    def names(self) -> frozenset[str]:
        """Which of "vision" and "audio" are there."""
        return frozenset(name for name in ("vision", "audio") if getattr(self, name) is not None)

    def nothing(self, name: str, rows: int) -> Shaped[np.ndarray, "rows ..."]:
        """Zeros as the values of an item of so many rows for a tower that is there."""
        if name == "vision":
            assert self.vision is not None
            return np.zeros((rows, *self.vision.patch), np.float32)
        assert self.audio is not None
        return np.zeros((rows, self.audio.bands), np.int32)
