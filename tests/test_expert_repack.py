"""The kernels' order of NVFP4 weights: every published bit comes back, and the words decode to the numbers they stand for."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_jax.errors import CheckpointError
from inkling_jax.kernels.expert_matmul import Nvfp4
from inkling_jax.kernels.expert_matmul.pack import decode_block, pack, unpack

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def make(seed: int, shape: tuple[int, ...], lowest: int = 0) -> Nvfp4:
    """Every code and every scale byte from `lowest` to the largest, subnormal and zero ones too."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    scale = rng.integers(lowest, 0x7F, (*shape[:-1], shape[-1] // 16)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    return Nvfp4(values, scale, rng.uniform(0.5, 2, shape[:-2]).astype(np.float32))


def numbers(weight: Nvfp4) -> np.ndarray:
    """What codes and block scales stand for."""
    values = np.asarray(weight.values)
    codes = np.stack([values & 0xF, values >> 4], -1).reshape(*values.shape[:-1], -1)
    return E2M1[codes] * np.repeat(np.asarray(weight.scale).astype(np.float32), 16, -1)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), shape=st.sampled_from([(2, 64, 128), (1, 192, 256), (3, 2, 64, 128), (1, 2, 128, 384)]))
def test_comes_back(seed: int, shape: tuple[int, ...]) -> None:
    """Bytes exactly where the scale is not zero, numbers exactly everywhere."""
    weight = make(seed, shape)
    back = unpack(pack(weight, "w"))
    scaled = np.asarray(weight.scale).view(np.uint8) != 0
    assert np.array_equal(np.asarray(back.scale).view(np.uint8)[scaled], weight.scale.view(np.uint8)[scaled])
    of_bytes = np.repeat(scaled, 8, -1)
    assert np.array_equal(np.asarray(back.values)[of_bytes], weight.values[of_bytes])
    assert np.array_equal(numbers(back), numbers(weight))
    assert np.array_equal(back.scale2, weight.scale2)


@pytest.mark.parametrize("shape", [(2, 128, 256), (2, 2, 64, 256)])
def test_blocks_decode(shape: tuple[int, ...]) -> None:
    """Each block of words is 64 rows by 128 columns; gate and up rows take turns by eight channels."""
    weight = make(1, shape)
    rows = numbers(weight)
    if len(shape) == 4:
        eight = [
            [64 * f + 16 * c + 4 * j + 2 * kh + i for c in range(4) for i in (0, 1)]
            for f, j, kh in np.ndindex(shape[2] // 64, 4, 2)
        ]
        order = [(part, f) for group in eight for part in (0, 1) for f in group]
        rows = np.stack([rows[:, part, f] for part, f in order], 1)
    words = pack(weight, "w").words
    assert words.shape == (2, 2, 2, 9, 128)
    for e, n, k in np.ndindex(2, 2, 2):
        assert np.array_equal(decode_block(words[e, n, k]), rows[e, 64 * n : 64 * n + 64, 128 * k : 128 * k + 128])


def test_every_scale_and_code() -> None:
    """All 126 positive scales with all 16 codes, by place: a mistake in one bit of one place shows."""
    scale = (1 + np.arange(64 * 8) % 126).astype(np.uint8).reshape(1, 64, 8)
    values = np.arange(64 * 64).astype(np.uint8).reshape(1, 64, 64)
    weight = Nvfp4(values, scale.view(ml_dtypes.float8_e4m3fn), np.ones(1, np.float32))
    assert np.array_equal(decode_block(pack(weight, "w").words[0, 0, 0]), numbers(weight)[0])


@pytest.mark.parametrize("shape", [(2, 128, 256), (3, 2, 64, 128)])
def test_bfloat16_comes_back(shape: tuple[int, ...]) -> None:
    """Every bit, and a block of words is 64 rows by 128 columns of it, in the same places as packed codes."""
    weight = np.arange(np.prod(shape)).reshape(shape).astype(np.uint16).view(ml_dtypes.bfloat16)
    packed = pack(weight, "w")
    assert np.array_equal(np.asarray(unpack(packed)).view(np.uint16), weight.view(np.uint16))
    small = np.random.default_rng(0).integers(-8, 8, shape)
    codes = np.where(small < 0, 16 + small, small) % 16
    like = Nvfp4(
        (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8),
        np.ones((*shape[:-1], shape[-1] // 16), ml_dtypes.float8_e4m3fn),
        np.ones(shape[:-2], np.float32),
    )
    one, other = pack(E2M1[codes].astype(ml_dtypes.bfloat16), "w").words, pack(like, "w").words
    assert np.array_equal(decode_block(one[0, 1, 0]), decode_block(other[0, 1, 0]))


@pytest.mark.parametrize(("byte", "told"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x80, "negative"), (0xB1, "negative")])
def test_bad_scales_are_refused(byte: int, told: str) -> None:
    """NaN and negative scales have no byte of ours."""
    weight = make(0, (2, 64, 128))
    weight.scale.view(np.uint8)[1, 5, 3] = byte
    with pytest.raises(CheckpointError, match=f"layer 3 w2: a block scale is {told}.*0x{byte:02X}"):
        pack(weight, "layer 3 w2")


@pytest.mark.parametrize("shape", [(1, 32, 128), (1, 64, 64), (1, 2, 32, 128)])
def test_odd_sizes_are_refused(shape: tuple[int, ...]) -> None:
    """Rows in 64s, columns in 128s."""
    with pytest.raises(CheckpointError, match="not in blocks of 64 rows and 128 columns"):
        pack(make(0, shape), "w")
