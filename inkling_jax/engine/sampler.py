"""Sampling inside the jitted step: settings of each slot, penalties, filters and Gumbel-max; a row depends on its own slot alone.

Each rank has the columns v of the logits that its part of the head makes, and of what is known of each id; of what it finds there
it offers the best, so that tokens and candidates are exchanged and not logits. Slots are 0 .. slots - 1, and one more, the last,
is reserved for the padding rows of a step. Indices are checked on the host: out of range, the device would clamp or drop them in
silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, UInt32

from inkling_jax.engine.filters import keep_best
from inkling_jax.engine.request import GREEDY_BELOW, MAX_BIAS_IDS, MAX_STOP_IDS, NO_LIMIT, SamplingParams
from inkling_jax.errors import CapacityError, InputError
from inkling_jax.sharding.collectives import first_local_row, gather_ranks, gather_vocabulary, local_columns

Mode = Literal["greedy", "sample", "full"]
NO_STOP = -1  # fills the table of stop ids; only ever compared
NO_ID = NO_LIMIT  # fills the table of biased ids; an index, so it lies past the end, where a scatter drops it (-1 would wrap)
HUGE = float(np.finfo(np.float32).max)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """Settings and history of every slot; S = slots + 1, V the vocabulary's rows, padding included, or a rank's part of them."""

    temperature: Float[Array, " S"]
    top_k: Int[Array, " S"]
    top_p: Float[Array, " S"]
    min_p: Float[Array, " S"]
    presence: Float[Array, " S"]
    frequency: Float[Array, " S"]
    repetition: Float[Array, " S"]
    key: UInt32[Array, "S 2"]
    max_tokens: Int[Array, " S"]
    min_tokens: Int[Array, " S"]
    stop_ids: Int[Array, "S MAX_STOP_IDS"]
    bias_ids: Int[Array, "S MAX_BIAS_IDS"]
    bias_values: Float[Array, "S MAX_BIAS_IDS"]
    generated: Int[Array, " S"]
    output_counts: Int[Array, "S V"]
    prompt_seen: Bool[Array, "S V"]

    @staticmethod
    def create(slots: int, vocab: int) -> SamplerState:
        """A state of `slots` slots, all idle, and the padding slot: 5 bytes a slot and id of the vocabulary."""
        idle = slot_values(SamplingParams(temperature=0), (), vocab, np.zeros(2, np.uint32))
        rows = {name: jnp.array(np.repeat(value[None], slots + 1, axis=0)) for name, value in idle.items()}
        return SamplerState(
            **rows,
            generated=jnp.zeros(slots + 1, jnp.int32),
            output_counts=jnp.zeros((slots + 1, vocab), jnp.int32),
            prompt_seen=jnp.zeros((slots + 1, vocab), bool),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleResult:
    """One token for each row of a step. A row that is not `finite` has token 0, logprob 0 and no flag set."""

    tokens: Int[Array, " B"]
    logprob: Float[Array, " B"]  # of the token under the model's own distribution: before bans, penalties, temperature
    top_ids: Int[Array, "B n"]  # the n best of that distribution, descending
    top_logprobs: Float[Array, "B n"]
    stopped: Bool[Array, " B"]  # the token is one of the row's stop ids
    exhausted: Bool[Array, " B"]  # the token is the last one that max_tokens allows
    finite: Bool[Array, " B"]  # all logits were finite, and at least one id was not banned


def mode_for(params: Iterable[SamplingParams]) -> Mode:
    """The cheapest mode that can express every one of these settings; a row's tokens are the same in each mode that can."""
    mode: Mode = "greedy"
    for p in params:
        greedy = p.temperature < GREEDY_BELOW
        filters = p.top_k > 0 or p.top_p < 1 or p.min_p > 0
        penalties = p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1
        if penalties or p.biases() or (filters and not greedy):  # filters never drop the best token
            return "full"
        if not greedy:
            mode = "sample"
    return mode


