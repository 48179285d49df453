"""Patches of images: the reference, sizes, tiles by hand, and what a checkpoint says of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from pictures import PICTURE
from PIL import Image

from inkling_jax.errors import CheckpointError, ConfigError
from inkling_jax.inputs import images
from inkling_jax.inputs.images import ImageConfig, image_patches, to_patches

PLAIN = ImageConfig(rescale_frac=None)


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
