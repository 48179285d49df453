"""What a request asks of sampling: checked, immutable and hashable. Knows no arrays of the device and imports no jax."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inkling_jax.errors import InputError
from inkling_jax.media import MediaItem

MAX_STOP_IDS = 16  # stop ids that one request may have: the width of a table on the device
MAX_BIAS_IDS = 64  # ids with a bias or a ban that one request may have: likewise
MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_PRIORITY = 100
NO_LIMIT = 2**31 - 1  # largest int32: what the device holds for "no limit"
GREEDY_BELOW = 1e-5  # a smaller temperature is argmax: its noise would be below the rounding of the logits


@dataclass(frozen=True)
class SamplingParams:
    """How to sample a request; names as in vLLM. Values are copied into immutable ones, and InputError names a bad field.

    `logit_bias` is stored as (id, value) pairs in order of id, `stop` and the id sets as tuples (the ids ascending and unique),
    so that an instance is hashable, shares nothing mutable with its maker, and `dataclasses.replace` works on it.
    """

    temperature: float = 1.0  # 0: argmax
    top_k: int = 0  # 0: all; more than the vocabulary is allowed
    top_p: float = 1.0  # 0 keeps the best token alone
    min_p: float = 0.0  # least probability, as a share of the best token's
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    seed: int | None = None  # None: a fresh one for each request
    max_tokens: int | None = None  # None: until the context ends
    min_tokens: int = 0  # stop ids are banned before that many tokens
    stop: str | Collection[str] = ()
    stop_token_ids: Collection[int] | None = None  # a set, even an empty one, replaces the defaults
    ignore_eos: bool = False  # drops the default stop ids, keeps explicit ones
    bad_token_ids: Collection[int] = ()  # never sampled
    logprobs: int | None = None  # None: none; 0: of the chosen token; n: of the n best as well
    n: int = 1

    def __post_init__(self) -> None:
        """Checks and normalises every field."""
        for name, low, high in _NUMBERS:
            self._set(name, _number(name, getattr(self, name), low, high))
        for name, low, high, optional in _INTEGERS:
            value = getattr(self, name)
            self._set(name, None if value is None and optional else _integer(name, value, low, high))
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"SamplingParams.ignore_eos must be True or False, got {self.ignore_eos!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"SamplingParams.min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}")
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("stop", _strings("stop", self.stop))
        self._set("bad_token_ids", _ids("bad_token_ids", self.bad_token_ids))
        if self.stop_token_ids is not None:
            self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
            _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_IDS)
        _at_most("logit_bias and bad_token_ids together", len(self.biases()), MAX_BIAS_IDS)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen

    def validate_for(self, vocab: int) -> None:
        """InputError when an id of `logit_bias`, `stop_token_ids` or `bad_token_ids` is not below the usable vocabulary."""
        fields = {
            "logit_bias": dict(self.logit_bias or ()),
            "stop_token_ids": self.stop_token_ids or (),
            "bad_token_ids": self.bad_token_ids,
        }
        for name, ids in fields.items():
            for i in ids:
                if i >= vocab:
                    raise InputError(f"SamplingParams.{name} holds id {i}, ids of this model are 0 to {vocab - 1}")

    def biases(self) -> dict[int, float]:
        """What is added to the logit of an id: the logit bias, or -inf for a banned id."""
        return dict(self.logit_bias or ()) | dict.fromkeys(self.bad_token_ids, -math.inf)

    def resolve_stop_ids(self, defaults: Iterable[int]) -> tuple[int, ...]:
        """Ids that end this request: explicit ones, else the `defaults` of the model, else none under `ignore_eos`."""
        if self.stop_token_ids is not None:
            return tuple(self.stop_token_ids)
        return () if self.ignore_eos else tuple(sorted(set(defaults)))


@dataclass(frozen=True)
class Request:
    """One sequence to generate: token ids, settings, which of the `n` samples of its prompt it is, and what stands in for ids.

    Each level of `priority`, -100 to 100, is worth some places in line (`engine/sequence.py`). After `deadline` seconds the
    request ends as "cancelled".
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    sample: int = 0
    media: tuple[MediaItem, ...] = ()
    priority: int = 0
    deadline: float | None = None

    def __post_init__(self) -> None:
        """Checks what a scheduler would stumble over."""
        _integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY, "Request")
        if self.deadline is not None:
            _number("deadline", self.deadline, 0.0, math.inf, "Request")