def slot_values(params: SamplingParams, default_stop_ids: Iterable[int], vocab: int, key: np.ndarray) -> dict[str, np.ndarray]:
    """What `admit` writes for a request: numpy values by field of SamplerState.

    `key` is uint32 [2], from `request_key`. Without `max_tokens` the limit is the largest int32; an engine that knows the room
    left in the context may lower that value. InputError for an id outside the vocabulary, CapacityError for too many stop ids.
    """
    params.validate_for(vocab)
    stops = params.resolve_stop_ids(default_stop_ids)
    if any(not 0 <= i < vocab for i in stops):
        raise InputError(f"stop ids must be 0 to {vocab - 1}, got {stops}")
    if len(stops) > MAX_STOP_IDS:
        raise CapacityError(f"a request may have {MAX_STOP_IDS} stop ids, got {len(stops)}")
    biases = params.biases()
    values = {
        "temperature": np.float32(0 if params.temperature < GREEDY_BELOW else params.temperature),
        "top_k": np.int32(params.top_k),
        "top_p": np.float32(params.top_p),
        "min_p": np.float32(params.min_p),
        "presence": np.float32(params.presence_penalty),
        "frequency": np.float32(params.frequency_penalty),
        "repetition": np.float32(params.repetition_penalty),
        "key": np.asarray(key, np.uint32),
        "max_tokens": np.int32(NO_LIMIT if params.max_tokens is None else params.max_tokens),
        "min_tokens": np.int32(params.min_tokens),
        "stop_ids": _row(stops, MAX_STOP_IDS, NO_STOP, np.int32),
        "bias_ids": _row(list(biases), MAX_BIAS_IDS, NO_ID, np.int32),
        "bias_values": _row(list(biases.values()), MAX_BIAS_IDS, 0, np.float32),
    }
    return {name: np.asarray(value) for name, value in values.items()}


def _row(items: Sequence[float], width: int, fill: int, dtype: type) -> np.ndarray:
    """The items and, after them, `fill` up to `width`."""
    row = np.full(width, fill, dtype)
    row[: len(items)] = items
    return row


def prompt_row(prompt_ids: Sequence[int] | np.ndarray, vocab: int) -> Bool[np.ndarray, " V"]:
    """Which ids of the vocabulary the prompt holds, for the repetition penalty; InputError for an id outside it."""
    ids = np.asarray(prompt_ids, np.int64)
    outside = ids[(ids < 0) | (ids >= vocab)]
    if outside.size:
        raise InputError(f"prompt ids must be 0 to {vocab - 1}, got {outside[0]}")
    row = np.zeros(vocab, bool)
    row[ids] = True
    return row


def admit(state: SamplerState, slot: int, values: Mapping[str, np.ndarray], prompt_seen: Bool[np.ndarray, " V"]) -> SamplerState:
    """`state`, which is donated, with a new request in `slot`: its `slot_values`, its `prompt_row`, nothing generated yet."""
    slots, vocab = state.generated.shape[0] - 1, state.prompt_seen.shape[1]
    if not 0 <= slot < slots:
        raise CapacityError(f"slot {slot} is not one of the {slots} slots of the sampler")
    if prompt_seen.shape != (vocab,):
        raise InputError(f"prompt_seen must have the vocabulary's shape ({vocab},), got {prompt_seen.shape}")
    return _admitter(jax.tree.map(lambda array: array.sharding, state))(state, np.int32(slot), dict(values), prompt_seen)


@cache
def _admitter(shardings: SamplerState) -> Callable[..., SamplerState]:
    """The program that admits, for a state that lies as `shardings` say, and does so afterwards."""

    def write(
        state: SamplerState, slot: Int[Array, ""], values: dict[str, Array], prompt_seen: Bool[Array, " V"]
    ) -> SamplerState:
        rows = values | {"generated": 0, "output_counts": 0, "prompt_seen": prompt_seen}
        return replace(state, **{name: getattr(state, name).at[slot].set(row, mode="drop") for name, row in rows.items()})

    return jax.jit(write, donate_argnums=0, out_shardings=shardings)


def resume(state: SamplerState, slot: int, made: Sequence[int]) -> SamplerState:
    """`state`, which is donated, where the request in `slot` has generated these tokens already and goes on from there."""
    counts = np.bincount(np.asarray(made, np.int64), minlength=state.output_counts.shape[1]).astype(np.int32)
    shardings = jax.tree.map(lambda array: array.sharding, state)
    return _resumer(shardings)(state, np.int32(slot), np.int32(len(made)), counts)


