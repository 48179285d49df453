"""What each image that cannot be taken is told."""

from __future__ import annotations

import errno
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import EXACT, PICTURE, file_of, palette
from PIL import Image

from inkling_jax.errors import InputError
from inkling_jax.inputs.image_reading import MAX_PIXELS, read_image
from inkling_jax.inputs.images import MAX_PATCHES, ImageConfig, image_patches, to_patches


def png(width: int, height: int, *, crc: int | None = None) -> bytes:
    """A PNG that claims a size and holds a few bytes."""

    def part(name: bytes, body: bytes, check: int | None = None) -> bytes:
        total = zlib.crc32(name + body) if check is None else check
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", total)

    head = part(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), crc)
    return b"\x89PNG\r\n\x1a\n" + head + part(b"IDAT", zlib.compress(bytes(100))) + part(b"IEND", b"")


GOOD_JPEG = file_of(PICTURE, "JPEG")
BROKEN = {
    "nothing": (b"", "has no bytes"),
    "an empty string": ("", "is an empty string"),
    "blanks": ("   ", "is an empty string"),
    "http": ("http://host/a.png", "http://host/a.png is not fetched: download it"),
    "https": ("https://host/a.png", "is not fetched: download it"),
    "broken base64": ("data:image/png;base64,%%%", "base64 of data:image/png;base64,%%% is broken"),
    "a missing file": ("nowhere.png", "nowhere.png: no such file"),
    "a directory": (Path("."), "is a directory"),
    "only a signature": (b"\x89PNG\r\n\x1a\n", "is no image, or a damaged one"),
    "text": (
        b"not an image",
        "is no image, or a damaged one: it begins with b'not an i'; PNG, JPEG, GIF, WEBP, BMP, TIFF are taken",
    ),
    "a wave": (b"RIFF\x24\0\0\0WAVEfmt ", "is no image, or a damaged one"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no image, or a damaged one"),
    "a cut JPEG": (GOOD_JPEG[:-200], "cannot be decoded"),
    "a cut PNG": (file_of(PICTURE, "PNG")[:-40], "cannot be decoded"),
    "a cut GIF": (file_of(palette(), "GIF")[:-30], "cannot be decoded"),
    "a cut WebP": (file_of(PICTURE, "WEBP")[:-9], "cannot be decoded"),
    "a cut BMP": (file_of(PICTURE, "BMP")[:-9], "cannot be decoded"),
    "a cut TIFF": (file_of(PICTURE, "TIFF")[:40], "is no image, or a damaged one"),
    "too little data": (png(100, 100), "cannot be decoded"),
    "a wrong checksum": (png(10, 10, crc=7), "is no image, or a damaged one"),
    "no width": (png(0, 10), "is no image, or a damaged one"),
    "floats in a file": (file_of(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), "pixels of mode F, whose range is not"),
    "ints in an image": (Image.new("I", (4, 4)), "pixels of mode I, whose range is not known"),
    "an image without pixels": (Image.new("RGB", (0, 5)), "has no pixels: its size is 0 x 5"),
    "None": (None, "is a NoneType; a PIL image, an array, a path, a file:// or data: URL, or bytes would be right"),
    "a list": ([PICTURE], "is a list; a PIL image"),
    "alpha in an array": (
        np.zeros((4, 5, 4), np.uint8),
        "shape [4, 5, 4]; [height, width, 3] or [height, width] would be right: drop its",
    ),
    "channels first": (
        np.zeros((3, 40, 50), np.uint8),
        "shape [3, 40, 50]; [height, width, 3] or [height, width] would be right: its",
    ),
    "one number": (np.uint8(3), "an array of shape []"),
    "an array without pixels": (np.zeros((4, 0, 3), np.uint8), "has no pixels: its size is 0 x 4"),
    "integers": (np.zeros((4, 5, 3), np.int64), "is an array of int64; uint8, or floats from 0 to 1, would be right"),
    "booleans": (np.zeros((4, 5, 3), bool), "is an array of bool"),
    "words": (np.zeros((4, 5, 3), "U1"), "is an array of <U1"),
    "floats to 255": (np.full((4, 5, 3), 255.0), "is an array of floats from 255 to 255; from 0 to 1 would be right"),
    "negative floats": (np.full((4, 5, 3), -0.1), "is an array of floats from -0.1 to -0.1"),
    "NaN": (np.full((4, 5, 3), np.nan), "is an array of floats from nan to nan"),
    "three slots": ((PICTURE,) * 3, "is a tuple of 3; two images, one for each time slot"),
    "slots of two sizes": ((PICTURE, PICTURE[:, :10]), "has time slots of 48 x 32 and 10 x 32 pixels; they must be of one size"),
    "a broken slot": ((PICTURE, b"x"), ", time slot 1 is no image, or a damaged one"),
    "patches in a slot": ((np.zeros((1, 2, 40, 40, 3)), PICTURE), ", time slot 0 is an array of shape [1, 2, 40, 40, 3]"),
    "one time slot": (
        np.zeros((1, 1, 40, 40, 3)),
        "is patches of shape [1, 1, 40, 40, 3]; [N, 2, 40, 40, 3] with N from 1 to 65536",
    ),
    "no patches": (np.zeros((0, 2, 40, 40, 3)), "is patches of shape [0, 2, 40, 40, 3]"),
    "patches of bytes": (np.zeros((1, 2, 40, 40, 3), np.uint8), "is patches of uint8; normalised floats would be right"),
    "infinite patches": (np.full((1, 2, 40, 40, 3), np.inf, np.float32), "is patches with values that are not finite"),
    # Bombs: what Pillow takes, what it warns of, what it refuses itself, and what has few pixels but many tiles.
    "81 million pixels": (png(9000, 9000), f"has 9000 x 9000 = 81000000 pixels; at most {MAX_PIXELS} are taken"),
    "100 million pixels": (png(10000, 10000), f"has 10000 x 10000 = 100000000 pixels; at most {MAX_PIXELS} are taken"),
    "3.6 billion pixels": (png(60000, 60000), f"has 3600000000 pixels; at most {MAX_PIXELS} are taken"),
    "a huge array": (np.broadcast_to(np.uint8(0), (9000, 9000, 3)), "has 9000 x 9000 = 81000000 pixels"),
    "a slim array": (
        np.zeros((2**22, 1), np.uint8),
        f"of 1 x 4194304 pixels makes 104858 patches; at most {MAX_PATCHES} are taken",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_refused(case: str) -> None:
    """Each refusal names the item and what is wrong with it, at a bounded length, and no warning is let out."""
    source, told = BROKEN[case]
    with pytest.raises(InputError) as caught:
        image_patches(source, ImageConfig(), "image 7")
    message = str(caught.value)
    assert message.startswith("image 7") and told in message and len(message) < 400


def test_growth_to_an_absurd_size_is_refused() -> None:
    """Before the work, whatever a configuration says."""
    with pytest.raises(InputError, match=r"image of 1 x 1 pixels makes 6252500 patches; at most 65536 are taken"):
        image_patches(np.zeros((1, 1, 3), np.uint8), ImageConfig(1e5, max_upscaled_edge=10**6))


def test_errors_name_the_file(tmp_path: Path) -> None:
    """The item and its path; what is wrong with the machine and not with the file stays what it is."""
    path = tmp_path / "cut.jpg"
    path.write_bytes(GOOD_JPEG[:-200])
    with pytest.raises(InputError, match=r"^image 2: .*cut\.jpg is an image that cannot be decoded: .*[Tt]runcated"):
        to_patches(path, name="image 2")


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_faults_of_the_machine_are_not_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """When opening, and while Pillow reads and converts."""
    path = tmp_path / "a.png"
    path.write_bytes(file_of(palette(), "PNG"))

    def fail(*_: object, **__: object) -> None:
        raise error

    for target in ((Path, "open"), (Image, "open"), (Image.Image, "convert")):
        with monkeypatch.context() as patch:
            patch.setattr(*target, fail)
            with pytest.raises(type(error)):
                to_patches(path)


FILES = [make() for name, make in EXACT.items() if "two" not in name] + [GOOD_JPEG]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FILES), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6), st.integers(0, 2000))
def test_damaged_files_are_read_or_refused(data: bytes, changes: list[tuple[int, int]], length: int) -> None:
    """Whatever a file holds, nothing but an InputError comes out, and no warning."""
    damaged = bytearray(data)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    try:
        image = read_image(bytes(damaged[: max(1, length)]), "image 1")
    except InputError as error:
        assert str(error).startswith("image 1")
    else:
        assert image.mode == "RGB"
