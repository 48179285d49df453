"""The plan of the hMLP vision tower, which its configuration implies but does not list (spec 4.2). Knows no arrays."""

from __future__ import annotations

import math
from typing import NamedTuple

from inkling_jax.config_parts import VisionConfig


class VisionFold(NamedTuple):
    """One linear of the tower: blocks of `time` x `side` x `side` of the grid before it become one place of the grid after it."""

    time: int
    side: int
    inputs: int  # columns of the linear: time * side**2 * channels before
    outputs: int  # its rows: channels after


def vision_folds(vision: VisionConfig) -> list[VisionFold]:
    """The linears of the hMLP tower in order: each folds the places of one scale into those of the next (spec 4.2)."""
    scales = _vision_scales(vision)
    folds = []
    for small, large in zip(scales, scales[1:], strict=False):
        time, side = large[0] // small[0], large[1] // small[1]
        folds.append(VisionFold(time, side, time * side**2 * small[2], large[2]))
    folds[-1] = folds[-1]._replace(outputs=vision.hidden_size)
    return folds


def _vision_scales(vision: VisionConfig) -> list[tuple[int, int, int]]:
    """(time, side, channels) from one pixel to the whole patch: n_layers + 1 of the possible scales, even in log size."""
    channels = vision.num_channels
    scales, side, time = [(1, 1, channels)], 1, 1
    for prime in _primes(vision.patch_size):
        side *= prime
        scales.append((1, side, _round_up(channels * side * side)))
    for prime in _primes(vision.temporal_patch_size):
        time *= prime
        scales.append((time, side, _round_up(channels * side * side * time)))
    sizes = [math.log(time * side * side) for time, side, _ in scales]
    top = math.log(vision.patch_size**2 * vision.temporal_patch_size * channels)
    targets = [top * index / vision.num_layers for index in range(vision.num_layers + 1)]
    if vision.num_layers >= len(scales):
        chosen = [min(range(len(sizes)), key=lambda j: abs(target - sizes[j])) for target in targets]
    else:
        chosen = _assign(targets, sizes)
    chosen[0], chosen[-1] = 0, len(scales) - 1
    return [scales[index] for index in chosen]


def _assign(targets: list[float], sizes: list[float]) -> list[int]:
    """A different size for each target with the least total distance. Both ascend, so the best choice ascends too."""
    best: list[tuple[float, list[int]]] = [(0.0, [])] * (len(sizes) + 1)  # using only the first j sizes
    for count, target in enumerate(targets, start=1):
        row: list[tuple[float, list[int]]] = [(math.inf, [])] * (len(sizes) + 1)
        for j in range(count, len(sizes) + 1):
            cost, picks = best[j - 1]
            row[j] = min(row[j - 1], (cost + abs(target - sizes[j - 1]), [*picks, j - 1]), key=lambda entry: entry[0])
        best = row
    return best[-1][1]


def _primes(number: int) -> list[int]:
    """Prime factors, largest first."""
    factors, prime = [], 2
    while number > 1:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        prime += 1
    return factors[::-1]


def _round_up(channels: int) -> int:
    return -(-channels // 64) * 64
