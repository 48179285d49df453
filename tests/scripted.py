"""An engine that says what a test tells it to, so that everything between messages and answers is real but the model."""

from __future__ import annotations

import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from byte_tokenizer import write_byte_tokenizer
from checkpoint_files import micro_config
from text_checkpoint import USABLE

from inkling_jax.engine.output import Output
from inkling_jax.engine.request import Request
from inkling_jax.inputs import chat
from inkling_jax.inputs.processor import Processor
from inkling_jax.inputs.segments import Control, Segment, Text, encode_segments
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.llm import LLM

THINK, SAY, CALL, END = "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>", "<|end_message|>"
MODEL, OVER = "<|message_model|>", "<|content_model_end_sampling|>"
Step = tuple[int, ...] | str | BaseException  # tokens of one step; a finish reason; what is raised in the place of a step


class ScriptedEngine:
    """Answers the n-th request with the n-th script, an Output a step, and keeps the requests that came."""

    def __init__(self, *scripts: Iterable[Step]):
        self.scripts = [list(script) for script in scripts]
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.closed = False
        self.replicas, self.prefix_statistics = 1, None
        self._running: dict[int, list[Step]] = {}

    def add(self, request: Request) -> int:
        self.closed = False  # by an interrupt in the midst of a step, which does no harm here
        self.requests.append(request)
        number = len(self.requests) - 1
        self._running[number] = self.scripts[number]
        return number

    def cancel(self, number: int) -> None:
        if self._running.pop(number, None) is not None:
            self.cancelled.append(number)

    def close(self) -> None:
        self.closed = True

    def step(self) -> list[Output]:
        outputs = []
        for number, script in list(self._running.items()):
            item = script.pop(0)
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, str):
                error = "the logits are not finite" if item == "error" else None
                outputs.append(Output(number, (), (), item, error))
                del self._running[number]
            else:
                outputs.append(Output(number, item, ()))
        return outputs


def llm_over(engine: Any, tokenizer: Tokenizer | None) -> LLM:
    """An LLM of the built-in chat format that takes media, over an engine that stands in for the real one."""
    config = micro_config()
    processor = Processor(config, tokenizer, frozenset({"vision", "audio"}))
    parts = {"tokenizer": tokenizer, "processor": processor, "render_chat": chat.render, "engine": engine}
    loaded: Any = types.SimpleNamespace(config=config, summary="scripted", open_drafts=None, **parts)
    return LLM(loaded)


def scripted_llm(tokenizer: Tokenizer | None, *scripts: Iterable[Step]) -> LLM:
    """The same over a ScriptedEngine, which is its `engine`."""
    return llm_over(ScriptedEngine(*scripts), tokenizer)


def demo_tokenizer(directory: Path) -> Tokenizer:
    """The demo tokenizer, written into a directory first."""
    write_byte_tokenizer(directory, USABLE)
    return Tokenizer.from_directory(directory, None)


def ids_of(tokenizer: Tokenizer, *pieces: str) -> tuple[int, ...]:
    """Ids of control tokens, which begin with "<|", and of texts, one after the other."""
    segments: list[Segment] = [Control(piece) if piece.startswith("<|") else Text(piece) for piece in pieces]
    return tuple(encode_segments(segments, tokenizer))
