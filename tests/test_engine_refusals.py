"""What the engine refuses: by name, with the numbers, before anything runs."""

from __future__ import annotations

import dataclasses
import re

import engines
import jax
import jax.numpy as jnp
import pytest
from engines import GREEDY

from inkling_jax.engine.request import Request
from inkling_jax.errors import CapacityError, InputError


@pytest.fixture(scope="session")
def tiny(oracle_dir):
    return oracle_dir("tiny")


@pytest.mark.parametrize("token", [500, 511, -1, 2**31, True, 1.5, "7", None])
def test_ids_that_the_model_does_not_have(token, tiny):
    """Each is named with its place, before anything runs: 500 to 511 are padding of the vocabulary."""
    engine = engines.engine(tiny)
    with pytest.raises(InputError, match=rf"token 1 of the prompt is {re.escape(repr(token))}: .* 0 to 499"):
        engine.add(Request((3, token), GREEDY))
    with pytest.raises(InputError, match="token 1 of the prompt"):
        next(engine.evaluate([3, token]))
    assert not engine.busy and engines.all_given_back(engine)


def test_requests_that_cannot_be_served(tiny):
    """Empty, too long for context or pools, ids in the settings: told with the numbers, and nothing is held."""
    engine = engines.engine(tiny)
    small = engines.engine(tiny, shape=dataclasses.replace(engines.cache_shape(pages=4), max_context=64))
    cases = [
        (engine, (), GREEDY, InputError, "the prompt is empty"),
        (engine, (1,) * 513, GREEDY, CapacityError, "the prompt has 513 tokens, the context holds 512"),
        (small, (1,) * 30, GREEDY, CapacityError, r"5 pages of the global KV pool \(prompt 30 \+ 40 new tokens\), it has 4"),
        (engine, (1,), dataclasses.replace(GREEDY, stop_token_ids=(500,)), InputError, "stop_token_ids holds id 500"),
        (engine, (1,), dataclasses.replace(GREEDY, logit_bias={600: 1.0}), InputError, "logit_bias holds id 600"),
    ]
    for refusing, ids, params, kind, message in cases:
        with pytest.raises(kind, match=message):
            refusing.add(Request(ids, params))
        assert not refusing.busy and not refusing.scheduler.waiting
    with pytest.raises(InputError, match="the prompt is empty"):
        next(engine.evaluate([]))
    with pytest.raises(CapacityError, match="513 tokens"):
        next(engine.evaluate([1] * 513))


def test_a_closed_engine_is_refused(tiny):
    engine = engines.engine(tiny, leaves=[jnp.array(leaf, copy=True) for leaf in engines.model(tiny).leaves])
    memory = jax.tree.leaves(engine.state) + engine.leaves
    engine.close()
    assert all(a.is_deleted() for a in memory) and not engine.busy
    with pytest.raises(InputError, match="closed"):
        engine.add(Request((1,), GREEDY))
    with pytest.raises(InputError, match="closed"):
        next(engine.evaluate([1]))
