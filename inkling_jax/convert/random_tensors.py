"""Random content for a tensor of the published layout, sized so that activations stay of order one, a block at a time.

Normal values come from a table of 65,536 quantiles indexed by random bits: several times faster than a sampler, which matters for
gigabytes, and no different at the precision of bfloat16.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
import zlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from inkling_jax.config import ModelConfig
from inkling_jax.convert.header import DTYPES
from inkling_jax.convert.nvfp4 import E2M1

_BLOCK_WORDS = 1 << 20  # 64-bit random words drawn at once: some tens of MB of buffers, whatever the tensor
_SCALES = np.arange(0x68, 0x78, dtype=np.uint8)  # block scales as E4M3 bytes: from 64 up to 240
_AMAX = {"w13": 4.375, "w2": 96.0}  # calibrated activations, which nothing here reads


def random_blocks(config: ModelConfig, seed: int, name: str, dtype: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """The tensor's data as consecutive flat arrays of the stored dtype, the same for a given seed, name, dtype and shape.

    `dtype` is the format's spelling. Integer tensors (.original_shape) hold no random numbers: see `original_shape`.
    """
    bits = np.random.Philox(key=[seed, zlib.crc32(name.encode())])
    left = math.prod(shape)
    itemsize = {"U8": 1, "F8_E4M3": 1}.get(dtype, 2)  # bytes of random bits a value takes
    convert = functools.partial(_values, config, name, dtype, shape)
    while left:
        count = min(left, _BLOCK_WORDS * 8 // itemsize)
        words = bits.random_raw(-(-count * itemsize // 8))
        yield convert(words.view(f"u{itemsize}")[:count])
        left -= count


def original_shape(values: tuple[int, ...]) -> np.ndarray:
    """[E, O, I] of an expert stack whose packed values have shape [E, O, I/2]."""
    return np.array([*values[:-1], 2 * values[-1]], np.int64)


def _values(config: ModelConfig, name: str, dtype: str, shape: tuple[int, ...], bits: np.ndarray) -> np.ndarray:
    if dtype == "U8":
        return bits
    if dtype == "F8_E4M3":
        return _SCALES[bits % len(_SCALES)].view(DTYPES[dtype])
    mean, std = _moments(config, name, shape)
    return _normal_table(mean, std, dtype)[bits]


@functools.lru_cache(maxsize=32)
def _normal_table(mean: float, std: float, dtype: str) -> np.ndarray:
    return (mean + std * _quantiles()).astype(DTYPES[dtype])


@functools.cache
def _quantiles() -> np.ndarray:
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)])


def _moments(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and spread: norms near one, matrices 1 / sqrt(inputs), and the few tensors that are neither."""
    if re.search(r"norm(_\d+)?\.weight$", name):
        return 1.0, 0.1
    if name.endswith(".scale2"):
        return _scale2_moments(config, name)
    if name.endswith(".input_amax"):
        return _AMAX["w13" if ".w13_" in name else "w2"], 0.0
    if name.endswith("gate.global_scale"):
        return 0.4, 0.02  # times route_scale 8: an expert layer adds a few times its input
    if name.endswith("global_scale"):
        return 1.0, 0.1
    if name.endswith("gate.bias"):
        return 0.0, 0.1
    if name == "model.llm.embed.weight":
        return 0.0, 1.0
    if name == "model.llm.unembed.weight":
        return 0.0, config.text.logits_divisor * shape[-1] ** -0.5
    inputs = shape[0] if name.endswith("rel_logits_proj.proj") else shape[-1]
    return 0.0, inputs**-0.5


def _scale2_moments(config: ModelConfig, name: str) -> tuple[float, float]:
    """The scale that gives random codes and block scales the spread 1 / sqrt(inputs), give or take a tenth."""
    inputs = config.text.hidden_size if ".w13_" in name else config.text.expert_width
    codes = float(np.sqrt(np.mean(np.square(E2M1))))
    scales = float(np.sqrt(np.mean(np.square(_SCALES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)))))
    mean = inputs**-0.5 / (codes * scales)
    return mean, 0.1 * mean