def request_key(seed: int, sample: int = 0) -> np.ndarray:
    """The random key, uint32 [2], of sample `sample` (of n) of a request with that seed."""
    # a spawn key, since numpy pads entropy with zeros: as entropy, (5, 7) and 5 + 7 * 2**32 would be the same
    return np.random.SeedSequence(seed, spawn_key=(sample,)).generate_state(2, np.uint32)


def check_ids(token_ids: Sequence[int], vocab: int) -> None:
    """Raise InputError for the first id outside the usable vocabulary, or for none at all: the device would clamp in silence."""
    if not len(token_ids):
        raise InputError("the prompt is empty: give at least one token")
    for place, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab:
            raise InputError(f"token {place} of the prompt is {token!r}: ids are integers from 0 to {vocab - 1}")


_NUMBERS = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 1e-4, 100.0),  # logits are divided by it: it must not be zero in float32 either
)
_INTEGERS = (
    ("top_k", 0, NO_LIMIT, False),
    ("seed", 0, 2**63 - 1, True),
    ("max_tokens", 1, NO_LIMIT, True),
    ("min_tokens", 0, NO_LIMIT, False),
    ("logprobs", 0, MAX_LOGPROBS, True),
    ("n", 1, MAX_SAMPLES, False),
)


def _number(name: str, value: object, low: float, high: float, of: str = "SamplingParams") -> float:
    """`value` as a float, where it is a number (no bool, string or NaN) from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating) or not low <= value <= high:
        raise InputError(f"{of}.{name} must be a number from {low:g} to {high:g}, got {value!r}")
    return float(value)


def _integer(name: str, value: object, low: int, high: int, of: str = "SamplingParams") -> int:
    """`value` as an int, where it is an integer (no bool, float or string) from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise InputError(f"{of}.{name} must be an integer from {low} to {high}, got {value!r}")
    return int(value)


def _ids(name: str, value: object) -> tuple[int, ...]:
    """`value`, a collection of token ids, as an ascending tuple without repeats."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InputError(f"SamplingParams.{name} must be a sequence of token ids, got {value!r}")
    return tuple(sorted({_integer(name, i, 0, NO_LIMIT) for i in value}))


def _strings(name: str, value: object) -> tuple[str, ...]:
    """`value`, one string or a collection of them, none empty, as a tuple."""
    items = (value,) if isinstance(value, str) else value
    if isinstance(items, bytes) or not isinstance(items, Iterable):
        raise InputError(f"SamplingParams.{name} must be a string or a sequence of strings, got {value!r}")
    strings = tuple(items)
    if not all(isinstance(s, str) and s for s in strings):
        raise InputError(f"SamplingParams.{name} must hold strings that are not empty, got {value!r}")
    return strings


def _bias(value: object) -> tuple[tuple[int, float], ...] | None:
    """`value`, a mapping of token id to bias or pairs of them, as pairs ascending by id; biases from -100 to 100."""
    if value is None:
        return None
    try:
        pairs = dict(value)  # pyright: ignore[reportArgumentType, reportCallIssue]  what does not fit raises
    except (TypeError, ValueError):
        raise InputError(f"SamplingParams.logit_bias must map token ids to numbers, got {value!r}") from None
    name = "logit_bias"
    return tuple(sorted((_integer(name, i, 0, NO_LIMIT), _number(name, b, -100.0, 100.0)) for i, b in pairs.items()))


def _at_most(name: str, count: int, limit: int) -> None:
    """InputError with both numbers where `count` ids are more than `limit`."""
    if count > limit:
        raise InputError(f"SamplingParams.{name} may name {limit} ids, got {count}")
