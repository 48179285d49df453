"""The notebook-facing object: load a model, then score, trace, generate, stream and chat."""

from __future__ import annotations

import dataclasses
import os
import reprlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import numpy as np
from jaxtyping import Float

from inkling_jax.completion import Completion, Delta, Writer
from inkling_jax.config import ModelConfig
from inkling_jax.conversation import ChatCompletion, ChatStream, chat
from inkling_jax.engine.calls import EngineCalls
from inkling_jax.engine.engine import Engine
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.errors import InputError
from inkling_jax.inputs.messages import check_messages
from inkling_jax.inputs.processor import Processor
from inkling_jax.inputs.prompt import Prompt
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.loading import Loaded, load_model
from inkling_jax.media import MediaItem

PromptLike = str | Prompt | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Effort = str | float | None


def load(source: str | os.PathLike[str], **options: Any) -> LLM:
    """Load a model from a checkpoint directory, a preset's name or a hub id, tried in this order.

    Options are those of `inkling_jax.loading.load_model`: weights, dtype, mesh, max_context, kv_memory, kv_dtype, prefix_memory,
    kernels, activations, draft, slots, page_size, chunk, tokens_per_call, ahead, deterministic, check, warm_up, seed, quiet.
    Raises InklingError's kinds, each naming what is wrong.
    """
    return LLM(load_model(source, **options))


