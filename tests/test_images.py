"""Image input: reference patches, sizes, tiling by hand, every kind of file, and what each wrong one is told."""

from __future__ import annotations

import base64
import errno
import io
import json
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from inkling_jax.errors import CheckpointError, ConfigError, InputError
from inkling_jax.inputs import images
from inkling_jax.inputs.image_reading import MAX_PIXELS, read_image
from inkling_jax.inputs.images import MAX_PATCHES, ImageConfig, image_patches, to_patches

PLAIN = ImageConfig(rescale_frac=None)
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


# Reference


@pytest.mark.parametrize("name", ["41x39", "40x40", "1x1", "120x81", "200x90"])
def test_reference_patches(expected: Callable[..., dict[str, np.ndarray]], name: str) -> None:
    """Tiles of the image as it is, and counts and means of the tiles of the image at twice its size."""
    answers = expected("tiny")
    rgb = answers[f"image.{name}.rgb"]
    patches, want = to_patches(rgb), answers[f"image.{name}.patches"]
    assert patches.shape == (answers[f"image.{name}.num_patches"], 2, 40, 40, 3) and patches.dtype == np.float32
    for slot in (0, 1):
        np.testing.assert_allclose(patches[:, slot], want.astype(np.float32), atol=1e-3 if want.dtype == np.float16 else 1e-5)
    doubled = to_patches(rgb, 2.0)
    assert len(doubled) == answers[f"image_x2.{name}.num_patches"]
    np.testing.assert_allclose(doubled.mean(axis=(1, 2, 3)), answers[f"image_x2.{name}.patch_mean"], atol=2e-3)


# Sizes


@pytest.mark.parametrize(
    ("width", "height", "patches", "scaled"),
    [
        (40, 40, 6, (80, 80)),
        (41, 39, 6, (82, 78)),
        (80, 40, 10, (160, 80)),
        (100, 100, 30, (200, 200)),
        (500, 30, 52, (1000, 60)),
        (640, 480, 792, (1280, 960)),
        (1024, 768, 2028, (2048, 1536)),
        (1920, 1080, 1508, (2048, 1152)),
        (2048, 1, 52, (2048, 1)),
        (3000, 2000, 3800, (3000, 2000)),
        (1100, 1, 52, (2048, 2)),
        (1024, 5, 52, (2048, 10)),
        (1639, 2, 52, (2048, 2)),  # 2 x 1.2495 = 2.499
        (1638, 2, 52, (2048, 3)),  # 2 x 1.2503 = 2.5006
    ],
)
def test_pre_scaled_sizes(width: int, height: int, patches: int, scaled: tuple[int, int]) -> None:
    """Twice as large, but not beyond 2048 by growing."""
    assert ImageConfig().scaled_size(height, width) == scaled[::-1]
    assert ImageConfig().num_patches(height, width) == patches


def test_half_a_pixel_rounds_up() -> None:
    """5 x 0.5 more is 2.5 and 12.5: to 3 and 13, where rounding to even would give 2 and 12."""
    assert ImageConfig(rescale_frac=2.5).scaled_size(1, 5) == (3, 13)
    assert PLAIN.scaled_size(1, 5) == (1, 5)
    assert PLAIN.num_patches(480, 640) == 204


@pytest.mark.parametrize(("width", "height"), [(1, 1), (39, 40), (40, 41), (121, 80), (30, 3)])
def test_counts_are_those_of_the_patches(width: int, height: int) -> None:
    """The number is known without the work."""
    for config in (ImageConfig(), PLAIN, ImageConfig(3.0, max_upscaled_edge=100)):
        patches = image_patches(np.zeros((height, width, 3), np.uint8), config)
        assert len(patches) == config.num_patches(height, width)


