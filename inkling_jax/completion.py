"""What one request leads to, as text: whole, or in pieces as it is made."""

from __future__ import annotations

import dataclasses

from inkling_jax.engine.output import Output, TokenLogprobs
from inkling_jax.engine.request import Request
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.outputs.detokenizer import IncrementalDetokenizer


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a prompt led to. The stop token is not in `token_ids`; `text` is empty without a tokenizer."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str  # "stop", "length", "cancelled" or "error"
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_tokens: int
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Delta:
    """A piece of a completion: whole characters only. The last one carries the finish reason."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    error: str | None = None


class Writer:
    """Turns the outputs of one request into text, and ends it at a stop string."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request):
        self._request = request
        self._detokenizer = IncrementalDetokenizer(tokenizer, stop=request.params.stop) if tokenizer else None
        self._tokens: list[int] = []
        self._shown = 0  # tokens in deltas so far; later ones may yet belong to a stop string
        self._logprobs: list[TokenLogprobs] = []
        self._text: list[str] = []
        self._reason: str | None = None
        self._error: str | None = None

    def push(self, output: Output) -> Delta:
        """The new piece; its finish_reason is set where the request ends here, by the model or by a stop string."""
        if self._reason is not None:
            return Delta("", ())
        self._tokens += output.token_ids
        self._logprobs += output.logprobs
        text, kept, reason = "", len(self._tokens), output.finish_reason
        if self._detokenizer is not None:
            text = self._detokenizer.push(output.token_ids)
            if reason is not None:
                text += self._detokenizer.finish()
            kept = self._detokenizer.kept_tokens
            if self._detokenizer.stopped is not None:
                reason = "stop"
        if reason is not None:
            del self._tokens[kept:], self._logprobs[kept:]
        new = tuple(self._tokens[self._shown : kept])
        self._shown, self._reason, self._error = kept, reason, output.error
        self._text.append(text)
        return Delta(text, new, reason, output.error)

    def completion(self) -> Completion:
        """Everything so far."""
        logprobs = tuple(self._logprobs) if self._request.params.logprobs is not None else None
        text, reason = "".join(self._text), self._reason or "cancelled"
        return Completion(tuple(self._tokens), text, reason, logprobs, len(self._request.prompt_ids), self._error)