@cache
def _resumer(shardings: SamplerState) -> Callable[..., SamplerState]:
    """The program of `resume`, for a state that lies as `shardings` say, and does so afterwards."""

    def write(state: SamplerState, slot: Int[Array, ""], generated: Int[Array, ""], counts: Int[Array, " V"]) -> SamplerState:
        rows = {"generated": generated, "output_counts": counts}
        return replace(state, **{name: getattr(state, name).at[slot].set(row) for name, row in rows.items()})

    return jax.jit(write, donate_argnums=0, out_shardings=shardings)


def advance(state: SamplerState, slots: Int[Array, " B"], tokens: Int[Array, " B"], live: Bool[Array, " B"]) -> SamplerState:
    """`state` after the rows that are live have taken their tokens; other rows may hold any slot and any token."""
    rows = jnp.where(live, slots, state.generated.shape[0])  # past the end: dropped
    return replace(
        state,
        generated=state.generated.at[rows].add(1, mode="drop"),
        output_counts=state.output_counts.at[rows, tokens].add(1, mode="drop"),
    )


class _Offer(NamedTuple):
    """What a rank has for each row: its best score and that id, and of the logits what all together make probabilities of."""

    score: Float[Array, " B"]
    token: Int[Array, " B"]
    logit: Float[Array, " B"]  # of the token
    peak: Float[Array, " B"]  # the largest logit
    mass: Float[Array, " B"]  # sum of exp(logit - peak); 0 without an id
    finite: Int[Array, " B"]
    top_logits: Float[Array, "B n"]
    top_ids: Int[Array, "B n"]


def sample(
    logits: Float[Array, "B v"],
    state: SamplerState,
    slots: Int[Array, " B"],
    *,
    vocab: int,
    banned: tuple[int, ...] = (),
    mode: Mode,
    top_logprobs: int = 0,
) -> SampleResult:
    """One token for each row, by the settings of its slot; `banned` ids (the media slots) are never sampled by any row.

    The order: bias and bans, stop ids banned before min_tokens, repetition, frequency and presence penalties, temperature, top-k,
    top-p, min-p, then Gumbel-max. `mode` "full" does it all, "sample" leaves out biases, penalties and filters, "greedy" the
    noise as well. The noise of a row comes from its slot's key and its count of tokens alone, so neither the batch around it nor
    its slot nor the mode nor the mesh changes a token. `vocab` ids are real; columns past them hold anything. `vocab`, `banned`,
    `mode` and `top_logprobs` (n) are static. To be called on a mesh; ranks exchange their offers once, and filters, which ask
    for the whole distribution, gather the scores before that.
    """
    width = logits.shape[1]
    first = first_local_row(width)
    ids = first + jnp.arange(width, dtype=jnp.int32)
    generated = state.generated[slots]
    temperature = state.temperature[slots][:, None]
    scores = logits
    if mode == "full":
        own = state.bias_ids[slots] - first
        own = jnp.where(own < 0, NO_ID, own)
        scores = scores.at[jnp.arange(slots.shape[0])[:, None], own].add(state.bias_values[slots], mode="drop")
    scores = jnp.where(_forbidden(state, slots, banned, ids) | (ids >= vocab), -jnp.inf, scores)
    if mode == "full":
        scores = _penalize(scores, state, slots)
        whole = gather_vocabulary(scores)
        scores = local_columns(keep_best(whole, temperature, state.top_k[slots], state.top_p[slots], state.min_p[slots]), width)
    if mode != "greedy":
        # equal to scores / temperature + noise in order, but it needs no division and is exactly the scores at temperature 0
        scores = scores + temperature * _gumbel(state.key[slots], generated, ids)
    offers = gather_ranks(_offer(scores, logits, first, ids < vocab, top_logprobs))
    chosen = jnp.argmax(offers.score, axis=0)
    tokens, logit = _at(offers.token.T, chosen), _at(offers.logit.T, chosen)
    finite = (offers.finite == 1).all(axis=0) & (_at(offers.score.T, chosen) > -jnp.inf)
    tokens = jnp.where(finite, tokens, 0)
    peak = offers.peak.max(axis=0)
    normalizer = peak + jnp.log((offers.mass * jnp.exp(offers.peak - peak)).sum(axis=0))
    best, top_ids = _best_of(offers.top_logits, offers.top_ids, top_logprobs)
    is_stop = (state.stop_ids[slots] == tokens[:, None]).any(axis=-1)
    return SampleResult(
        tokens=tokens,
        logprob=jnp.where(finite, logit - normalizer, 0.0),
        top_ids=jnp.where(finite[:, None], top_ids, 0),
        top_logprobs=jnp.where(finite[:, None], best - normalizer[:, None], 0.0),
        stopped=finite & is_stop,  # before min_tokens there is none, they are banned
        exhausted=finite & (generated + 1 >= state.max_tokens[slots]),
        finite=finite,
    )


