"""Intervals of measured shares, and whether two runs over the same items differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Z = 1.959964  # standard deviations on either side that hold 95% of a normal distribution


class Interval(NamedTuple):
    """An estimate with the ends of its 95% interval."""

    value: float
    low: float
    high: float


class Flips(NamedTuple):
    """Two runs over the same items: right in the first alone, right in the second alone, and how likely that is by chance."""

    lost: int
    gained: int
    p: float


def share(successes: int, total: int) -> Interval:
    """A share of independent items, with Wilson's score interval; of no items it may be anything."""
    if not total:
        return Interval(math.nan, 0.0, 1.0)
    rate, spread = successes / total, Z * Z / total
    centre = rate + spread / 2
    half = Z * math.sqrt(rate * (1 - rate) / total + spread / (4 * total))
    low, high = ((centre + side * half) / (1 + spread) for side in (-1, 1))
    return Interval(rate, max(0.0, min(low, rate)), min(1.0, max(high, rate)))  # rounding may put an end past the share itself


def perplexity(losses: Sequence[float], tokens: Sequence[int]) -> Interval:
    """exp of the mean loss a token, each item giving the sum of its losses, in nats, and their number."""
    return Interval(*(math.exp(min(max(end, 0.0), 700.0)) for end in _mean(losses, tokens)))  # no loss is below zero


def loss_change(before: Sequence[float], after: Sequence[float], tokens: Sequence[int]) -> Interval:
    """Change of the mean loss a token from one run to another over the same items: far surer than either mean."""
    return _mean([second - first for first, second in zip(before, after, strict=True)], tokens)


def _mean(sums: Sequence[float], tokens: Sequence[int]) -> Interval:
    """A mean over tokens of which items, not tokens, are independent: normal, its variance by linearising the ratio of sums."""
    total, items = sum(tokens), len(tokens)
    mean = sum(sums) / total
    residues = sum((value - mean * count) ** 2 for value, count in zip(sums, tokens, strict=True))
    error = math.sqrt(residues * items / (items - 1)) / total if items > 1 else math.inf
    return Interval(mean, mean - Z * error, mean + Z * error)


def flips(before: Sequence[bool], after: Sequence[bool]) -> Flips:
    """McNemar's exact test, two-sided: among items that changed, losses and gains are as likely where nothing differs."""
    pairs = list(zip(before, after, strict=True))
    lost, gained = pairs.count((True, False)), pairs.count((False, True))
    changed = lost + gained
    tail = sum(math.comb(changed, k) for k in range(min(lost, gained) + 1)) / 2**changed
    return Flips(lost, gained, min(1.0, 2 * tail))
