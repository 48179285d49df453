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
from inkling_jax.errors import CheckpointError

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
