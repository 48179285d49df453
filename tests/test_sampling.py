"""The device sampler against an independent formulation in float64 numpy, and what must hold of every row whatever its batch."""

import dataclasses
import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from modules import on_one_device

from inkling_jax.engine import sampler
from inkling_jax.engine.request import SamplingParams, request_key
from inkling_jax.engine.sampler import SamplerState, admit, mode_for, prompt_row, sample, slot_values
from inkling_jax.errors import CapacityError, InputError

V = 12
LOGITS = np.array([1.5, -0.3, 2.0, 0.7, -1.2, 1.1, 0.0, 2.4, -0.8, 0.4, 1.9, -2.0], np.float32)
PROMPT, OUTPUT = (0, 3, 3, 4), (7, 7, 2, 3, 11)  # history of the rows below


@functools.partial(jax.jit, static_argnames=("banned", "mode", "top_logprobs"))
def draw(logits, state, slots, **static):
    """`sample` on a mesh of one device."""
    return on_one_device(functools.partial(sample, vocab=logits.shape[1], **static))(logits, state, slots)


advance = jax.jit(sampler.advance, donate_argnums=0)


def probabilities(p, logits=LOGITS, prompt=PROMPT, output=OUTPUT, stops=(), banned=()):
    """The distribution that `p` asks for, float64 [V], by loops over ids and a sorted list."""
    scores = [float(x) for x in logits]
    for i, bias in dict(p.logit_bias or ()).items():
        scores[i] += bias
    hidden = set(p.bad_token_ids) | set(banned) | (set(stops) if len(output) < p.min_tokens else set())
    for i in range(len(scores)):
        if i in prompt or i in output:
            scores[i] = scores[i] / p.repetition_penalty if scores[i] > 0 else scores[i] * p.repetition_penalty
        scores[i] -= p.frequency_penalty * output.count(i) + (p.presence_penalty if i in output else 0.0)
    ranked = sorted((i for i in range(len(scores)) if i not in hidden), key=lambda i: (-scores[i], i))
    if p.temperature == 0:
        return np.eye(len(scores))[ranked[0]]
    kept = ranked[: p.top_k or None]
    weights = np.array([math.exp((scores[i] - scores[kept[0]]) / p.temperature) for i in kept])
    nucleus = 1
    while nucleus < len(kept) and weights[:nucleus].sum() < p.top_p * weights.sum():
        nucleus += 1
    result = np.zeros(len(scores))
    for i, weight in zip(kept[:nucleus], weights[:nucleus], strict=True):
        result[i] = weight if weight >= p.min_p else 0.0
    return result / result.sum()