def test_growth_is_by_lanczos() -> None:
    """A step of 0 to 255, doubled: Pillow's window of three lobes overshoots, and is clipped to what a byte holds."""

    def weight(x: float) -> float:
        return float(np.sinc(x) * np.sinc(x / 3)) if abs(x) < 3 else 0.0

    step = np.repeat(np.array([0, 0, 0, 0, 200, 200, 200, 200], np.uint8)[None, :, None], 3, axis=2)
    expected = []
    for out in range(16):
        weights = [weight((out + 0.5) / 2 - (i + 0.5)) for i in range(8)]
        expected.append(np.dot(weights, step[0, :, 0]) / sum(weights))
    assert min(expected) < -5
    got = to_patches(step, 2.0)[0, 0, 0, :16, 0] * 0.26862954 * 255 + 0.48145466 * 255
    np.testing.assert_allclose(got, np.clip(expected, 0, 255), atol=1)


# Tiles


def test_tiles_against_loops() -> None:
    """Row by row, one column more than are full, padded with a pixel of -1; (x / 255 - mean) / std in float64."""
    rgb = np.random.default_rng(0).integers(0, 256, (83, 120, 3), dtype=np.uint8)
    config = ImageConfig(None, mean=(0.5, 0.25, 0.125), std=(0.5, 1.0, 2.0))
    patches = image_patches(rgb, config)
    assert patches.shape == (3 * 4, 2, 40, 40, 3)
    for row, column in np.ndindex(3, 4):
        for y, x in ((0, 0), (2, 39), (3, 0), (39, 39)):
            h, w = row * 40 + y, column * 40 + x
            raw = rgb[h, w].astype(float) if h < 83 and w < 120 else np.full(3, -1.0)
            want = (raw / 255 - [0.5, 0.25, 0.125]) / [0.5, 1, 2]
            for slot in (0, 1):
                np.testing.assert_allclose(patches[row * 4 + column, slot, y, x], want, atol=1e-6)


def test_padding_is_not_black() -> None:
    """The extra column of a white image, beside white and black."""
    white = to_patches(np.full((40, 40, 3), 255, np.uint8))
    black = to_patches(np.zeros((40, 40, 3), np.uint8))
    assert len(white) == 2
    np.testing.assert_allclose(white[0], np.broadcast_to([1.93034, 2.07488, 2.14590], (2, 40, 40, 3)), atol=1e-5)
    np.testing.assert_allclose(black[0], np.broadcast_to([-1.79226, -1.75210, -1.48022], (2, 40, 40, 3)), atol=1e-5)
    for padded in (white[1], black[1]):
        np.testing.assert_allclose(padded, np.broadcast_to([-1.80686, -1.76710, -1.49444], (2, 40, 40, 3)), atol=1e-5)


def test_a_pair_fills_the_time_slots() -> None:
    """A tuple of two images of one size, each prepared as it would be alone."""
    first, second = (np.random.default_rng(seed).integers(0, 256, (50, 30, 3), dtype=np.uint8) for seed in (0, 1))
    patches = image_patches((first, Image.fromarray(second)))
    np.testing.assert_array_equal(patches[:, 0], image_patches(first)[:, 0])
    np.testing.assert_array_equal(patches[:, 1], image_patches(second)[:, 1])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, jnp.bfloat16])
def test_ready_patches_pass(dtype: type) -> None:
    """As float32, from numpy or jax."""
    ready = np.random.default_rng(0).standard_normal((3, 2, 40, 40, 3)).astype(dtype)
    for given_as in (ready, jnp.asarray(ready) if dtype is not np.float64 else ready):
        patches = to_patches(given_as, 2.0)
        assert isinstance(patches, np.ndarray) and patches.dtype == np.float32
        np.testing.assert_array_equal(patches, ready.astype(np.float32))


# Kinds of files


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


# What is refused


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


# Configuration


def write_config(folder: Path, **section: object) -> Path:
    """A processor_config.json with these fields of images."""
    (folder / images.PROCESSOR_FILE).write_text(json.dumps({"image_token": "x", "image_processor": section}))
    return folder