class LLM:
    """A loaded model. Not safe to use from two threads at once; `close` (or `with`) frees its device memory."""

    def __init__(self, loaded: Loaded):
        self.config: ModelConfig = loaded.config
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.summary: str = loaded.summary
        self.engine: Engine = loaded.engine
        self.processor: Processor = loaded.processor
        self._render_chat, self._open_drafts = loaded.render_chat, loaded.open_drafts
        self.calls = EngineCalls(loaded.engine)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free weights and cache. Later calls raise InputError."""
        self.engine.close()

    @property
    def parameters(self) -> dict[str, jax.Array]:
        """The decoder's arrays by path, such as "layers.0.attn.o_proj": those that it computes with, no copies."""
        if self.engine.closed:
            raise InputError("this model is closed: load it again")
        return dict(zip(self.engine.programs.paths, self.engine.leaves, strict=True))

    def score(self, prompt: PromptLike) -> Float[np.ndarray, "T usable"]:
        """float32 logits after each of the T prompt tokens, teacher forced."""
        return np.concatenate([logits for logits, _ in self._evaluate(prompt, trace=False)])

    def trace(self, prompt: PromptLike) -> dict[str, np.ndarray]:
        """What happens inside, for each of the T prompt tokens.

        "hidden.0" is the embedding's output, "hidden.i" that of layer i-1 and "hidden.L" the last after the final norm, [T, D];
        "moe.j.experts" (ascending), "moe.j.weights" [T, A] and "moe.j.shared" [T, J] are the routing of the j-th sparse layer.
        """
        chunks = [tape for _, tape in self._evaluate(prompt, trace=True)]
        return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}

    def draft_logits(self, prompt: PromptLike) -> list[Float[np.ndarray, "rows usable"]]:
        """float32 logits of each depth k of the draft head, [T - 1 - k, usable], teacher forced (spec 3).

        Row t of depth k is computed from the T prompt tokens up to t + 1 + k, and guesses the one at t + 2 + k. Unless the model
        was loaded with draft=True, the first call reads the head: InputError where there is none, CapacityError where no memory
        is left for it.
        """
        ids, media = self._read(prompt)
        if self.engine.drafts is None and not self.engine.closed:
            self.engine.drafts = self._open_drafts()
        chunks = list(self._pieces(self.engine.draft_logits(ids, media)))
        return [np.concatenate(depth) for depth in zip(*chunks, strict=True)]

    def generate(
        self, prompts: PromptLike | Sequence[PromptLike], sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> list[Completion]:
        """A completion for each prompt, in order; with n > 1, the n samples of a prompt follow one another.

        A single string, Prompt or list of ids is one prompt. `sampling` is one for all or one each. All run in one batch.
        """
        listed = _as_list(prompts)
        settings: list[Any] = list(sampling) if isinstance(sampling, list | tuple) else [sampling] * len(listed)
        if len(settings) != len(listed):
            raise InputError(f"{len(listed)} prompts but {len(settings)} sampling settings: give one for all, or one each")
        requests = [request for prompt, params in zip(listed, settings, strict=True) for request in self.requests(prompt, params)]
        writers = [Writer(self.tokenizer, request) for request in requests]
        with self.calls.open() as call:
            writer_of = {call.add(request): writer for request, writer in zip(requests, writers, strict=True)}
            while call:
                for request_id, output in call.step():
                    if writer_of[request_id].push(output).finish_reason is not None:
                        call.drop(request_id)  # a stop string ends it before the model does
        return [writer.completion() for writer in writers]

    def stream(self, prompt: PromptLike, sampling: SamplingParams = SamplingParams()) -> Generator[Delta, None, None]:
        """Pieces of one completion as they are made. Closing the iterator cancels the request."""
        requests = self.requests(prompt, sampling)
        if sampling.n != 1:
            raise InputError(f"stream yields one completion, SamplingParams.n is {sampling.n}")
        return self._stream(requests)

    def chat_prompt(self, messages: Messages, *, tools: Tools = None, effort: Effort = None) -> Prompt:
        """A conversation as the model reads it, up to where its answer begins: by the checkpoint's template or spec 6."""
        self._require_tokenizer("a conversation")
        shown = check_messages(messages, self.processor.frames)
        return self.processor.encode(self._render_chat(shown, tools=tools, effort=effort))

    @overload
    def chat(
        self, messages: Messages, *, tools: Tools = None, effort: Effort = None, sampling: SamplingParams | None = None
    ) -> ChatCompletion: ...
    @overload
    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        effort: Effort = None,
        sampling: SamplingParams | None = None,
        stream: Literal[True],
    ) -> ChatStream: ...
    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        effort: Effort = None,
        sampling: SamplingParams | None = None,
        stream: bool = False,
    ) -> ChatCompletion | ChatStream:
        """The answer to a conversation, its reasoning, text and tool calls told apart; with `stream`, in pieces as they are made.

        `messages` and `tools` have the OpenAI shape; `effort` is a name or a number in [0, 0.99]. Raises InputError for what is
        wrong with them.
        """
        return chat(self, messages, tools, effort, sampling, stream)

    def _stream(self, requests: list[Request]) -> Generator[Delta, None, None]:
        writer = Writer(self.tokenizer, requests[0])
        with self.calls.open() as call:
            call.add(requests[0])
            while call:
                for _, output in call.step():
                    delta = writer.push(output)
                    if delta.text or delta.token_ids or delta.finish_reason is not None:
                        yield delta
                    if delta.finish_reason is not None:
                        return

    def _evaluate(self, prompt: PromptLike, trace: bool) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        ids, media = self._read(prompt)
        return self._pieces(self.engine.evaluate(ids, trace, media))

    def _pieces[Piece](self, chunks: Iterator[Piece]) -> Iterator[Piece]:
        """What the engine computes chunk by chunk; Ctrl-C waits for the end of one."""
        while (chunk := self.calls.uninterrupted(lambda: next(chunks, None))) is not None:
            yield chunk

    def requests(self, prompt: PromptLike, params: SamplingParams) -> list[Request]:
        """What the engine is asked for the n samples of a prompt. Raises InputError for what is wrong with it."""
        if not isinstance(params, SamplingParams):
            raise InputError(
                f"sampling is {reprlib.repr(params)}: expected SamplingParams, or a list of them, one for each prompt"
            )
        if params.stop:
            self._require_tokenizer("a stop string")
        ids, media = self._read(prompt)
        return [Request(tuple(ids), params, sample, media) for sample in range(params.n)]

    def _read(self, prompt: PromptLike) -> tuple[Sequence[int], tuple[MediaItem, ...]]:
        """The prompt's ids, and its media in their places."""
        ids = self._token_ids(prompt)
        if isinstance(prompt, str):
            return ids, ()
        given = dataclasses.replace(prompt, token_ids=ids) if isinstance(prompt, Prompt) else Prompt(ids)
        return ids, self.processor.items(given)

    def _token_ids(self, prompt: PromptLike) -> Sequence[int]:
        if isinstance(prompt, str):
            ids: Sequence[int] = self._require_tokenizer("a text prompt").encode(prompt)
            if not ids:
                raise InputError("the prompt is empty: give at least one token")
            return ids
        ids = _plain(prompt.token_ids if isinstance(prompt, Prompt) else prompt)
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes | bytearray):  # bytes are ints, but never meant as ids
            raise InputError(f"the prompt is {reprlib.repr(ids)}: expected a text, a sequence of token ids or a Prompt")
        return ids

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(f"{what} needs a tokenizer, and this model came without a tokenizer.json: give token ids")
        return self.tokenizer


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """A list of prompts: a string, a Prompt or a sequence of ids is one."""
    if isinstance(prompts, str | Prompt):
        return [prompts]
    given = _plain(prompts)
    if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray | Mapping):
        raise InputError(f"the prompt is {reprlib.repr(prompts)}: expected a text, token ids, a Prompt, or a list of them")
    items = list(given)
    if items and all(isinstance(item, int | np.integer) for item in items):
        return [items]  # pyright: ignore[reportReturnType]
    return items  # pyright: ignore[reportReturnType]


def _plain(value: Any) -> Any:
    """An array, of whichever library, as the list or number that it holds; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