def chi_square_limit(freedom):
    """The chi-square value that chance exceeds once in ten thousand (Wilson-Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def assert_drawn_from(tokens, expected):
    counts = np.bincount(tokens, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    live = expected > 0
    if live.sum() > 1:
        mean = expected[live] * len(tokens)
        assert ((counts[live] - mean) ** 2 / mean).sum() < chi_square_limit(live.sum() - 1)


def filled(requests, vocab=V, stops=(), seeds=None, prompt=PROMPT, output=OUTPUT):
    """A state with these requests in slots 0, 1, ..., each with the history above."""
    state = SamplerState.create(len(requests), vocab)
    for slot, p in enumerate(requests):
        key = request_key(seeds[slot] if seeds else slot)
        state = admit(state, slot, slot_values(p, stops, vocab, key), prompt_row(prompt, vocab))
    rows = jnp.arange(len(requests), dtype=jnp.int32)
    for token in output:
        state = advance(state, rows, jnp.full(len(requests), token, jnp.int32), jnp.ones(len(requests), bool))
    return state


SETTINGS = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 5.0},
    "greedy": {"temperature": 0.0, "top_k": 5, "presence_penalty": 1.0},
    "top_k": {"top_k": 3, "temperature": 1.5},
    "top_k above vocab": {"top_k": 1000},
    "top_p": {"top_p": 0.7, "temperature": 1.3},
    "top_p 0": {"top_p": 0.0},
    "min_p": {"min_p": 0.3},
    "top_p after top_k": {"top_k": 4, "top_p": 0.8},  # over the whole vocabulary, a share 0.8 needs more than 4 ids
    "min_p after top_p": {"top_p": 0.95, "min_p": 0.2, "temperature": 2.0},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below 1": {"repetition_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": -1.4},
    "bias": {"logit_bias": {1: 3.5, 7: -4.0, 2: 1.0}},
    "bad": {"bad_token_ids": (7, 2), "logit_bias": {7: 50.0}},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (7, 10)},
    "min_tokens over": {"min_tokens": 5, "stop_token_ids": (7, 10)},
    "all": {
        "temperature": 1.4, "top_k": 8, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.4,
        "presence_penalty": 0.3, "logit_bias": {6: 2.0, 5: -1.0}, "bad_token_ids": (10,), "min_tokens": 9, "stop_token_ids": (0,),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def many_draws():
    """20,000 draws with every setting: one key, and a step of its own for each draw."""
    rows = 20_000
    many = jax.jit(lambda s, g: draw(jnp.tile(LOGITS, (rows, 1)), widen(s, g), jnp.arange(rows), banned=(8,), mode="full").tokens)

    def widen(state, generated):
        return dataclasses.replace(jax.tree.map(lambda x: jnp.repeat(x[:1], rows, 0), state), generated=generated)

    return lambda state, generated: np.asarray(many(state, generated))


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_distribution_of_the_settings(name, many_draws):
    p = SamplingParams(**SETTINGS[name])
    generated = np.arange(20_000, dtype=np.int32) + p.min_tokens
    if p.min_tokens > len(OUTPUT):  # still short of min_tokens: one step for all would be one draw, so steps below zero
        generated = generated - 2 * 20_000 - p.min_tokens
    tokens = many_draws(filled([p]), generated)
    stops = p.stop_token_ids or ()
    assert_drawn_from(tokens, probabilities(p, stops=stops, banned=(8,)))


def test_steps_and_samples_are_independent(many_draws):
    """Consecutive steps of a key, and the same step of two samples of a seed, are as independent as they should be."""
    p = SamplingParams(temperature=3.0)
    steps = np.arange(20_000, dtype=np.int32)
    first = many_draws(filled([p], seeds=[11]), steps)
    state = filled([p])
    second = many_draws(dataclasses.replace(state, key=state.key.at[0].set(request_key(11, 1))), steps)
    assert (first == many_draws(filled([p], seeds=[11]), steps)).all()
    single = probabilities(p, banned=(8,))
    joint = np.outer(single, single).ravel()
    assert_drawn_from(first[:-1:2] * V + first[1::2], joint)
    assert_drawn_from(first * V + second, joint)


def test_best_token_alone_at_temperature_0_top_k_1_and_top_p_0_even_among_ties():
    tied = np.where(np.isin(np.arange(V), (4, 6, 9)), np.float32(5), LOGITS)
    requests = [
        SamplingParams(temperature=0),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.0),
        SamplingParams(temperature=1e-9),
    ]
    state = filled(requests, output=())
    for _ in range(30):
        tokens = draw(jnp.tile(tied, (4, 1)), state, jnp.arange(4), mode="full").tokens
        assert tokens.tolist() == [4, 4, 4, 4]
        state = advance(state, jnp.arange(4), tokens, jnp.ones(4, bool))


@pytest.mark.parametrize("mode", ["greedy", "sample", "full"])
def test_banned_ids_are_never_sampled(mode):
    """1,000 draws at temperature 5 with the largest logits at the banned ids; the result is finite, the logprobs are not."""
    logits = jnp.tile(LOGITS, (4, 1)).at[:, jnp.array([5, V - 1])].set(30.0)
    state = filled([SamplingParams(temperature=5.0 if mode != "greedy" else 0.0)] * 4, output=())
    for _ in range(250):
        result = draw(logits, state, jnp.arange(4), mode=mode, banned=(5, V - 1))
        assert result.finite.all() and not np.isin(result.tokens, (5, V - 1)).any()
        state = advance(state, jnp.arange(4), result.tokens, jnp.ones(4, bool))


NEIGHBOURS = [
    SamplingParams(temperature=0, top_p=0.2),
    SamplingParams(top_p=0.5, repetition_penalty=2.0, logit_bias={1: 9.0}, seed=5),
    SamplingParams(temperature=1.7, seed=6),
    SamplingParams(temperature=0, frequency_penalty=2.0, bad_token_ids=(0, 2)),
]
TABLE = np.random.default_rng(8).normal(size=(V, V)).astype(np.float32) * 2  # the next logits by the last token


def run(requests, mode, steps=40):
    """Tokens and logprobs [steps, rows] of a little model, each request in its slot, together in a batch."""
    rows = jnp.arange(len(requests), dtype=jnp.int32)
    state = filled(requests, seeds=[p.seed or 0 for p in requests], output=())
    tokens, outputs = jnp.zeros(len(requests), jnp.int32), []
    for _ in range(steps):
        result = draw(jnp.asarray(TABLE)[tokens], state, rows, mode=mode)
        tokens = result.tokens
        state = advance(state, rows, tokens, jnp.ones(len(requests), bool))
        outputs.append((np.asarray(tokens), np.asarray(result.logprob)))
    return (np.stack(x) for x in zip(*outputs, strict=True))


def test_neither_neighbours_nor_slot_nor_mode_change_a_token():
    plain, sampled = SamplingParams(temperature=0), NEIGHBOURS[2]
    tokens, logprobs = run(NEIGHBOURS, "full")
    for slot, request, modes in ((2, sampled, ("sample", "full")), (0, plain, ("greedy", "sample", "full"))):
        for mode in modes:
            alone, alone_logprobs = run([request], mode)
            assert (alone[:, 0] == tokens[:, slot]).all() and (alone_logprobs[:, 0] == logprobs[:, slot]).all()
    assert len(set(tokens[:, 2].tolist())) > 4  # it was not one token throughout
    same, _ = run([plain, sampled, sampled, dataclasses.replace(sampled, seed=7)], "sample")
    assert (same[:, 1] == tokens[:, 2]).all() and (same[:, 3] != tokens[:, 2]).any()


def test_mode_is_the_cheapest_that_can_express_all():
    assert (
        mode_for([]) == mode_for([SamplingParams(temperature=0, top_k=3, top_p=0.5), SamplingParams(temperature=0)]) == "greedy"
    )
    assert mode_for([SamplingParams(temperature=0, min_p=0.1), SamplingParams(), SamplingParams(temperature=0)]) == "sample"
    for fields in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert mode_for([SamplingParams(**fields), SamplingParams(temperature=0)]) == "full"
    penalties = (
        {"presence_penalty": 1},
        {"frequency_penalty": 1},
        {"repetition_penalty": 2},
        {"logit_bias": {1: 1}},
        {"bad_token_ids": [1]},
    )
    for fields in penalties:
        assert mode_for([SamplingParams(temperature=0, **fields), SamplingParams()]) == "full"


def test_stop_ids_min_tokens_and_max_tokens():
    """The best id is a stop id: banned for min_tokens tokens, then taken and flagged; max_tokens flags its last token."""
    order = np.argsort(-LOGITS)
    requests = [
        SamplingParams(temperature=0, min_tokens=2, max_tokens=4),
        SamplingParams(temperature=0, stop_token_ids=[int(order[1])], max_tokens=1),
        SamplingParams(temperature=0, ignore_eos=True, min_tokens=2),
        SamplingParams(temperature=0, stop_token_ids=order[:12].tolist(), min_tokens=0),
    ]
    state = filled(requests, stops=(int(order[0]), int(order[2])), output=())
    tokens, stopped, exhausted = [], [], []
    for _ in range(4):
        result = draw(jnp.tile(LOGITS, (4, 1)), state, jnp.arange(4), mode="greedy")
        state = advance(state, jnp.arange(4), result.tokens, jnp.ones(4, bool))
        for seen, new in zip((tokens, stopped, exhausted), (result.tokens, result.stopped, result.exhausted), strict=True):
            seen.append(new.tolist())
    assert [[order.tolist().index(t) for t in row] for row in tokens] == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert stopped == [[False, False, False, True]] * 2 + [[True, False, False, True]] * 2
    assert exhausted == [[False, True, False, False]] * 3 + [[True, True, False, False]]


def test_logprobs_are_of_the_raw_distribution():
    p = SamplingParams(temperature=0.3, logit_bias={1: 90.0}, repetition_penalty=3.0)
    result = draw(jnp.tile(LOGITS, (4, 1)), filled([p] * 4), jnp.arange(4), mode="full", banned=(7,), top_logprobs=5)
    exact = LOGITS.astype(np.float64) - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert result.tokens.tolist() == [1] * 4
    np.testing.assert_allclose(result.logprob, exact[[1] * 4], atol=1e-6)
    assert result.top_ids.tolist() == [np.argsort(-exact)[:5].tolist()] * 4  # the banned id 7 is the model's best
    np.testing.assert_allclose(result.top_logprobs, np.tile(np.sort(exact)[::-1][:5], (4, 1)), atol=1e-6)


@pytest.mark.parametrize("mode", ["greedy", "sample", "full"])
def test_a_row_that_is_not_finite_is_flagged_and_harms_no_other(mode):
    """NaN in one row, each infinity in others, the padding slot as well; rows between them are as they were."""
    p = SamplingParams(temperature=0 if mode == "greedy" else 1.0, seed=4, stop_token_ids=[0], max_tokens=1)
    state = filled([p] * 4, output=())
    slots = jnp.array([4, 1, 2, 3])
    clean = draw(jnp.tile(LOGITS, (4, 1)), state, slots, mode=mode, top_logprobs=3)
    for bad in (np.nan, np.inf, -np.inf):
        logits = np.tile(LOGITS, (4, 1))
        logits[0] = bad
        logits[2, 5] = bad
        result = draw(logits, state, slots, mode=mode, top_logprobs=3)
        assert result.finite.tolist() == [False, True, False, True]
        assert result.tokens[jnp.array([0, 2])].tolist() == [0, 0]
        assert not (result.stopped | result.exhausted)[jnp.array([0, 2])].any()
        for field in dataclasses.fields(result):
            ours, theirs = getattr(result, field.name), getattr(clean, field.name)
            assert np.isfinite(ours).all()
            assert (ours[1] == theirs[1]).all() and (ours[3] == theirs[3]).all()


def test_extreme_penalties_and_a_row_with_nothing_left():
    """Scores that overflow stay ordered; with every id banned the row is flagged and no banned id is passed off as sampled."""
    requests = [
        SamplingParams(repetition_penalty=1e-4, top_p=0.5),
        SamplingParams(bad_token_ids=range(V), top_p=0.5, top_k=3),
        SamplingParams(temperature=100.0, min_p=1.0),
        SamplingParams(temperature=1.1e-5, top_p=0.999),
    ]
    logits = np.tile(LOGITS, (4, 1))
    logits[0, 2] = 3e38  # seen: divided by the penalty it overflows
    result = draw(logits, filled(requests), jnp.arange(4), mode="full")
    assert result.tokens.tolist() == [2, 0, 7, 7] and result.finite.tolist() == [True, False, True, True]
    assert np.isfinite(result.logprob).all()


def test_rows_that_are_not_live_leave_the_state_alone():
    state = filled([SamplingParams()] * 3)
    before = jax.tree.map(np.asarray, state)
    slots = jnp.array([0, -1, 3, 99], jnp.int32)
    after = advance(state, slots, jnp.array([6, 1, -1, 4000], jnp.int32), jnp.array([True, False, False, False]))
    counts = before.output_counts.copy()
    counts[0, 6] += 1
    np.testing.assert_array_equal(after.output_counts, counts)
    np.testing.assert_array_equal(after.generated, before.generated + np.array([1, 0, 0, 0]))


def test_admit_cleans_a_slot_donates_and_compiles_once():
    used = filled([SamplingParams(**SETTINGS["all"]), SamplingParams(top_k=2)])
    values = slot_values(SamplingParams(top_p=0.4, stop_token_ids=[3]), (), V, request_key(9))
    program = sampler._admitter(jax.tree.map(lambda array: array.sharding, used))
    compiled = program._cache_size()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = admit(used, 0, values, prompt_row([1], V))
    assert used.output_counts.is_deleted() and used.prompt_seen.is_deleted() and program._cache_size() == compiled
    fresh = admit(SamplerState.create(2, V), 0, values, prompt_row([1], V))
    for field in dataclasses.fields(fresh):
        ours, theirs = np.asarray(getattr(again, field.name)), np.asarray(getattr(fresh, field.name))
        np.testing.assert_array_equal(ours[[0, 2]], theirs[[0, 2]], err_msg=field.name)  # the slot and the padding slot
    assert again.top_k[1] == 2 and again.generated[1] == len(OUTPUT)


def test_what_does_not_fit_is_refused_before_the_device():
    state = SamplerState.create(2, V)
    values = slot_values(SamplingParams(), (), V, request_key(1))
    for slot in (-1, 2):
        with pytest.raises(CapacityError, match=f"slot {slot} is not one of the 2 slots"):
            admit(state, slot, values, prompt_row([], V))
    with pytest.raises(InputError, match=r"\(12,\), got \(13,\)"):
        admit(state, 0, values, prompt_row([], V + 1))
    with pytest.raises(InputError, match="0 to 11, got 12"):
        prompt_row([3, 12], V)
    with pytest.raises(InputError, match="0 to 11, got -1"):
        prompt_row([-1], V)
    with pytest.raises(CapacityError, match="16 stop ids, got 17"):
        slot_values(SamplingParams(), range(17), 100, request_key(1))
    with pytest.raises(InputError, match=r"stop ids must be 0 to 11, got \(12,\)"):
        slot_values(SamplingParams(), (12,), V, request_key(1))
    with pytest.raises(InputError, match="bad_token_ids holds id 12"):
        slot_values(SamplingParams(bad_token_ids=[12]), (), V, request_key(1))