def test_configuration_of_a_checkpoint(oracle_dir: Callable[..., Path], tmp_path: Path) -> None:
    """As published; what is absent is the published default, but a null is no growth."""
    assert ImageConfig.from_directory(oracle_dir("tiny")) == ImageConfig()
    assert ImageConfig.from_directory(tmp_path) == ImageConfig(2.0, 2048)
    assert ImageConfig.from_directory(write_config(tmp_path)) == ImageConfig()
    assert ImageConfig.from_directory(write_config(tmp_path, rescale_image_frac=None)) == PLAIN
    changed = {
        "rescale_image_frac": 3,
        "rescale_image_max_upscaled_long_edge": 99,
        "image_mean": [0, 0.5, 1],
        "image_std": [1, 2, 3],
    }
    read = ImageConfig.from_directory(write_config(tmp_path, **changed, size={"height": 40, "width": 40}))
    assert read == ImageConfig(3.0, 99, (0.0, 0.5, 1.0), (1.0, 2.0, 3.0))
    (tmp_path / images.PROCESSOR_FILE).write_text("{}")
    assert ImageConfig.from_directory(tmp_path) == ImageConfig()


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"rescale_image_frac": "2"}, "image_processor.rescale_image_frac is '2', expected a finite number from 1 to"),
        ({"rescale_image_frac": 0.5}, "image_processor.rescale_image_frac is 0.5, expected a finite number from 1 to"),
        ({"rescale_image_frac": True}, "image_processor.rescale_image_frac is True"),
        ({"rescale_image_frac": math.nan}, "image_processor.rescale_image_frac is nan"),
        ({"rescale_image_max_upscaled_long_edge": 2048.5}, "rescale_image_max_upscaled_long_edge is 2048.5, expected an integer"),
        ({"rescale_image_max_upscaled_long_edge": 0}, "rescale_image_max_upscaled_long_edge is 0, expected an integer from 1"),
        ({"image_mean": 0.5}, "image_processor.image_mean is 0.5, expected three finite numbers, one a channel"),
        ({"image_mean": [0.5, 0.5]}, "image_processor.image_mean is [0.5, 0.5], expected three finite numbers"),
        ({"image_mean": [0.5, "a", 1]}, "image_processor.image_mean is"),
        (
            {"image_std": [1, 0, 1]},
            "image_processor.image_std is [1, 0, 1], expected three finite numbers above 0, one a channel",
        ),
        ({"image_std": [1, math.inf, 1]}, "image_processor.image_std is"),
        ({"size": {"height": 40, "width": 32}}, "image_processor.size.width is 32, expected 40 (nothing else is supported)"),
        ({"size": 40}, "image_processor.size is 40, expected an object"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, section: dict, told: str) -> None:
    """With the file that they are in."""
    with pytest.raises(ConfigError) as caught:
        ImageConfig.from_directory(write_config(tmp_path, **section))
    assert str(caught.value).startswith(str(tmp_path / images.PROCESSOR_FILE)) and told in str(caught.value)


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    """No JSON, another kind of value, and a section that is none."""
    file = tmp_path / images.PROCESSOR_FILE
    for text, kind, told in (("{", CheckpointError, "not valid JSON"), ("[]", CheckpointError, "expected a JSON object")):
        file.write_text(text)
        with pytest.raises(kind, match=told):
            ImageConfig.from_directory(tmp_path)
    file.write_text('{"image_processor": 5}')
    with pytest.raises(ConfigError, match="image_processor is 5, expected an object"):
        ImageConfig.from_directory(tmp_path)


@pytest.mark.parametrize("frac", [0, 0.5, -1, math.nan, math.inf, "2", True])
def test_pre_scaling_that_shrinks_is_refused(frac: object) -> None:
    """Where a caller gives it, too."""
    with pytest.raises(ConfigError, match="rescale_frac is .*; a number of at least 1, or None"):
        to_patches(PICTURE, frac)  # type: ignore[arg-type]
