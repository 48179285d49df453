"""Images of every kind, made here: what is read is what was drawn."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from pictures import EXACT, PICTURE, file_of, pixels
from PIL import Image

from inkling_jax.inputs.images import to_patches


@pytest.mark.parametrize("kind", EXACT)
def test_files_without_loss(kind: str) -> None:
    """Transparency is dropped: the colours below it are those of the picture. Of several frames or pages the first counts."""
    np.testing.assert_array_equal(pixels(EXACT[kind]()), PICTURE)


def test_jpeg() -> None:
    """Colour, and CMYK as printers write it, within what JPEG loses."""
    assert np.abs(pixels(file_of(PICTURE, "JPEG", quality=95, subsampling=0)) - PICTURE).max() <= 8
    ink = np.concatenate([255 - PICTURE, np.zeros((32, 48, 1), np.uint8)], axis=2)
    ink[:16, :24, 3] = 128  # black ink over the red
    lit = PICTURE.astype(int)
    lit[:16, :24] = [127, 0, 0]
    written = file_of(Image.frombytes("CMYK", (48, 32), ink.tobytes()), "JPEG", quality=95)
    assert np.abs(pixels(written) - lit).max() <= 8


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_of_any_depth(kind: str) -> None:
    """1, 8 and 16 bits: of the last the upper byte; grey is the same in all channels."""
    grey = np.arange(256).reshape(16, 16)
    deep = Image.fromarray((grey * 256 + 255 - grey).astype(np.uint16))
    for source, want in (
        (Image.fromarray(grey.astype(np.uint8)), grey),
        (deep, grey),
        (Image.fromarray(grey % 3 == 0), (grey % 3 == 0) * 255),
        (Image.merge("LA", [Image.fromarray(grey.astype(np.uint8))] * 2), grey),
    ):
        for image in (source, file_of(source, kind)):
            np.testing.assert_array_equal(pixels(image), np.repeat(want[..., None], 3, axis=2))


# Where the stored picture's first row and first column are in the upright one, as the EXIF standard lists it.
ORIENTATIONS = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


def edge(picture: np.ndarray, side: str, start: str) -> np.ndarray:
    """One side of a picture, from the end `start` on."""
    line = {"top": picture[0], "bottom": picture[-1], "left": picture[:, 0], "right": picture[:, -1]}[side]
    return line if start in ("top", "left") else line[::-1]


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation(orientation: int, kind: str) -> None:
    """The stored first row and column lie on the sides that the standard says; in files, and in PIL images made from them."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
    data = file_of(PICTURE, kind, exif=exif, **options)
    row, column = ORIENTATIONS[orientation]
    for image in (data, Image.open(io.BytesIO(data))):
        upright = pixels(image)
        assert upright.shape[:2] == ((32, 48) if orientation < 5 else (48, 32))
        assert np.abs(edge(upright, row, column) - PICTURE[0]).max() <= 8
        assert np.abs(edge(upright, column, row) - PICTURE[:, 0]).max() <= 8


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_orientation_that_means_nothing_is_ignored(value: int) -> None:
    """As viewers do; also one that is text, and a directory of tags that is cut off."""
    exif = Image.Exif()
    exif[0x0112] = value
    np.testing.assert_array_equal(pixels(file_of(PICTURE, "PNG", exif=exif)), PICTURE)
    for tags in (b"\0\1\x01\x12\0\2\0\0\0\4six\0\0\0\0\0", b"\xff\xff"):
        data = file_of(PICTURE, "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08" + tags)
        np.testing.assert_array_equal(pixels(data), PICTURE)


def test_every_way_to_give_a_file(tmp_path: Path) -> None:
    """A path as text or Path, URLs, bytes-like objects."""
    data = file_of(PICTURE, "PNG")
    path = tmp_path / "a picture.dat"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    want = to_patches(PICTURE)
    for source in (str(path), path, path.as_uri(), url, data, bytearray(data), memoryview(data)):
        np.testing.assert_array_equal(to_patches(source), want)


def test_arrays() -> None:
    """uint8 and floats from 0 to 1 of any precision, grey or colour, from numpy or jax, contiguous or not."""
    unit = PICTURE / 255
    for array in (PICTURE, unit, unit.astype(np.float32), jnp.asarray(PICTURE), jnp.asarray(unit), PICTURE[::-1][::-1]):
        np.testing.assert_array_equal(pixels(array), PICTURE)
    for coarse in (unit.astype(np.float16), jnp.asarray(unit, jnp.bfloat16)):
        assert np.abs(pixels(coarse) - PICTURE).max() <= 1
    grey = PICTURE[..., 2]
    for array in (grey, grey / 255):
        np.testing.assert_array_equal(pixels(array), np.repeat(grey[..., None], 3, axis=2))
    assert pixels(np.full((1, 1, 3), 0.4999 / 255)).max() == 0 and pixels(np.full((1, 1, 3), 0.5001 / 255)).min() == 1
