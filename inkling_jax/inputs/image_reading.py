"""Images of every kind as upright 8-bit RGB pixels (spec 4.1). Whatever is wrong with one is an InputError that names it."""

from __future__ import annotations

import errno
import io
import os
import re
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Shaped
from PIL import Image

from inkling_jax.errors import InputError
from inkling_jax.inputs.media_source import find_media

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")  # no more: some of Pillow's other readers start programs
MAX_PIXELS = 2**26  # 8192 x 8192, 42,025 tokens
# EXIF orientation: how the stored picture becomes upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112


def read_image(image: Any, name: str) -> Image.Image:
    """The pixels of `image` in mode RGB, turned upright by its EXIF orientation. InputError begins with `name` ("image 2").

    `image` is a PIL image, an array, a path, a file:// or data: URL or the bytes of a PNG, JPEG, GIF, WebP, BMP or TIFF file. An
    array is [height, width, 3], or [height, width] in grey, of uint8 or of floats from 0 to 1. Transparency is dropped, the
    colours below it count; of 16 bits the upper 8 count; of several pages or frames the first.
    """
    if isinstance(image, Image.Image):
        return _decoded(image, name)
    if is_array(image):
        return _from_array(np.asarray(image), name)
    if not isinstance(image, str | os.PathLike | bytes | bytearray | memoryview):
        right = "a PIL image, an array, a path, a file:// or data: URL, or bytes would be right"
        raise InputError(f"{name} is a {type(image).__name__}; {right}")
    found = find_media(image, name)
    with found.open("rb") if isinstance(found, Path) else io.BytesIO(found) as file:
        return _from_file(file, f"{name}: {found}" if isinstance(found, Path) else name)


def is_array(value: Any) -> bool:
    """Whether numpy makes an array of it, of whichever library; PIL images, which are also taken by numpy, do not count."""
    return hasattr(value, "__array__") and not isinstance(value, Image.Image)


def is_float(dtype: np.dtype) -> bool:
    """Whether it is a floating type, bfloat16 included, which numpy does not know as one."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def check_size(width: int, height: int, name: str) -> None:
    """Refuse an image without pixels, and one with more than there can be reason for."""
    if not width or not height:
        raise InputError(f"{name} has no pixels: its size is {width} x {height}")
    if width * height > MAX_PIXELS:
        raise InputError(
            f"{name} has {width} x {height} = {width * height} pixels; at most {MAX_PIXELS} are taken: make it smaller"
        )


def _from_array(array: Shaped[np.ndarray, "..."], name: str) -> Image.Image:
    if array.ndim not in (2, 3) or array.shape[2:] not in ((), (3,)):
        hint = ""
        if array.ndim == 3 and array.shape[2] in (1, 2, 4):
            hint = ": drop its alpha channel" if array.shape[2] != 1 else ": drop its last axis"
        elif array.ndim == 3 and array.shape[0] in (1, 3, 4):
            hint = ": its channels must come last"
        right = "[height, width, 3] or [height, width] would be right"
        raise InputError(f"{name} is an array of shape {list(array.shape)}; {right}{hint}")
    check_size(array.shape[1], array.shape[0], name)
    if is_float(array.dtype):
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):  # also where one is NaN
            raise InputError(f"{name} is an array of floats from {low:g} to {high:g}; from 0 to 1 would be right, or uint8")
        array = np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise InputError(f"{name} is an array of {array.dtype}; uint8, or floats from 0 to 1, would be right")
    image = Image.fromarray(array)
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_file(file: BinaryIO, name: str) -> Image.Image:
    start = file.read(8)
    file.seek(0)
    try:
        with warnings.catch_warnings():  # of a header that claims too many pixels, which is refused anyway
            warnings.simplefilter("ignore")
            image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        pixels = re.search(r"\d+", str(error))
        claimed = f"{pixels[0]} pixels" if pixels else "too many pixels"
        raise InputError(f"{name} has {claimed}; at most {MAX_PIXELS} are taken: make it smaller") from None
    except Image.UnidentifiedImageError:
        kinds = ", ".join(FORMATS)
        raise InputError(f"{name} is no image, or a damaged one: it begins with {start!r}; {kinds} are taken") from None
    except Exception as error:
        raise _refusal(error, name) from None
    return _decoded(image, name)


def _decoded(image: Image.Image, name: str) -> Image.Image:
    """Upright RGB of an image whose pixels may not have been decoded yet."""
    check_size(*image.size, name)
    try:
        with warnings.catch_warnings():  # of metadata that is broken or not used
            warnings.simplefilter("ignore")
            image.load()
            rgb = _to_rgb(image)
    except Exception as error:
        raise _refusal(error, name) from None
    if rgb is None:
        raise InputError(f"{name} has pixels of mode {image.mode}, whose range is not known; convert it to RGB or to 8-bit grey")
    return rgb


def _to_rgb(image: Image.Image) -> Image.Image | None:
    turn = UPRIGHT.get(_orientation(image))
    if image.mode in ("I", "F"):
        return None
    if image.mode.startswith("I;16"):  # Pillow would clip these to 255, where it takes the upper byte of 16-bit colour
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    return rgb if turn is None else rgb.transpose(turn)


def _orientation(image: Image.Image) -> Any:
    try:
        return image.getexif().get(_ORIENTATION)
    except Exception:  # Pillow's parser of EXIF raises whatever it runs into; the picture is good without
        return None


def _refusal(error: Exception, name: str) -> Exception:
    """What to raise for what Pillow raised: its readers raise whatever they run into in a broken file.

    Too little memory, too many open files or a failing disk are not the image's fault; EINVAL is an offset that no file has.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)):
        return error
    return InputError(f"{name} is an image that cannot be decoded: {str(error) or type(error).__name__}")
