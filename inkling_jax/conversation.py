"""Answers to conversations: a prompt from messages, and what the model makes of it told apart, whole or as it comes (spec 6)."""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inkling_jax.completion import Completion
from inkling_jax.engine.output import TokenLogprobs
from inkling_jax.engine.request import SamplingParams
from inkling_jax.errors import InputError
from inkling_jax.inputs.prompt import Prompt
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.outputs.parser import OutputParser, Parsed
from inkling_jax.outputs.tool_calls import CallDelta, MalformedCall, ToolCall

if TYPE_CHECKING:
    from inkling_jax.llm import LLM

_CALL_ID = re.compile(r"call_([0-9]{1,18})")
_HISTORY_PARTS = {"reasoning": "thinking", "content": "text"}


@dataclasses.dataclass(frozen=True)
class ChatCompletion:
    """An answer. Append `message` to the conversation, then what the tools say to `tool_calls`, and ask again.

    `malformed_calls` are calls that cannot be made, with what is wrong with each. `message` leaves them out.
    """

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    malformed_calls: tuple[MalformedCall, ...]
    message: dict[str, Any]
    token_ids: tuple[int, ...]
    finish_reason: str  # as of `Completion`
    prompt_tokens: int
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of the tokens, where asked for and not streamed
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class ChatDelta:
    """A piece of an answer: of one kind, pieces being in the order of the text. The last one carries the finish reason.

    `token_ids` are those of this piece and of those that follow it without ids.
    """

    reasoning: str = ""
    content: str = ""
    tool_call: CallDelta | None = None
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str | None = None


class ChatStream:
    """Iterates over the pieces of an answer as they are made; `close` (or `with`) cancels the rest."""

    def __init__(self, llm: LLM, prompt: Prompt, sampling: SamplingParams, first_call: int = 0):
        """`first_call` is the number in the id of the first tool call. Raises InputError as `llm.stream` does."""
        self._tokenizer = _tokenizer(llm)
        self._deltas = llm.stream(prompt, sampling)
        self._parser = OutputParser(self._tokenizer, prompt.token_ids, first_call)
        self._prompt_tokens = len(prompt.token_ids)
        self._ready: deque[ChatDelta] = deque()
        self._ids: list[int] = []
        self._text: list[str] = []
        self._reason: str | None = None
        self._error: str | None = None

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> ChatStream:
        return self

    def __next__(self) -> ChatDelta:
        while not self._ready:
            self._read()
        return self._ready.popleft()

    def close(self) -> None:
        """Cancel what is not made yet."""
        self._deltas.close()

    def completion(self) -> ChatCompletion:
        """The answer up to here; one that has not ended is cancelled."""
        self.close()
        if self._reason is None:
            self._reason = "cancelled"
            self._parser.finish()
        return _completion(self._parser.parsed, tuple(self._ids), self._reason, self._prompt_tokens, None, self._error)

    def _read(self) -> None:
        """Make the pieces of the next delta ready. Raises StopIteration after the last one."""
        delta = next(self._deltas)
        self._ids += delta.token_ids
        self._text.append(delta.text)
        drop = _beyond_stop(self._tokenizer, self._ids, "".join(self._text)) if delta.finish_reason == "stop" else 0
        pieces = self._parser.push(delta.token_ids, drop)
        if delta.finish_reason is not None:
            pieces += self._parser.finish()
            self._reason, self._error = delta.finish_reason, delta.error
        if not pieces and not delta.token_ids and delta.finish_reason is None:
            return
        found = [ChatDelta(piece.reasoning, piece.content, piece.call) for piece in pieces] or [ChatDelta()]
        found[0] = dataclasses.replace(found[0], token_ids=delta.token_ids)
        found[-1] = dataclasses.replace(found[-1], finish_reason=delta.finish_reason, error=delta.error)
        self._ready.extend(found)


def chat(
    llm: LLM,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    effort: str | float | None,
    sampling: SamplingParams | None,
    stream: bool,
) -> ChatCompletion | ChatStream:
    """What `LLM.chat` says."""
    prompt = llm.chat_prompt(messages, tools=tools, effort=effort)
    params = SamplingParams() if sampling is None else sampling
    first_call = next_call(messages)
    if stream:
        return ChatStream(llm, prompt, params, first_call)
    if isinstance(params, SamplingParams) and params.n != 1:
        raise InputError(f"chat gives one answer, SamplingParams.n is {params.n}")
    (made,) = llm.generate([prompt], params)
    return told_apart(_tokenizer(llm), made, prompt.token_ids, first_call)


def told_apart(tokenizer: Tokenizer, made: Completion, prompt_ids: Sequence[int], first_call: int = 0) -> ChatCompletion:
    """A completion of a chat's prompt as an answer; `first_call` is the number in the id of the first tool call."""
    parser = OutputParser(tokenizer, prompt_ids, first_call)
    parser.push(made.token_ids, _beyond_stop(tokenizer, made.token_ids, made.text) if made.finish_reason == "stop" else 0)
    parser.finish()
    return _completion(parser.parsed, made.token_ids, made.finish_reason, made.prompt_tokens, made.logprobs, made.error)


def answer_fields(answer: ChatCompletion) -> dict[str, Any]:
    """What JSON output says of an answer beside its text, tokens and end."""
    return {
        "reasoning": answer.reasoning,
        "content": answer.content,
        "tool_calls": [dataclasses.asdict(call) for call in answer.tool_calls],
        "malformed_calls": [dataclasses.asdict(call) for call in answer.malformed_calls],
    }


def next_call(messages: Sequence[Mapping[str, Any]]) -> int:
    """The number in the id of the next tool call, above those in the conversation's: counting would name one again.

    Malformed calls took a number and are not in it, and its beginning may have been left out.
    """
    calls = [call for message in messages if message["role"] == "assistant" for call in message.get("tool_calls") or ()]
    numbers = (_CALL_ID.fullmatch(call.get("id") or "") for call in calls)
    return max((int(number[1]) + 1 for number in numbers if number), default=0)


def _tokenizer(llm: LLM) -> Tokenizer:
    assert llm.tokenizer is not None, "there is no chat prompt without one"
    return llm.tokenizer


def _completion(
    parsed: Parsed,
    token_ids: tuple[int, ...],
    reason: str,
    prompt_tokens: int,
    logprobs: tuple[TokenLogprobs, ...] | None,
    error: str | None,
) -> ChatCompletion:
    made, message = (parsed.reasoning, parsed.content, parsed.tool_calls, parsed.malformed_calls), _message(parsed)
    return ChatCompletion(*made, message, token_ids, reason, prompt_tokens, logprobs, error)


def _message(parsed: Parsed) -> dict[str, Any]:
    """The answer as the model is to read it later: in the usual fields, as parts in order where these would join or reorder."""
    message: dict[str, Any] = {"role": "assistant"}
    kinds = [kind for kind, _ in parsed.blocks]
    if kinds in ([], ["reasoning"], ["content"], ["reasoning", "content"]):
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        message["content"] = parsed.content
    else:
        parts = [(_HISTORY_PARTS[kind], text) for kind, text in parsed.blocks]
        message["content"] = [{"type": kind, kind: text} for kind, text in parts]
    if parsed.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.tool_calls
        ]
    return message


def _beyond_stop(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> int:
    """How many bytes at the end of the last id do not belong to `text`, which a stop string has cut."""
    data = b"".join(tokenizer.token_bytes(i) for i in token_ids)
    last = len(tokenizer.token_bytes(token_ids[-1])) if token_ids else 0
    return next((n for n in range(last + 1) if data[: len(data) - n].decode("utf-8", "replace") == text), 0)
