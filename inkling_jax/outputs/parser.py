"""What a model wrote, told apart as it comes: reasoning, answer and tool calls, by one state machine over blocks (spec 6).

A block is [message_ROLE] [name] [content_KIND] text [end_message]. Any of its control tokens may be missing: a prompt ends with
the opening of the first block, a cut answer ends anywhere, and a model may leave out what it likes.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence

from inkling_jax.inputs.control import CONTROL_FORM, CONTROL_TOKENS
from inkling_jax.inputs.messages import TOOL_NAME
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.outputs.tool_calls import CallDelta, CallReader, MalformedCall, ToolCall, joined

REASONING, CONTENT, CALL = "reasoning", "content", "call"


@dataclasses.dataclass(frozen=True)
class Parsed:
    """An answer's parts. `blocks` are its texts in order, each with what it is, REASONING or CONTENT."""

    blocks: tuple[tuple[str, str], ...]
    tool_calls: tuple[ToolCall, ...]
    malformed_calls: tuple[MalformedCall, ...]

    @property
    def reasoning(self) -> str:
        """All that was thought."""
        return "".join(text for kind, text in self.blocks if kind == REASONING)

    @property
    def content(self) -> str:
        """All that was said."""
        return "".join(text for kind, text in self.blocks if kind == CONTENT)


@dataclasses.dataclass(frozen=True)
class ParsedDelta:
    """A piece of an answer, of one kind; pieces come in the order of the text."""

    reasoning: str = ""
    content: str = ""
    call: CallDelta | None = None


class Blocks:
    """The state machine: takes control tokens and texts in order, however the texts are cut.

    Without an opening that says what it is, text is content, unless a control token that follows shows it to have been the name
    in a block's opening. So what may be such a name is held back.
    """

    def __init__(self, first_call: int = 0):
        """`first_call` is the number in the id of the first tool call."""
        self._first_call = first_call
        self._kind: str | None = None  # of the block that is open; None in an opening
        self._name = ""  # the opening so far
        self._reader: CallReader | None = None
        self._calls = 0
        self._pieces: list[ParsedDelta] = []  # not taken yet
        self._blocks: list[tuple[str, list[str]]] = []
        self._tool_calls: list[ToolCall] = []
        self._malformed: list[MalformedCall] = []

    def control(self, role: str) -> None:
        """Take a control token by its role. Those that neither open nor end anything are passed over."""
        if role.startswith("message_") or role in ("end_message", "content_model_end_sampling"):
            self.end()
        elif role.startswith("content_"):
            name, self._name = self._name, ""
            self.end()
            self._open(_kind_of(role), name)

    def text(self, text: str) -> None:
        """Take plain text."""
        if self._kind is None:
            self._name += text
            if not self._name or TOOL_NAME.fullmatch(self._name):
                return
            text, self._name = self._name, ""
            self._open(CONTENT)
        if self._reader is not None:
            self._pieces += [ParsedDelta(call=delta) for delta in self._reader.push(text)]
        elif text and self._kind is not None:
            self._blocks[-1][1].append(text)
            self._pieces.append(ParsedDelta(text) if self._kind == REASONING else ParsedDelta(content=text))

    def end(self, complete: bool = True) -> None:
        """End the open block; `complete` is False where it is the end of the answer that ends it."""
        if self._name:
            text, self._name = self._name, ""
            self._open(CONTENT)
            self.text(text)
        if self._reader is not None:
            delta = self._reader.close(complete)
            self._pieces.append(ParsedDelta(call=delta))
            if isinstance(delta.finished, ToolCall):
                self._tool_calls.append(delta.finished)
            elif delta.finished is not None:
                self._malformed.append(delta.finished)
        self._kind = self._reader = None

    def take(self) -> list[ParsedDelta]:
        """What has become certain since the last time, neighbours of one kind joined."""
        pieces, self._pieces = self._pieces, []
        deltas: list[ParsedDelta] = []
        for _, neighbours in itertools.groupby(
            pieces, key=lambda piece: (piece.call and piece.call.index, bool(piece.reasoning))
        ):
            group = list(neighbours)
            calls = [piece.call for piece in group if piece.call is not None]
            texts = ("".join(getattr(piece, kind) for piece in group) for kind in (REASONING, CONTENT))
            deltas.append(ParsedDelta(*texts, call=joined(calls) if calls else None))
        return deltas

    def forget(self) -> None:
        """Drop all that came so far, but not where in a block it ended."""
        self._pieces, self._tool_calls, self._malformed = [], [], []
        self._blocks = [(self._kind, [])] if self._kind is not None else []

    @property
    def parsed(self) -> Parsed:
        """Everything so far, calls that have ended alone."""
        blocks = tuple((kind, "".join(texts)) for kind, texts in self._blocks if texts)
        return Parsed(blocks, tuple(self._tool_calls), tuple(self._malformed))

    def _open(self, kind: str, name: str = "") -> None:
        self._kind = kind
        if kind == CALL:
            self._reader = CallReader(self._calls, f"call_{self._first_call + self._calls}", name)
            self._calls += 1
        else:
            self._blocks.append((kind, []))


