"""Audio of any rate to 16 kHz: a polyphase windowed sinc in linear phase, as products of windows of samples with a table.

The filter passes within 1e-4 dB what lies below 91.25% of the lower of the two Nyquist frequencies (7.3 kHz for rates from
16 kHz up), and from that Nyquist frequency on it stops by 100 dB what would be folded back, or mirrored where the rate goes
up. Sample n of the output is the input at time n / 16000; outside the clip the input is zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from inkling_jax.inputs.sample_blocks import bucket, overlapping

RATE = 16_000  # samples a second that the model hears
ATTENUATION = 103.0  # dB that the window is designed for: the 100 promised, and what normalising each phase costs
PASSED = 0.9125  # of the lower Nyquist frequency
GROUP = 64  # output samples computed from one window of the input; divides RATE, so a second is a whole number of groups
SECONDS = (1, 4, 16)  # sizes of block, one compilation each


def resample(blocks: Iterable[Float32[np.ndarray, " n"]], rate: int) -> Iterator[Float32[np.ndarray, " m"]]:
    """The stream at 16 kHz: in all ceil(samples * 16000 / rate) samples, in blocks of at most 16 seconds."""
    if rate == RATE:
        yield from blocks
        return
    table, offsets, half = _filter(rate)
    periods, width = RATE // GROUP // len(offsets), table.shape[1]  # a second's repetitions of the table
    for window, valid in overlapping(blocks, SECONDS[-1] * rate, half, width - half):
        seconds = bucket(-(-valid // rate), SECONDS)
        samples = _apply(window[: seconds * rate + width], table, offsets, seconds * periods, rate // periods)
        yield np.asarray(samples)[: -(-valid * RATE // rate)]


@functools.partial(jax.jit, static_argnums=(3, 4))
def _apply(
    window: Float[Array, " n"], table: Float[Array, "D K G"], offsets: Int[Array, " D"], periods: int, hop: int
) -> Float[Array, " m"]:
    """`periods` times the D groups of the table, each from K samples at its offset; a period is `hop` samples of the input."""
    width = table.shape[1]
    # A row a period, holding all that its groups look at: whole rows are copied and sliced, since XLA gathers one by one.
    spans = -(-(hop + width) // hop)
    rows = jnp.pad(window, (0, (periods + spans - 1) * hop - len(window))).reshape(-1, hop)
    rows = jnp.concatenate([rows[i : i + periods] for i in range(spans)], axis=1)
    samples = jax.vmap(lambda offset: jax.lax.dynamic_slice(rows, (0, offset), (periods, width)))(offsets)
    return jnp.matmul(samples, table, precision="highest").swapaxes(0, 1).ravel()


@functools.lru_cache(maxsize=2)  # a rate that shares few factors with 16000 has a table of up to 320 MB
def _filter(rate: int) -> tuple[Float32[np.ndarray, "D K G"], Int[np.ndarray, " D"], int]:
    """The weights of K input samples for each of GROUP outputs of each of D groups, where they start, and the filter's half.

    Group d's window starts offsets[d] - half samples into the period. A period is a number of groups after which input and
    output samples coincide again, and at least five, which makes it longer than the filter.
    """
    nyquist = min(rate, RATE) / 2
    cutoff, band = nyquist * (1 + PASSED) / 2, nyquist * (1 - PASSED)
    # Kaiser's formulas: the length for a band of transition, and the window's parameter.
    length = (ATTENUATION - 7.95) / (14.36 * band)  # seconds
    beta = 0.1102 * (ATTENUATION - 8.7)
    half = math.ceil(length / 2 * rate)
    groups = math.lcm(RATE // math.gcd(rate, RATE), 5 * GROUP) // GROUP
    width = 2 * half + math.ceil((GROUP - 1) * rate / RATE) + 2
    offsets = np.arange(groups) * GROUP * rate // RATE
    table = np.empty((groups, width, GROUP), np.float32)
    for group in range(groups):  # one at a time: in float64 all would take four times the table
        outputs = (group * GROUP + np.arange(GROUP)) * rate  # positions in units of a RATE-th of an input sample: exact
        inputs = (offsets[group] - half + np.arange(width)) * RATE
        time = (inputs[:, None] - outputs) / (RATE * rate)
        inside = np.clip(1 - (2 * time / length) ** 2, 0, None)
        weights = np.sinc(2 * cutoff * time) * np.i0(beta * np.sqrt(inside)) * (inside > 0)
        table[group] = weights / weights.sum(axis=0)  # a constant stays that constant at every phase
    return table, offsets.astype(np.int32), half