def _offer(
    scores: Float[Array, "B v"], logits: Float[Array, "B v"], first: Int[Array, ""], real: Bool[Array, " v"], top: int
) -> _Offer:
    """This rank's offer, where its columns begin with the id `first` and only some are `real`."""
    masked = jnp.where(real, logits, -jnp.inf)
    column = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    peak = masked.max(axis=-1)
    mass = jnp.exp(masked - jnp.where(peak > -jnp.inf, peak, 0.0)[:, None]).sum(axis=-1)
    top_logits, top_columns = jax.lax.top_k(masked, min(top, masked.shape[1]))
    return _Offer(
        score=_at(scores, column),
        token=first + column,
        logit=_at(masked, column),
        peak=peak,
        mass=mass,
        finite=(jnp.isfinite(logits) | ~real).all(axis=-1).astype(jnp.int32),
        top_logits=top_logits,
        top_ids=first + top_columns,
    )


def _best_of(
    logits: Float[Array, "ranks B n"], ids: Int[Array, "ranks B n"], count: int
) -> tuple[Float[Array, "B count"], Int[Array, "B count"]]:
    """The best of all ranks' best, descending; of equal ones the lower ids, which earlier ranks have."""
    flat, flat_ids = (jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1) for a in (logits, ids))
    best, place = jax.lax.top_k(flat, count)
    return best, jnp.take_along_axis(flat_ids, place, axis=-1)


def _at(rows: Float[Array, "B V"], ids: Int[Array, " B"]) -> Float[Array, " B"]:
    """The entry of each row at its id."""
    return jnp.take_along_axis(rows, ids[:, None], axis=-1)[:, 0]


def _forbidden(
    state: SamplerState, slots: Int[Array, " B"], banned: tuple[int, ...], ids: Int[Array, " v"]
) -> Bool[Array, "B v"]:
    """Of these ids those that a row may not take now. Compared one by one, so that it fuses into what reads it."""
    ids = ids[None]
    early = state.generated[slots] < state.min_tokens[slots]
    stops = jnp.where(early[:, None], state.stop_ids[slots], NO_STOP)
    forbidden = jnp.zeros((slots.shape[0], ids.shape[1]), bool)
    for column in range(MAX_STOP_IDS):
        forbidden |= ids == stops[:, column, None]
    for i in banned:
        forbidden |= ids == i
    return forbidden


def _penalize(scores: Float[Array, "B V"], state: SamplerState, slots: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Repetition over prompt and output (positive scores divided, others multiplied), then frequency and presence over output."""
    counts = state.output_counts[slots]
    repetition = state.repetition[slots][:, None]
    repeated = jnp.where(scores > 0, scores / repetition, scores * repetition)
    scores = jnp.where(state.prompt_seen[slots] | (counts > 0), repeated, scores)
    scores = scores - state.frequency[slots][:, None] * counts - state.presence[slots][:, None] * (counts > 0)
    return jnp.minimum(scores, HUGE)  # a small repetition penalty can overflow, and inf - inf would follow


def _gumbel(key: UInt32[Array, "B 2"], step: Int[Array, " B"], ids: Int[Array, " v"]) -> Float[Array, "B v"]:
    """Gumbel noise of a row at these ids, from its key and step by 32 random bits: -2.9 to 22.9, finite, fine in the upper tail.

    The usual 23 bits reach 16 only, and at this vocabulary the best draws would often be equal.
    """

    def bits(key: UInt32[Array, " 2"], step: Int[Array, ""]) -> UInt32[Array, " v"]:
        """What jax.random.bits of the whole vocabulary has at the ids, which is a hash of each id."""
        wrapped = jax.random.wrap_key_data(key, impl="threefry2x32")
        folded = jax.random.key_data(jax.random.fold_in(wrapped, step))
        low = ids.astype(jnp.uint32)
        high, low = jnp.split(threefry_2x32((folded[0], folded[1]), jnp.concatenate([jnp.zeros_like(low), low])), 2)
        return high ^ low

    uniform = (jax.vmap(bits)(key, step).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))
