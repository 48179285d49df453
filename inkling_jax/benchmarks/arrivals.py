"""Synthetic traffic: what arrives when, from a few numbers and a seed."""

from __future__ import annotations

import dataclasses

import numpy as np

from inkling_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Traffic:
    """How requests are drawn. Lengths are uniform from the first to the second of a pair, both included."""

    prompt: tuple[int, int]  # tokens
    answer: tuple[int, int]  # tokens, all of which are made
    rate: float | None = None  # requests a second, at times of a Poisson process; None: the next comes when one ends
    shared: float = 0.0  # share of the prompts that begin with the same tokens
    prefix: int = 0  # how many these are; a shorter prompt has fewer
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks every field."""
        for name, (low, high) in (("prompt", self.prompt), ("answer", self.answer)):
            if not 1 <= low <= high:
                raise InputError(f"--{name} {low}-{high}: expected lengths of at least 1, the smaller one first")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise InputError(f"--rate {self.rate}: expected requests a second, above zero")
        if not 0 <= self.shared <= 1:
            raise InputError(f"--shared {self.shared}: expected a share from 0 to 1")
        if self.shared and not self.prefix:
            raise InputError(f"--shared {self.shared}: say with --prefix how many tokens are shared")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that may come."""
        return self.prompt[1] + self.answer[1]

    def __str__(self) -> str:
        parts = [f"prompt={self.prompt[0]}-{self.prompt[1]}", f"answer={self.answer[0]}-{self.answer[1]}"]
        if self.rate is not None:
            parts.append(f"rate={self.rate:g}")
        if self.shared:
            parts.append(f"shared={self.shared:g}x{self.prefix}")
        return " ".join([*parts, f"seed={self.seed}"])


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request that comes `at` seconds after the start."""

    at: float
    prompt_ids: tuple[int, ...]
    max_tokens: int


def draw(traffic: Traffic, count: int, vocab: int) -> list[Arrival]:
    """The first `count` requests, in order: with more the first ones are the same. Ids are below `vocab`."""
    random = np.random.default_rng(traffic.seed)
    prefix = random.integers(0, vocab, traffic.prefix)
    arrivals, now = [], 0.0
    for _ in range(count):
        now += random.exponential(1 / traffic.rate) if traffic.rate is not None else 0.0
        length, max_tokens = (int(random.integers(low, high + 1)) for low, high in (traffic.prompt, traffic.answer))
        ids = random.integers(0, vocab, length)
        if random.random() < traffic.shared:
            ids[: traffic.prefix] = prefix[:length]
        arrivals.append(Arrival(now, tuple(ids.tolist()), max_tokens))
    return arrivals
