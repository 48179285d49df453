"""Greedy continuations through the cache are those of an implementation without one, however the work is cut.

Every run poisons with NaN, before each step, all that no sequence may look at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import engines
import numpy as np
import pytest

LENGTHS = (1, 5, 33)

# preset, page size, prompt tokens a step, tokens a host call, steps the host is behind. What compiles is a page size with a
# bucket of prompt tokens, and a page size with a number of tokens a call.
TOGETHER = [
    ("tiny", 16, 1, 1, 0),
    ("tiny", 16, 3, 7, 0),
    ("tiny", 16, 16, 32, 0),
    ("tiny", 16, 64, 7, 1),
    ("tiny", 4, 3, 7, 1),
    ("tiny", 64, 5, 7, 1),
    ("wide", 4, 7, 7, 1),
    ("gpu", 64, 5, 7, 0),
]
# More cuts of the same, for those who have the patience.
TOGETHER_SLOW = [
    ("tiny", 16, 2, 2, 1),
    ("tiny", 16, 5, 32, 1),
    ("tiny", 16, 7, 1, 1),
    ("tiny", 16, 64, 2, 0),
    ("tiny", 4, 16, 7, 0),
    ("tiny", 64, 7, 7, 0),
    ("wide", 4, 1, 7, 0),
    ("wide", 4, 16, 7, 1),
    ("gpu", 64, 16, 7, 1),
]
ALONE = [
    ("tiny", 16, 1, 7, 1),
    ("tiny", 16, 16, 7, 0),
    ("tiny", 4, 5, 7, 1),
    ("tiny", 4, 2, 7, 0),
    ("wide", 4, 3, 7, 1),
]
Case = tuple[str, int, int, int, int]
Oracle = tuple[Callable[..., Path], Callable[..., dict[str, np.ndarray]]]


@pytest.fixture(scope="session")
def oracle(oracle_dir: Callable[..., Path], expected: Callable[..., dict[str, np.ndarray]]) -> Oracle:
    return oracle_dir, expected


def setting(oracle: Oracle, case: Case):
    """A fresh engine, what poisons it, the prompts and their continuations."""
    preset, page, chunk, calls, ahead = case
    directory, answers = oracle[0](preset), oracle[1](preset)
    shape = engines.cache_shape(page, max_query=128 if page == 16 else 24)  # 24: local page tables are rings that go round
    engine = engines.engine(directory, shape=shape, chunk=chunk, tokens_per_call=calls, ahead=ahead)
    poison = partial(engines.poison, local_layers=engines.model(directory).config.text.local_layers)
    prompts = [answers[f"len{n}.ids"].tolist() for n in LENGTHS]
    return engine, poison, prompts, [answers[f"len{n}.greedy"].tolist()[n:] for n in LENGTHS]


@pytest.mark.parametrize("case", [*TOGETHER, *(pytest.param(case, marks=pytest.mark.slow) for case in TOGETHER_SLOW)], ids=str)
def test_together(case: Case, oracle: Oracle) -> None:
    """Three prompts of different lengths in one batch, twice over, so that the second lot takes used slots and pages."""
    engine, poison, prompts, continuations = setting(oracle, case)
    for order in (slice(None), slice(None, None, -1)):
        results = engines.run(engine, prompts[order], between=poison)
        assert [r.tokens for r in results] == continuations[order]
        assert {r.finish_reason for r in results} == {"length"}
    assert engines.all_given_back(engine)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_alone(case: Case, oracle: Oracle) -> None:
    """One prompt after the other."""
    engine, poison, prompts, continuations = setting(oracle, case)
    for prompt, continuation in zip(prompts, continuations, strict=True):
        (result,) = engines.run(engine, [prompt], between=poison)
        assert result.tokens == continuation
    assert engines.all_given_back(engine)
