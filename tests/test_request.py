"""SamplingParams: what it accepts, what it stores, and what its errors name."""

import dataclasses
import math

import numpy as np
import pytest

from inkling_jax.engine.request import MAX_BIAS_IDS, MAX_STOP_IDS, SamplingParams, request_key
from inkling_jax.errors import InputError


def test_defaults():
    p = SamplingParams()
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.n) == (1.0, 0, 1.0, 0.0, 1)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (p.logit_bias, p.seed, p.max_tokens, p.stop_token_ids, p.logprobs) == (None,) * 5
    assert (p.min_tokens, p.stop, p.ignore_eos, p.bad_token_ids) == (0, (), False, ())


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("temperature", -0.1, "from 0 to 100"),
        ("temperature", 101, "from 0 to 100"),
        ("temperature", True, "from 0 to 100"),
        ("temperature", math.nan, "from 0 to 100"),
        ("temperature", "1", "from 0 to 100"),
        ("temperature", None, "from 0 to 100"),
        ("temperature", 10**400, "from 0 to 100"),
        ("top_k", -1, "from 0 to"),
        ("top_k", 1.0, "integer"),
        ("top_k", 2**31, "from 0 to 2147483647"),
        ("top_p", 1.01, "from 0 to 1"),
        ("min_p", -0.5, "from 0 to 1"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", -math.inf, "from -2 to 2"),
        ("repetition_penalty", 0, "from 0.0001 to 100"),
        ("repetition_penalty", -1.0, "from 0.0001 to 100"),
        ("seed", 2**63, "from 0 to"),
        ("seed", -1, "from 0 to"),
        ("seed", 1.5, "integer"),
        ("max_tokens", 0, "from 1 to"),
        ("max_tokens", True, "from 1 to"),
        ("min_tokens", -1, "from 0 to"),
        ("logprobs", 21, "from 0 to 20"),
        ("logprobs", False, "from 0 to 20"),
        ("n", 0, "from 1 to"),
        ("ignore_eos", 1, "True or False"),
        ("stop", "", "not empty"),
        ("stop", ["a", ""], "not empty"),
        ("stop", [1], "strings"),
        ("stop", b"ab", "strings"),
        ("stop", 5, "sequence of strings"),
        ("stop_token_ids", "12", "sequence of token ids"),
        ("stop_token_ids", b"12", "sequence of token ids"),
        ("stop_token_ids", 3, "sequence of token ids"),
        ("stop_token_ids", [1, -1], "from 0 to"),
        ("bad_token_ids", [True], "integer"),
        ("bad_token_ids", None, "sequence of token ids"),
        ("logit_bias", {"5": 1.0}, "integer"),
        ("logit_bias", {5: math.nan}, "from -100 to 100"),
        ("logit_bias", {5: -101}, "from -100 to 100"),
        ("logit_bias", [1, 2], "map token ids"),
        ("logit_bias", 3, "map token ids"),
    ],
)
def test_a_bad_value_is_named_with_its_range(field, value, wanted):
    with pytest.raises(InputError) as error:
        SamplingParams(**{field: value})
    message = str(error.value)
    assert f"SamplingParams.{field} " in message and wanted in message
    if not isinstance(value, dict | list):
        assert repr(value) in message


def test_min_tokens_at_most_max_tokens():
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    with pytest.raises(InputError, match="min_tokens must be at most max_tokens = 2, got 3"):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_the_limits_of_the_device_tables_name_both_numbers():
    SamplingParams(stop_token_ids=range(MAX_STOP_IDS), bad_token_ids=range(MAX_BIAS_IDS), logit_bias={0: 1.0})
    with pytest.raises(InputError, match=f"stop_token_ids may name {MAX_STOP_IDS} ids, got {MAX_STOP_IDS + 1}"):
        SamplingParams(stop_token_ids=range(MAX_STOP_IDS + 1))
    with pytest.raises(InputError, match=f"together may name {MAX_BIAS_IDS} ids, got {MAX_BIAS_IDS + 1}"):
        SamplingParams(bad_token_ids=range(MAX_BIAS_IDS), logit_bias={1000: 1.0})


def test_nothing_mutable_is_shared_and_instances_hash():
    bias, stops, words = {7: 1, 3: np.float32(-2)}, [5, np.int64(4), 5], ["b", "a"]
    p = SamplingParams(logit_bias=bias, stop_token_ids=stops, stop=words, bad_token_ids={9})
    bias[1], words[0] = 5.0, "z"
    stops.append(6)
    assert (p.logit_bias, p.stop_token_ids, p.stop, p.bad_token_ids) == (((3, -2.0), (7, 1.0)), (4, 5), ("b", "a"), (9,))
    assert hash(p) == hash(SamplingParams(logit_bias={3: -2, 7: 1.0}, stop_token_ids=(4, 5), stop=("b", "a"), bad_token_ids=[9]))
    assert dataclasses.replace(p, max_tokens=3).logit_bias == p.logit_bias and p.max_tokens is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.temperature = 0.5  # type: ignore[misc]
    assert type(SamplingParams(top_k=np.int32(3)).top_k) is int and type(SamplingParams(top_p=1).top_p) is float
    assert SamplingParams(stop="ab").stop == ("ab",)


@pytest.mark.parametrize("fields", [{"logit_bias": {100: 1.0}}, {"stop_token_ids": [3, 100]}, {"bad_token_ids": (100,)}])
def test_ids_must_lie_in_the_usable_vocabulary(fields):
    SamplingParams(**fields).validate_for(101)
    with pytest.raises(InputError, match=f"{next(iter(fields))} holds id 100, ids of this model are 0 to 99"):
        SamplingParams(**fields).validate_for(100)


def test_stop_ids_explicit_over_defaults():
    assert SamplingParams().resolve_stop_ids([9, 3, 9]) == (3, 9)
    assert SamplingParams(stop_token_ids=[4]).resolve_stop_ids([9]) == (4,)
    assert SamplingParams(stop_token_ids=[]).resolve_stop_ids([9]) == ()
    assert SamplingParams(ignore_eos=True).resolve_stop_ids([9]) == ()
    assert SamplingParams(ignore_eos=True, stop_token_ids=[4]).resolve_stop_ids([9]) == (4,)


def test_keys_differ_by_seed_and_sample_and_repeat_by_seed():
    pairs = [(s, i) for s in (0, 1, 5, 2**32, 5 + 7 * 2**32, 2**63 - 1) for i in (0, 1, 7)]
    keys = {tuple(int(word) for word in request_key(seed, i)) for seed, i in pairs}
    assert len(keys) == len(pairs)
    assert (request_key(5, 7) == request_key(5, 7)).all() and request_key(5).dtype == np.uint32 and request_key(5).shape == (2,)
