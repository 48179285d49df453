"""A picture to make image files from, and files that hold it without loss."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from inkling_jax.inputs.image_reading import read_image

# Four colours, one a quadrant, so that every file format can hold them, and no turn of the picture looks like another.
PICTURE = np.repeat(np.repeat(np.array([[[255, 0, 0], [0, 128, 0]], [[0, 0, 255], [240, 240, 16]]], np.uint8), 16, 0), 24, 1)


def file_of(picture: np.ndarray | Image.Image, kind: str, **options: object) -> bytes:
    """A picture as a file."""
    buffer = io.BytesIO()
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(image: object) -> np.ndarray:
    """What is read, as signed numbers."""
    return np.asarray(read_image(image, "image 1")).astype(int)


def with_alpha() -> Image.Image:
    """The picture, half of it transparent."""
    image = Image.fromarray(PICTURE).convert("RGBA")
    image.putalpha(Image.fromarray(np.repeat(np.array([[0, 255]], np.uint8), 32, 0)).resize((48, 32)))
    return image


def palette() -> Image.Image:
    """The picture by its four colours."""
    return Image.fromarray(PICTURE).quantize(4)


EXACT = {
    "png": lambda: file_of(PICTURE, "PNG"),
    "png with alpha": lambda: file_of(with_alpha(), "PNG"),
    "png with a palette": lambda: file_of(palette(), "PNG"),
    "png with a palette and one transparent colour": lambda: file_of(palette(), "PNG", transparency=1),
    "png with a palette and alpha": lambda: file_of(palette(), "PNG", transparency=bytes([0, 99, 255, 7])),
    "gif": lambda: file_of(palette(), "GIF"),
    "gif with transparency": lambda: file_of(palette(), "GIF", transparency=2),
    "gif of two frames": lambda: file_of(palette(), "GIF", save_all=True, append_images=[Image.new("P", (48, 32))]),
    "webp": lambda: file_of(PICTURE, "WEBP", lossless=True),
    "webp with alpha": lambda: file_of(with_alpha(), "WEBP", lossless=True, exact=True),
    "bmp": lambda: file_of(PICTURE, "BMP"),
    "tiff": lambda: file_of(PICTURE, "TIFF"),
    "tiff, compressed, with alpha": lambda: file_of(with_alpha(), "TIFF", compression="tiff_lzw"),
    "tiff of two pages": lambda: file_of(PICTURE, "TIFF", save_all=True, append_images=[Image.new("RGB", (48, 32))]),
}
