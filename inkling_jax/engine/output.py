"""What a request has made, read from the results of a step."""

from __future__ import annotations

import dataclasses

import numpy as np

from inkling_jax.engine.sequence import Sequence
from inkling_jax.engine.steps import Sampled


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one generated token under the model's own distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Output:
    """What a request has made since the last Output; the stop token is not among token_ids."""

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None = None  # "stop", "length", "error" or, past its deadline, "cancelled"
    error: str | None = None


def read_row(sequence: Sequence, sampled: Sampled, step: int) -> Output:
    """What step number `step` has made for a sequence whose row `sampled` is, one entry a decode step; it joins `made`."""
    result, tokens, logprobs = sampled.result, [], []
    reason = error = None
    for i in np.flatnonzero(sampled.emitted):
        if not result.finite[i]:
            number = len(sequence.made) + len(tokens) + 1
            reason, error = "error", f"the logits of step {step} are not finite (generated token {number})"
            break
        if result.stopped[i]:
            reason = "stop"
            break
        tokens.append(int(result.tokens[i]))
        if sequence.request.params.logprobs is not None:
            top = zip(result.top_ids[i].tolist(), result.top_logprobs[i].tolist(), strict=True)
            logprobs.append(TokenLogprobs(tokens[-1], float(result.logprob[i]), tuple(top)[: sequence.request.params.logprobs]))
        if result.exhausted[i]:
            reason = "length"
    sequence.made += tokens
    return Output(sequence.id, tuple(tokens), tuple(logprobs), reason, error)
