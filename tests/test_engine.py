"""The engine's promises: what a request gets does not depend on who came before it, who runs beside it, or when it is read."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import GREEDY, Result
from flax import nnx

from inkling_jax.cache.paged import CacheShape
from inkling_jax.engine.pack import pack_chunk, pack_slots, pack_updates
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.state import create_state
from inkling_jax.engine.steps import Programs, Sampling
from inkling_jax.errors import CapacityError
from inkling_jax.model import Inkling

LENGTHS = (1, 5, 33)
WITH_LOGPROBS = dataclasses.replace(GREEDY, logprobs=5)


@pytest.fixture(scope="session")
def tiny(oracle_dir: Callable[..., Path]) -> Path:
    return oracle_dir("tiny")


@pytest.fixture(scope="session")
def prompts(expected: Callable[..., dict[str, np.ndarray]]) -> list[list[int]]:
    return [expected("tiny")[f"len{n}.ids"].tolist() for n in LENGTHS]


@pytest.fixture(scope="session")
def continuations(expected: Callable[..., dict[str, np.ndarray]]) -> list[list[int]]:
    return [expected("tiny")[f"len{n}.greedy"].tolist()[n:] for n in LENGTHS]


def lasting(max_tokens: int) -> SamplingParams:
    return dataclasses.replace(GREEDY, max_tokens=max_tokens)


# Programs


def test_nothing_compiles_after_warm_up(tiny, prompts, caplog):
    """Other lengths, other numbers of requests, 200 decode steps: the programs of the warm-up serve them all."""
    engine = engines.engine(tiny)
    engines.run(engine, prompts, [lasting(8), lasting(16), lasting(24)])
    engines.run(engine, prompts[:1])
    programs = engine.programs.prefill, engine.programs.decode
    sizes = [program._cache_size() for program in programs]
    shardings = [a.sharding for a in jax.tree.leaves(engine.state)]
    rng = np.random.default_rng(0)
    lot = [rng.integers(0, 497, n).tolist() for n in (2, 17, 60, 7)]
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        engines.run(engine, lot[:3], [lasting(201), lasting(150), lasting(30)])
        engines.run(engine, lot, lasting(20))
        engines.run(engine, lot[3:], lasting(3))
        assert not caplog.messages
        jax.jit(lambda x: x + 1)(np.zeros(3))
        assert any("Compiling" in message for message in caplog.messages)  # that is how one would have shown
    assert [program._cache_size() for program in programs] == sizes
    assert [a.sharding for a in jax.tree.leaves(engine.state)] == shardings


def test_state_is_donated_and_stays_in_place(tiny, prompts):
    """Every buffer of the state that goes into a step is gone after it, and the pools are where they were."""
    engine = engines.engine(tiny)
    engine.add(Request(tuple(prompts[2]), GREEDY))
    engine.step()
    for _ in range(4):  # the rest of the prompt, then tokens
        before = jax.tree.leaves(engine.state)
        pools = [a.unsafe_buffer_pointer() for layer in engine.state.cache.layers for a in (layer.k_pages, layer.v_pages)]
        assert len(set(pools)) == len(pools)
        engine.step()
        assert all(a.is_deleted() for a in before)
        after = [a.unsafe_buffer_pointer() for layer in engine.state.cache.layers for a in (layer.k_pages, layer.v_pages)]
        assert after == pools


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_step_holds_no_second_pool_and_no_logits_of_a_prompt(name, tiny):
    """With pools and a vocabulary much larger than all else, temporaries stay below one pool and below tokens x vocabulary."""
    shared = engines.model(tiny)
    config = dataclasses.replace(shared.config.text, vocab_size=65536, usable_vocab_size=65530)
    shape = CacheShape(slots=4, page_size=16, global_pages=16384, local_pages=8192, max_context=512, max_query=128)
    model = Inkling(config, frozenset(), jnp.float32)
    programs = Programs(model, shared.programs.mesh, jnp.float32)
    leaves = [leaf.get_value() for _, leaf in nnx.to_flat_state(nnx.state(model))]
    state = jax.eval_shape(lambda: create_state(config, shape, jnp.float32))
    sampling, no_pages = Sampling("greedy", None, ()), {"global": [], "local": []}
    if name == "prefill":
        inputs = pack_chunk([(0, (0,) * 100, 0, True), (1, (0,) * 28, 0, True)], no_pages, shape, 128)
        compiled = programs.prefill.lower(leaves, state, inputs, context=512, sampling=sampling).compile()
    else:
        inputs = pack_slots([0, 1, 2, 3], shape, 4), pack_updates(no_pages, 12)
        compiled = programs.decode.lower(leaves, state, inputs, context=512, sampling=sampling, steps=7).compile()
    pool = min(math.prod(layer.k_pages.shape) * 4 for layer in state.cache.layers)
    memory = compiled.memory_analysis()
    assert pool == 64 << 20
    assert memory.temp_size_in_bytes < min(pool, 128 * 65530 * 4)
    assert memory.alias_size_in_bytes >= sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(state))


# Slots


def test_a_used_slot_is_as_good_as_new(tiny, prompts):
    """To the bit, after a longer request, a shorter one and a cancelled one in the same slot."""
    (fresh,) = engines.run(engines.engine(tiny), prompts[1:2], WITH_LOGPROBS)
    engine, slots = engines.engine(tiny), set()

    def note_slot(engine):
        slots.update(sequence.slot for sequence in engine.scheduler.running)

    for before in (prompts[2], prompts[0]):
        engines.run(engine, [before], WITH_LOGPROBS, between=note_slot)
        assert engines.run(engine, prompts[1:2], WITH_LOGPROBS, between=note_slot) == [fresh]
    cancelled = engine.add(Request(tuple(prompts[2]), WITH_LOGPROBS))
    for _ in range(5):
        engine.step()
    engine.cancel(cancelled)
    assert engines.run(engine, prompts[1:2], WITH_LOGPROBS, between=note_slot) == [fresh]
    assert len(slots) == 1 and engines.all_given_back(engine)


def test_more_requests_than_slots(tiny, prompts, continuations):
    """Seven on four slots: those that wait take over slots of those that end, while others decode."""
    engine, most = engines.engine(tiny), 0

    def watch(engine):
        nonlocal most
        most = max(most, len(engine.scheduler.running))
        assert len({sequence.slot for sequence in engine.scheduler.running}) == len(engine.scheduler.running)

    order = [2, 0, 1, 1, 2, 0, 1]
    short = [40, 9, 40, 17, 40, 40, 3]
    results = engines.run(engine, [prompts[i] for i in order], [lasting(n) for n in short], between=watch)
    assert [r.tokens for r in results] == [continuations[i][:n] for i, n in zip(order, short, strict=True)]
    assert most == engines.SLOTS and engines.all_given_back(engine)


def test_cancelling_frees_everything(tiny, prompts, continuations):
    """While waiting, while the prompt is read and while decoding; the others do not notice and nothing more comes out."""
    engine = engines.engine(tiny)
    ids = [engine.add(Request(tuple(prompt), GREEDY)) for prompt in [*prompts, prompts[1], prompts[2]]]
    results: dict[int, Result] = {}
    engine.cancel(ids[4])  # waiting: there are four slots
    engine.step()
    engine.cancel(ids[2])  # 17 tokens of its prompt are still to come
    while len(results.get(ids[1], Result([], [])).tokens) < 8:
        engines.gather(engine.step(), results)
    made = len(results[ids[1]].tokens)
    engine.cancel(ids[1])  # decoding, and the device is ahead
    engine.cancel(ids[1])
    engine.cancel(12345)
    engines.finish(engine, results)
    assert [results[ids[i]].tokens for i in (0, 3)] == [continuations[0], continuations[1]]
    assert len(results[ids[1]].tokens) == made and results[ids[1]].finish_reason is None
    assert ids[2] not in results and ids[4] not in results
    assert engines.all_given_back(engine) and not engine.busy


# Numbers that are not finite


@pytest.mark.parametrize("where", ["prompt", "generated"])
def test_a_sequence_that_is_not_finite_ends_alone(where, tiny, prompts, continuations):
    """One embedding row is NaN: the sequence that meets it ends as an error that names the step, and its slot is clean."""
    shared = engines.model(tiny)
    victim = 2 if where == "prompt" else 1
    others = [i for i in range(3) if i != victim]
    elsewhere = {token for i in others for token in prompts[i] + continuations[i]} | set(prompts[1])
    candidates = prompts[2] if where == "prompt" else continuations[1][3:30]
    token = next(t for t in candidates if t not in elsewhere)
    made = 0 if where == "prompt" else continuations[1].index(token) + 1
    embed = shared.paths.index("embed")
    leaves = list(shared.leaves)
    leaves[embed] = jax.device_put(leaves[embed].at[token].set(jnp.nan), shared.sharding)
    engine = engines.engine(tiny, leaves=leaves)
    results = engines.run(engine, prompts)
    for i in others:
        assert results[i] == Result(continuations[i], [], "length")
    assert results[victim].tokens == continuations[victim][:made]
    assert results[victim].finish_reason == "error"
    named = re.fullmatch(r"the logits of step (\d+) are not finite \(generated token (\d+)\)", results[victim].error or "")
    assert named and int(named[2]) == made + 1
    prefills = 3  # 39 tokens, 16 a step
    assert int(named[1]) == (prefills if where == "prompt" else prefills + math.ceil(made / 7))
    assert engines.all_given_back(engine)
    assert not np.asarray(engine.state.live).any()
    clean = engines.run(engines.engine(tiny), prompts[:1], WITH_LOGPROBS)
    for _ in range(engines.SLOTS):  # slots are taken from the last one freed: hold each in turn
        assert engines.run(engine, prompts[:1], WITH_LOGPROBS) == clean
        engine.scheduler.free_slots.insert(0, engine.scheduler.free_slots.pop())


# Ends


def test_stop_ids_and_least_tokens(tiny, prompts, continuations):
    """Default and explicit stop ids end a request and are not returned; none is sampled before min_tokens."""
    engine = engines.engine(tiny)
    greedy = continuations[2]
    place = next(i for i in range(8, 30) if greedy[i] not in greedy[:i])
    engine.default_stop_ids = (greedy[place],)
    params = [
        SamplingParams(temperature=0, max_tokens=40),
        dataclasses.replace(GREEDY, stop_token_ids=(greedy[place], 3)),
        dataclasses.replace(GREEDY, stop_token_ids=()),
        SamplingParams(temperature=0, max_tokens=40, min_tokens=place + 5),
    ]
    default, explicit, empty, least = engines.run(engine, [prompts[2]] * 4, params)
    assert default == explicit == Result(greedy[:place], [], "stop")
    assert empty == Result(greedy, [], "length")
    assert least.tokens[:place] == greedy[:place] and len(least.tokens) >= place + 5
    assert greedy[place] not in least.tokens
    assert engines.run(engine, [prompts[2]], GREEDY) == [empty]


def test_most_tokens(tiny, prompts, continuations):
    """max_tokens to the token, one included, which a prompt alone makes; without it, to the end of the context."""
    engine = engines.engine(tiny)
    results = engines.run(engine, [prompts[1]] * 3, [lasting(1), lasting(7), lasting(8)])
    assert [r.tokens for r in results] == [continuations[1][:n] for n in (1, 7, 8)]
    assert {r.finish_reason for r in results} == {"length"}
    long = (prompts[2] * 16)[: engines.CONTEXT - 9]
    (rest,) = engines.run(engine, [long], SamplingParams(temperature=0, ignore_eos=True))
    assert len(rest.tokens) == 10 and rest.finish_reason == "length"  # the last one takes no position


# Sampling


def test_a_seed_decides_whatever_runs_beside_it(tiny, prompts):
    """Alone, again, and last of a batch of others: the same tokens; another seed or another sample of the prompt: others."""
    engine = engines.engine(tiny)
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=30, ignore_eos=True)
    (alone,) = engines.run(engine, prompts[1:2], seeded)
    assert len(alone.tokens) == 30
    assert engines.run(engine, prompts[1:2], seeded) == [alone]
    other = dataclasses.replace(seeded, seed=8)
    batch = engines.run(engine, [prompts[2], prompts[1], prompts[0], prompts[1]], [GREEDY, other, other, seeded])
    assert batch[3] == alone and batch[1].tokens != alone.tokens
    ids = [engine.add(Request(tuple(prompts[1]), seeded, sample=sample)) for sample in (0, 1, 0, 2)]
    results: dict[int, Result] = {}
    engines.gather(engine.run(), results)
    samples = [results[i].tokens for i in ids]
    assert samples[0] == samples[2] == alone.tokens and len({*map(tuple, samples)}) == 3


def test_logprobs_are_those_of_the_model(tiny, prompts, continuations, expected):
    """Log-softmax of the reference's logits for the first token, of the scored sequence for all; the best ones in order."""
    engine = engines.engine(tiny)
    (result,) = engines.run(engine, prompts[2:3], WITH_LOGPROBS)
    sequence = prompts[2] + continuations[2]
    logits = np.concatenate([piece for piece, _ in engine.evaluate(sequence)]).astype(np.float64)[32:-1]
    np.testing.assert_allclose(logits[0], expected("tiny")["len33.logits"][-1], rtol=1e-3, atol=1e-4)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert [entry.token_id for entry in result.logprobs] == result.tokens == continuations[2]
    for row, entry in zip(logprobs, result.logprobs, strict=True):
        np.testing.assert_allclose(entry.logprob, row[entry.token_id], atol=1e-4)
        best = np.argsort(-row)[:5]
        assert [i for i, _ in entry.top] == best.tolist()
        np.testing.assert_allclose([p for _, p in entry.top], row[best], atol=1e-4)


