"""NVFP4 bit by bit: every code, every scale byte, and the roundings where other implementations went wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import load

from inkling_jax.convert import nvfp4
from inkling_jax.errors import CheckpointError, InputError

# sign, two bits of exponent (bias 1), one of mantissa: typed from the format's definition
CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def e4m3(byte: int) -> float:
    """The number that an E4M3 byte stands for: sign, 4 bits of exponent (bias 7), 3 of mantissa, NaN where all are set."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 0xF, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def scales(*bytes_: int) -> np.ndarray:
    """E4M3 numbers from their bytes."""
    return np.array(bytes_, np.uint8).view(ml_dtypes.float8_e4m3fn)


def test_each_byte_holds_the_even_column_low() -> None:
    unpacked = nvfp4.unpack(np.arange(256, dtype=np.uint8)[:, None])
    assert unpacked.shape == (256, 2) and unpacked.dtype == np.float32
    for byte in range(256):
        assert unpacked[byte].tolist() == [CODES[byte % 16], CODES[byte // 16]]
    assert np.signbit(unpacked[0x08, 0]) and not np.signbit(unpacked[0x08, 1])


def test_each_scale_byte_decodes() -> None:
    ones = np.full((1, 0x7F, 8), 0x22, np.uint8)  # sixteen codes of 1.0 a row, one row a scale
    result = nvfp4.dequantize(ones, scales(*range(0x7F)).reshape(1, 0x7F, 1), np.ones(1, np.float32))
    for byte in range(0x7F):
        assert (result[0, byte] == e4m3(byte)).all(), byte
    assert result[0, 0x7E, 0] == 448 and result[0, 0x77, 0] == 240 and result[0, 0x01, 0] == 2.0**-9


def test_scales_multiply() -> None:
    # 2.0 * 1.5 * 0.5: dividing by the matrix scale would give 6
    value = nvfp4.dequantize(np.full((1, 1, 8), 0x44, np.uint8), scales(0x3C).reshape(1, 1, 1), np.array([0.5], np.float32))
    assert (value == 1.5).all()


def test_small_scales_do_not_flush() -> None:
    value = nvfp4.dequantize(np.full((1, 8), 0x77, np.uint8), scales(0x01).reshape(1, 1), np.float32(2.0**-130))
    assert value.dtype == np.float32 and (value == 6 * 2.0**-139).all()


@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_reference_weights_decode_as_element_by_element(oracle_dir: Callable[..., Path], matrix: str) -> None:
    tensors = load(oracle_dir("tiny"))
    name = f"model.llm.layers.4.mlp.experts.{matrix}_weight"
    values, scale, scale2 = (tensors[name + suffix] for suffix in ("", ".scale", ".scale2"))
    whole = nvfp4.dequantize(values, scale, scale2)
    assert whole.shape == tuple(tensors[name + ".original_shape"])
    rng = np.random.default_rng(0)
    for _ in range(500):
        e, o, i = (int(rng.integers(0, size)) for size in whole.shape)
        code = int(values[e, o, i // 2]) >> (4 * (i % 2)) & 0xF
        exact = CODES[code] * e4m3(int(scale.view(np.uint8)[e, o, i // 16])) * float(scale2[e])
        assert whole[e, o, i] == np.float32(exact)


def test_numbers_go_to_the_nearest_code_and_ties_to_even() -> None:
    assert nvfp4.E2M1[nvfp4.encode(np.array([6.9, 5, 2.5, 0.25, 0.75], np.float32))].tolist() == [6, 4, 2, 0, 1]
    assert nvfp4.E2M1[nvfp4.encode(np.array([1.25, 1.75, 3.5, 1e9, -5, -0.75], np.float32))].tolist() == [1, 2, 4, 6, -4, -1]
    grid = np.linspace(-8, 8, 1601, dtype=np.float32)
    nearest = np.abs(grid[:, None].astype(np.float64) - np.array(CODES)).min(-1)
    decoded = nvfp4.E2M1[nvfp4.encode(grid)]
    assert np.array_equal(np.abs(grid.astype(np.float64) - decoded), nearest)
    assert (np.signbit(decoded) == np.signbit(grid)).all()


def test_packing_is_the_inverse_of_unpacking() -> None:
    data = np.arange(256, dtype=np.uint8).reshape(2, 128)
    codes = np.stack([data & 15, data >> 4], -1).reshape(2, 256)
    assert np.array_equal(nvfp4.pack(codes), data)
    assert np.array_equal(nvfp4.encode(nvfp4.unpack(data)), codes)


def test_block_scales_are_clipped_before_the_cast() -> None:
    assert np.isnan(np.float32(500).astype(ml_dtypes.float8_e4m3fn).astype(np.float32))  # why the clip is there
    clipped = nvfp4.encode_scale(np.array([500, 1e30, 448, 240, 0], np.float32)).astype(np.float32)
    assert clipped.tolist() == [448, 448, 448, 240, 2**-9]


@pytest.mark.parametrize("spread", [1e-30, 0.02, 1.0, 1e30])
def test_quantised_normals_stay_close(spread: float) -> None:
    weight = (np.random.default_rng(2).normal(size=(3, 64, 256)) * spread).astype(np.float32)
    values, scale, scale2 = nvfp4.quantize(weight)
    assert (values.shape, scale.shape, scale2.shape) == ((3, 64, 128), (3, 64, 16), (3,))
    assert (values.dtype, scale.dtype, scale2.dtype) == (np.uint8, ml_dtypes.float8_e4m3fn, np.float32)
    nvfp4.check_scale("x", scale)
    nvfp4.check_scale2("x", scale2)
    assert np.allclose(scale2, np.abs(weight).max((1, 2)) / 2688, rtol=1e-6)
    error = nvfp4.dequantize(values, scale, scale2).astype(np.float64) - weight
    # The same measurement on released weights gives 0.087 (spec 7.4); swapped nibbles or halves give more than 1.
    assert 0.07 < np.sqrt((error**2).sum() / (weight.astype(np.float64) ** 2).sum()) < 0.1


def test_what_four_bits_hold_is_kept() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, size=(2, 8, 32)).astype(np.uint8)
    codes[..., 0::16] = 7  # each block and each matrix reaches its largest code
    weight = nvfp4.E2M1[codes] * np.float32(448 * 2.0**-11)  # amax / 2688 is a power of two: every product is exact
    assert np.array_equal(nvfp4.dequantize(*nvfp4.quantize(weight)), weight)


def test_a_matrix_of_zeros_has_usable_scales() -> None:
    values, scale, scale2 = nvfp4.quantize(np.zeros((2, 4, 16), np.float32))
    nvfp4.check_scale("x", scale)
    nvfp4.check_scale2("x", scale2)
    assert (nvfp4.dequantize(values, scale, scale2) == 0).all()


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(InputError, match="17 columns are not whole blocks of 16"):
        nvfp4.quantize(np.ones((2, 17), np.float32))
    with pytest.raises(InputError, match="not finite"):
        nvfp4.quantize(np.full((2, 16), np.nan, np.float32))


def test_scale_bytes_that_are_nan_or_negative_are_refused() -> None:
    nvfp4.check_scale("x", scales(*range(0x7F)))
    for byte in range(0x7F, 0x100):
        fault = "NaN" if np.isnan(e4m3(byte)) else "negative"
        with pytest.raises(CheckpointError, match=rf"file: x.scale: block scale at \(1, 2\) is {fault} \(byte 0x{byte:02X}\)"):
            nvfp4.check_scale("file: x.scale", scales(*[0x38] * 5, byte).reshape(2, 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1e-3])
def test_matrix_scales_must_be_finite_and_positive(value: float) -> None:
    with pytest.raises(CheckpointError, match=r"file: x.scale2: scale at \(1,\) is .*; expected a finite positive number"):
        nvfp4.check_scale2("file: x.scale2", np.array([1e-4, value], np.float32))


def test_a_matrix_scale_that_looks_like_a_reciprocal_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        nvfp4.check_scale2("x.scale2", np.array([0.99], np.float32))
        assert not caplog.records
        nvfp4.check_scale2("x.scale2", np.array([1e-3, 1500.0], np.float32))
    assert "x.scale2" in caplog.text and "1500" in caplog.text