class OutputParser:
    """Parses the ids of one answer as they come, control tokens among them; what spells one in other tokens stays text."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), first_call: int = 0):
        """The answer goes on where `prompt_ids` end, perhaps within a block; `first_call` is as in `Blocks`."""
        self._tokenizer, self._blocks = tokenizer, Blocks(first_call)
        self._roles = {
            i: spelling[2:-2] for spelling, i in tokenizer.control_spellings.items() if CONTROL_FORM.fullmatch(spelling)
        }
        self._roles |= {i: role for role, i in tokenizer.control.items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        openings = (n for n in reversed(range(len(prompt_ids))) if self._roles.get(prompt_ids[n], "").startswith("message_"))
        self.push(prompt_ids[next(openings, len(prompt_ids)) :])
        self._blocks.forget()

    def push(self, ids: Iterable[int], drop: int = 0) -> list[ParsedDelta]:
        """The pieces that `ids` make certain; `drop`: so many bytes at the end of the last id's text do not count.

        Raises InputError for an id out of range.
        """
        ids = list(ids)
        for n, token_id in enumerate(ids, start=1):
            role = self._roles.get(token_id)
            if role is None:
                data = self._tokenizer.token_bytes(token_id)
                self._blocks.text(self._decoder.decode(data[: len(data) - drop] if n == len(ids) else data))
            else:
                self._blocks.text(self._decoder.decode(b"", final=True))
                self._blocks.control(role)
        return self._blocks.take()

    def finish(self) -> list[ParsedDelta]:
        """The rest, no more ids coming: what was held back, and calls that were cut off as malformed."""
        self._blocks.text(self._decoder.decode(b"", final=True))
        self._blocks.end(complete=False)
        return self._blocks.take()

    @property
    def parsed(self) -> Parsed:
        """Everything so far; all of it when finished."""
        return self._blocks.parsed


class SpelledParser:
    """Parses text in which control tokens are spelled out, as a stored transcript has it, in pieces that are cut anywhere.

    Use `OutputParser` where there are ids: text cannot tell a control token from words that spell one.
    """

    def __init__(self):
        self._blocks = Blocks()
        self._held = ""  # perhaps the beginning of a control token

    def push(self, text: str) -> list[ParsedDelta]:
        """The pieces that `text` makes certain."""
        text = self._held + text
        at = text.rfind("<")
        whole = at < 0 or not any(len(text) - at < len(spelling) and spelling.startswith(text[at:]) for spelling in _ROLES)
        text, self._held = (text, "") if whole else (text[:at], text[at:])
        for n, piece in enumerate(_SPELLED.split(text)):
            if n % 2:
                self._blocks.control(_ROLES[piece])
            else:
                self._blocks.text(piece)
        return self._blocks.take()

    def finish(self) -> list[ParsedDelta]:
        """The rest. A control token that was begun in earnest, further than "<|", is dropped."""
        if self._held in ("<", "<|"):
            self._blocks.text(self._held)
        self._held = ""
        self._blocks.end(complete=False)
        return self._blocks.take()

    @property
    def parsed(self) -> Parsed:
        """Everything so far; all of it when finished."""
        return self._blocks.parsed


_ROLES = {spelling: role for role, token in CONTROL_TOKENS.items() for spelling in token.spellings}
_SPELLED = re.compile("(" + "|".join(map(re.escape, _ROLES)) + ")")


def _kind_of(role: str) -> str:
    """What a block is by its content token; what no rule knows is shown as content."""
    if role.startswith("content_invoke_tool"):
        return CALL
    return REASONING if role == "content_thinking" else CONTENT