# Scoring beside requests


def test_scoring_between_requests(tiny, prompts, continuations, expected):
    """A prompt is scored while one request waits to begin and runs on between its chunks: both are as they would be alone."""
    engine, answers = engines.engine(tiny), expected("tiny")
    waiting, results, pieces = engine.add(Request(tuple(prompts[2]), GREEDY)), {}, []
    for logits, _ in engine.evaluate(answers["len100.ids"].tolist()):
        pieces.append(logits)
        engines.gather(engine.step(), results)
    found, wanted = np.concatenate(pieces), answers["len100.logits"]
    assert np.linalg.norm(found - wanted) < 1e-4 * np.linalg.norm(wanted)
    engines.finish(engine, results)
    assert results[waiting].tokens == continuations[2]
    assert engines.all_given_back(engine)


def test_scoring_needs_a_slot(tiny, prompts):
    """With all slots taken it is refused and leaves nothing behind; a scoring given up midway gives its slot back."""
    engine = engines.engine(tiny)
    ids = [engine.add(Request(tuple(prompts[1]), GREEDY)) for _ in range(engines.SLOTS)]
    engine.step()
    with pytest.raises(CapacityError, match=r"scoring a prompt of 5 tokens \(0 of 4 slots are free\)"):
        next(engine.evaluate(prompts[1]))
    for i in ids:
        engine.cancel(i)
    pieces = engine.evaluate(prompts[2])
    next(pieces)
    assert len(engine.scheduler.free_slots) == engines.SLOTS - 1
    pieces.close()
    assert engines.all_given_back(engine)
