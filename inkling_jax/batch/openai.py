"""Requests of OpenAI's batch files: which fields mean what here, and which are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inkling_jax.errors import InputError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_SAMPLING = (
    *("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "max_tokens"),
    # not OpenAI's, but of other servers with this interface
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "bad_token_ids"),
)
_TAKEN = {CHAT: (*_SAMPLING, "messages", "tools"), TEXT: (*_SAMPLING, "prompt")}
_RENAMED = {CHAT: {"max_completion_tokens": "max_tokens", "reasoning_effort": "effort"}, TEXT: {}}
# These change no answer: one model runs, whatever it is called.
_LABELS = ("model", "user", "metadata", "safety_identifier", "prompt_cache_key")
# Fields of which one value says what is done anyway, so that it may be given; any other is refused.
_FIXED: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "store": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}


def fields(line: Mapping[str, Any]) -> dict[str, Any]:
    """What a line {"custom_id", "method", "url", "body"} asks for, under our own names. InputError names what is not done."""
    for name in line:
        if name not in ("custom_id", "method", "url", "body"):
            raise InputError(f"{name} is no field of a batch request: they are custom_id, method, url, body")
    body = line.get("body")
    if not isinstance(body, Mapping):
        raise InputError("body must be an object" if "body" in line else "body is missing")
    if line.get("method", "POST") != "POST":
        raise InputError(f"method must be POST, got {line['method']!r}")
    url = line.get("url", CHAT if "messages" in body else TEXT)
    if url not in (CHAT, TEXT):
        raise InputError(f"url {url!r} is not implemented: {CHAT} and {TEXT} are")
    found: dict[str, Any] = {}
    for name, value in body.items():
        known = _RENAMED[url].get(name, name)
        if value is None or name in _LABELS:
            continue
        if name in _FIXED:
            if not any(value == fixed and type(value) is type(fixed) for fixed in _FIXED[name]):
                fixed = json.dumps(_FIXED[name][0])
                raise InputError(f"body.{name} is not implemented but as {fixed}, got {json.dumps(value)[:100]}")
        elif name not in _TAKEN[url] and name not in _RENAMED[url]:
            raise InputError(f"body.{name} is not implemented")
        elif found.setdefault(known, value) != value:
            raise InputError(f"body.{name} contradicts body.{known}")
    return found
