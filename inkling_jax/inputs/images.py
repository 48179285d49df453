"""Images as the patches that the vision tower takes: pre-scaled, cut into tiles, normalised (spec 4.1)."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Shaped, UInt8
from PIL import Image

from inkling_jax.config_fields import TINY, Fields, read_json_object
from inkling_jax.errors import ConfigError, InputError
from inkling_jax.inputs.image_reading import is_array, is_float, read_image

PROCESSOR_FILE = "processor_config.json"
SIDE = 40  # of a tile
SLOTS = 2  # in time
MAX_PATCHES = 2**16  # 2.5 GB; a slim image has far more tiles than its pixels would fill
PADDING = -1  # as a pixel from 0 to 255: not black

Triple = tuple[float, float, float]
Patches = Float32[np.ndarray, "N 2 40 40 3"]


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """How images are prepared. The defaults are those of the servers that published scores come from (spec 4.1, 9)."""

    rescale_frac: float | None = 2.0  # growth of the longer edge before tiling; None: none
    max_upscaled_edge: int = 2048  # pixels of the longer edge that growth ends at; larger images stay as they are
    mean: Triple = (0.48145466, 0.4578275, 0.40821073)
    std: Triple = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        frac = self.rescale_frac
        if frac is not None and (isinstance(frac, bool) or not isinstance(frac, int | float) or not 1 <= frac < math.inf):
            raise ConfigError(f"rescale_frac is {frac!r}; a number of at least 1, or None for no growth, would be right")

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> ImageConfig:
        """The section `image_processor` of a checkpoint's processor_config.json; what the file does not say is as published.

        A `rescale_image_frac` of null is none, as in Transformers. ConfigError and CheckpointError name the file and field.
        """
        file = Path(path) / PROCESSOR_FILE
        section = Fields(read_json_object(file), str(file)).section("image_processor") if file.exists() else None
        if section is None:
            return cls()
        size = section.section("size")
        for edge in ("height", "width"):
            if size is not None:
                size.require(edge, SIDE)
        frac_name, default = "rescale_image_frac", cls()
        no_growth = frac_name in section.values and section.values[frac_name] is None
        return cls(
            rescale_frac=None if no_growth else section.number(frac_name, low=1, default=default.rescale_frac),
            max_upscaled_edge=section.integer("rescale_image_max_upscaled_long_edge", default=default.max_upscaled_edge),
            mean=_triple(section, "image_mean", default.mean, low=-math.inf),
            std=_triple(section, "image_std", default.std, low=TINY),
        )

    def scaled_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after pre-scaling, which never shrinks."""
        if self.rescale_frac is None:
            return height, width
        longer = max(height, width)
        ratio = min(self.rescale_frac * longer, max(self.max_upscaled_edge, longer)) / longer
        # Half a pixel rounds up; Python's round would go to the even neighbour.
        return max(1, math.floor(height * ratio + 0.5)), max(1, math.floor(width * ratio + 0.5))

    def num_patches(self, height: int, width: int) -> int:
        """Patches, which are tokens, of an image of this size: there is always one column of tiles more than are full."""
        height, width = self.scaled_size(height, width)
        return -(-height // SIDE) * (width // SIDE + 1)


def to_patches(image: Any, rescale_frac: float | None = None, *, name: str = "image") -> Patches:
    """`image_patches` with the published normalisation and this pre-scaling (None: none)."""
    return image_patches(image, ImageConfig(rescale_frac), name)


def image_patches(image: Any, config: ImageConfig = ImageConfig(), name: str = "image") -> Patches:
    """One patch a tile, row by row: [N, 2 time slots, 40, 40, RGB], normalised (spec 4.1). The result may be read-only.

    `image` is what `read_image` takes, and then both slots are the same; or a tuple of two of equal size, one a slot; or patches,
    which are checked and returned. Raises InputError beginning with `name`.
    """
    if is_array(image) and np.ndim(image) == 5:
        return _checked(np.asarray(image), name)
    if not isinstance(image, tuple):
        tiles = _tiles(read_image(image, name), config, name)
        # The slots of a still share their memory: half of what most images take.
        return np.broadcast_to(tiles[:, None], (len(tiles), SLOTS, SIDE, SIDE, 3))
    if len(image) != SLOTS:
        raise InputError(f"{name} is a tuple of {len(image)}; two images, one for each time slot, would be right")
    frames = [read_image(frame, f"{name}, time slot {slot}") for slot, frame in enumerate(image)]
    if frames[0].size != frames[1].size:
        sizes = " and ".join(f"{width} x {height}" for width, height in (frame.size for frame in frames))
        raise InputError(f"{name} has time slots of {sizes} pixels; they must be of one size")
    return np.stack([_tiles(frame, config, name) for frame in frames], axis=1)


def tile(rgb: UInt8[np.ndarray, "h w 3"], config: ImageConfig) -> Float32[np.ndarray, "N 40 40 3"]:
    """Normalised tiles of pixels, row by row, padded on the right and below."""
    height, width, _ = rgb.shape
    rows, columns = -(-height // SIDE), width // SIDE + 1
    # Flat rows of pixels: numpy is slow where the last axis is the three channels.
    std = np.asarray(config.std)
    scale = np.tile(1 / (255 * std), SIDE).astype(np.float32)
    offset = np.tile(-np.asarray(config.mean) / std, SIDE).astype(np.float32)
    tiles = np.empty((rows, columns, SIDE, SIDE * 3), np.float32)
    strip = np.full((SIDE, columns * SIDE * 3), PADDING, np.float32)
    for row in range(rows):
        part = rgb[row * SIDE : (row + 1) * SIDE]
        strip[: len(part), : width * 3] = part.reshape(len(part), -1)
        strip[len(part) :] = PADDING
        np.multiply(strip.reshape(SIDE, columns, -1).swapaxes(0, 1), scale, out=tiles[row])
        tiles[row] += offset
    return tiles.reshape(-1, SIDE, SIDE, 3)


def _tiles(image: Image.Image, config: ImageConfig, name: str) -> Float32[np.ndarray, "N 40 40 3"]:
    count = config.num_patches(image.height, image.width)
    if count > MAX_PATCHES:
        size = f"{image.width} x {image.height} pixels"
        raise InputError(f"{name} of {size} makes {count} patches; at most {MAX_PATCHES} are taken: make it smaller")
    height, width = config.scaled_size(image.height, image.width)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    return tile(np.asarray(image), config)


def _checked(patches: Shaped[np.ndarray, "N 2 40 40 3"], name: str) -> Patches:
    """Patches that are ready, if they can be."""
    shape = (SLOTS, SIDE, SIDE, 3)
    if patches.shape[1:] != shape or not 1 <= len(patches) <= MAX_PATCHES:
        right = f"[N, {', '.join(map(str, shape))}] with N from 1 to {MAX_PATCHES} would be right"
        raise InputError(f"{name} is patches of shape {list(patches.shape)}; {right}")
    if not is_float(patches.dtype):
        raise InputError(f"{name} is patches of {patches.dtype}; normalised floats would be right")
    patches = patches.astype(np.float32, copy=False)
    if not np.isfinite(patches).all():
        raise InputError(f"{name} is patches with values that are not finite")
    return patches


def _triple(section: Fields, name: str, default: Triple, low: float) -> Triple:
    """Three finite numbers, one a channel."""
    value = section.values.get(name)
    if value is None:
        return default
    numbers = [v for v in value if isinstance(v, int | float) and not isinstance(v, bool)] if isinstance(value, list) else []
    if not isinstance(value, list) or not len(value) == len(numbers) == 3 or not all(low <= v < math.inf for v in numbers):
        raise section.error(name, f"three finite numbers{' above 0' if low > 0 else ''}, one a channel")
    red, green, blue = map(float, numbers)
    return red, green, blue
