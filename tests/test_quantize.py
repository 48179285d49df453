"""Weights to NVFP4: exact codes of blocks made by hand, and the search for a scale."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from inkling_jax.convert import nvfp4
from inkling_jax.convert.quantize import quantize
from inkling_jax.errors import InputError

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E4M3 = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
LARGEST = [2688, *[0] * 15]  # the block that makes the matrix scale 1
EXACT = [6, 6, 6, -6, -6, -6, 4, 4, 4, -4, -4, -3, 1.5, 1, 0.5]  # as it stands, under a block scale of 1


def of_rows(*rows: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """The numbers that stand for rows of one block, and the bytes of their scales; the matrix scale is 1."""
    found = quantize(np.array([LARGEST, *rows], np.float32))
    assert found.scale2 == 1 and found.scale[0].astype(np.float32) == 448
    numbers = nvfp4.dequantize(found.values, found.scale, np.asarray(found.scale2))
    assert numbers[0].tolist() == LARGEST
    return numbers[1:], found.scale.view(np.uint8)[1:, 0]


def test_ties_go_to_the_even_code_and_all_else_to_the_nearest() -> None:
    """One number a block beside codes that are exact under a scale of 1, so that no other scale can be better."""
    cases = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4, 0.26: 0.5, 1.7: 1.5, 2.51: 3, 4.9: 4, 5.1: 6, 6.4: 6}
    cases |= {-value: -code for value, code in cases.items()}
    numbers, scales = of_rows(*([value, *EXACT] for value in cases))
    assert (scales == 0x38).all()  # 1.0
    assert numbers[:, 0].tolist() == list(cases.values())
    assert (numbers[:, 1:] == EXACT).all()
    assert (np.signbit(numbers[:, 0]) == [value < 0 for value in cases]).all()


@pytest.mark.parametrize(
    ("block", "scale"),
    [
        ([4, -3, 2, 1.5, 1, 0.5] + [4] * 10, 0x38),  # no 6: block max / 6 would be 0.667, and nothing exact
        ([6.5] + [4, 3, 2, -1] * 3 + [1.5] * 3, 0x38),  # the largest saturates rather than that all others move to 1.125
        ([12] * 16, 0x40),  # 2.0
        ([0] * 16, 0x01),  # never zero, which hides what it scales
    ],
)
def test_the_scale_of_a_block(block: list[float], scale: int) -> None:
    numbers, scales = of_rows(block)
    assert scales[0] == scale
    np.testing.assert_array_equal(numbers[0], np.minimum(block, 6) if block[0] == 6.5 else block)


def by_block(weight: np.ndarray, scale: np.ndarray, scale2: np.float32) -> np.ndarray:
    """Squared error of each block under a scale, each number at its nearest code, in float64 and in units of scale2."""
    blocks = weight.astype(np.float64).reshape(*scale.shape, 16) / np.float64(scale2)
    distance = np.abs(np.abs(blocks)[..., None] - CODES * scale[..., None, None].astype(np.float64))
    return (distance.min(-1) ** 2).sum(-1)


@pytest.mark.parametrize(("spread", "tails"), [(0.02, 30), (1e-30, 3), (1e30, 30)])
def test_error_is_never_above_that_of_the_largest_number(spread: float, tails: int) -> None:
    """Block by block; over all as small as with any scale there is, and on normal numbers 0.082 where that scale gives 0.095."""
    weight = (np.random.default_rng(2).standard_t(tails, size=(32, 256)) * spread).astype(np.float32)
    found = quantize(weight)
    blocks = np.abs(weight).reshape(32, 16, 16)
    assert np.isclose(found.scale2, blocks.max() / 2688, rtol=1e-6)
    plain = np.clip(blocks.max(-1) / 6 / found.scale2, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    error = by_block(weight, found.scale.astype(np.float32), found.scale2)
    assert (error <= by_block(weight, plain, found.scale2) * (1 + 1e-5)).all()
    best = np.min([by_block(weight, np.full((32, 16), scale), found.scale2) for scale in E4M3], axis=0)
    assert error.sum() <= best.sum() * 1.0001
    whole = np.square(weight.astype(np.float64) / found.scale2).sum()
    assert np.isclose(found.error, np.sqrt(error.sum() / whole), rtol=1e-4)
    left = nvfp4.dequantize(found.values, found.scale, np.asarray(found.scale2)).astype(np.float64) - weight
    assert np.isclose(found.error, np.linalg.norm(left) / np.linalg.norm(weight.astype(np.float64)), rtol=1e-4)
    if tails == 30:
        assert 0.079 < found.error < 0.085 < 0.092 < np.sqrt(by_block(weight, plain, found.scale2).sum() / whole) < 0.099


def test_what_four_bits_hold_is_kept() -> None:
    """Whatever the largest code of a block is, if the matrix reaches its largest number."""
    rng = np.random.default_rng(3)
    for largest in range(8):
        codes = rng.integers(0, largest + 1, (16, 64)) + 8 * rng.integers(0, 2, (16, 64))
        scale = rng.integers(0x28, 0x7F, (16, 4)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        codes[0, 0], scale[0, 0] = 7, 448
        packed = codes.astype(np.uint8)
        weight = nvfp4.dequantize(packed[:, 0::2] | packed[:, 1::2] << 4, scale, np.float32(2.0**-12))
        found = quantize(weight)
        assert np.array_equal(nvfp4.dequantize(found.values, found.scale, np.asarray(found.scale2)), weight), largest
        assert found.error == 0


def test_what_cannot_be_quantised_is_refused() -> None:
    assert quantize(np.zeros((4, 16), np.float32)).error == 0
    with pytest.raises(InputError, match="17 columns are not whole blocks of 16"):
        quantize(np.ones((2, 17), np.float32))
    for wrong in (np.nan, np.inf):
        with pytest.raises(InputError, match="not finite"):
            quantize(np.full((2, 16), wrong, np.float32))
