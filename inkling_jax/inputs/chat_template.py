"""A checkpoint's own Jinja chat template, in a sandbox, rendered so that only its own words can become control tokens."""

from __future__ import annotations

import itertools
import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from inkling_jax.errors import CheckpointError, InputError
from inkling_jax.inputs import chat
from inkling_jax.inputs.messages import EFFORT_NAMES, TEXT_PARTS, check_messages, check_tools, parse_effort
from inkling_jax.inputs.segments import Control, Media, Segment, Text
from inkling_jax.inputs.tokenizer import Tokenizer, optional_json_object

_TOKEN_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")
_PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))


class ChatTemplate:
    """A Jinja template with the calling convention of `chat.render`.

    While the template runs, the characters in what the caller supplied that a control token cannot be spelled without are
    stand-ins ("|" becomes a private-use character that occurs nowhere else); the output is cut at control tokens, and only
    then are they put back. So no filter, slice or join of user strings spells a control token. Limits: a template sees the
    stand-in if it looks for "|" in user text, and one that itself writes "<|" and "|>" (or a bare "|") around user text has
    made that control token, or not, by its own words.
    """

    def __init__(self, source: str, name: str, tokenizer: Tokenizer, variables: Mapping[str, str]):
        """`name` is what error messages call the template; `variables` are its `bos_token` and the like."""
        self._name, self._source, self._variables = name, source, dict(variables)
        spellings = sorted(tokenizer.control_spellings, key=len, reverse=True)
        self._control = re.compile("(" + "|".join(map(re.escape, spellings)) + ")") if spellings else None
        slots = {kind: tokenizer.control.get(f"{kind}_slot") for kind in ("image", "audio")}
        self._placeholders = {
            kind: [Control(s) for s in spellings if tokenizer.control_spellings[s] == slot] for kind, slot in slots.items()
        }
        self._guarded = sorted({"|" if "|" in spelling else spelling[0] for spelling in spellings})
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            code = environment.compile(source, name=name, filename=name)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat template {name}, line {error.lineno}: {error.message}") from None
        self._template = jinja2.Template.from_code(environment, code, environment.globals)

    @classmethod
    def from_directory(cls, path: str | Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template in chat_template.jinja, else in tokenizer_config.json; None when the checkpoint has none."""
        file, settings_file = Path(path) / "chat_template.jinja", Path(path) / "tokenizer_config.json"
        settings = optional_json_object(settings_file)
        source, name = settings.get("chat_template"), settings_file.name
        if file.is_file():
            try:
                source, name = file.read_text(encoding="utf-8"), file.name
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"chat template {file} cannot be read: {error}") from None
        if isinstance(source, list):  # several by name; the one for any conversation is called "default"
            source = next((t.get("template") for t in source if isinstance(t, dict) and t.get("name") == "default"), None)
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointError(f"{settings_file}: chat_template must be a string, not {type(source).__name__}")
        named = {key: settings.get(key) for key in _TOKEN_VARIABLES}
        spelled = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
        return cls(source, name, tokenizer, {key: value for key, value in spelled.items() if isinstance(value, str)})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        effort: str | float | None = None,
        add_generation_prompt: bool = True,
    ) -> list[Segment]:
        """Segments of a conversation. Raises InputError for bad messages, and for a template's error with its name and line."""
        checked = check_messages(messages)
        media = _take_media(checked)
        supplied = {"messages": checked, "tools": check_tools(tools) or None}
        stand_ins = self._stand_ins(supplied)
        variables: dict[str, Any] = dict(self._variables, **_translated(supplied, str.maketrans(stand_ins)))
        if effort is not None:  # otherwise the template's own default holds
            number = parse_effort(effort)
            variables["reasoning_effort"] = effort if isinstance(effort, str) and effort in EFFORT_NAMES else number or 0
        try:
            rendered = self._template.render(variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template can raise anything; its author's message is what the user needs
            line = self._line_of(error)
            raise InputError(f"chat template {self._name}, line {line}: {type(error).__name__}: {error}") from None
        pieces = self._control.split(rendered) if self._control else [rendered]
        back = str.maketrans({stand_in: char for char, stand_in in stand_ins.items()})
        segments: list[Segment] = [Control(p) if n % 2 else Text(p.translate(back)) for n, p in enumerate(pieces) if p]
        return self._with_media(segments, media)

    def _with_media(self, segments: list[Segment], media: list[tuple[str, Any]]) -> list[Segment]:
        """`segments` with the items, in order of the messages, where the template wrote the placeholders of their kind."""
        for kind in ("image", "audio"):
            items = [item for medium, item in media if medium == kind]
            places = [n for n, segment in enumerate(segments) if segment in self._placeholders[kind]]
            if len(places) != len(items):
                raise InputError(
                    f"chat template {self._name} wrote {len(places)} {kind} placeholders for the {len(items)} in the messages"
                )
            for n, item in zip(places, items, strict=True):
                segments[n] = Media(kind, item)
        return segments

    def _stand_ins(self, supplied: Any) -> dict[str, str]:
        """Guarded character -> private-use character that neither the caller's strings nor the template hold."""
        taken = set(self._source).union(*_strings(supplied))
        free = (chr(c) for c in _PRIVATE_USE if chr(c) not in taken)
        chosen = dict(zip(self._guarded, itertools.islice(free, len(self._guarded)), strict=False))
        if len(chosen) < len(self._guarded):
            raise InputError("messages hold every private-use character of Unicode: leave some out")
        return chosen

    def _line_of(self, error: Exception) -> int | str:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == self._name and f.lineno]
        return lines[-1] if lines else "unknown"


def chat_renderer(path: str | Path | None, tokenizer: Tokenizer | None) -> Callable[..., list[Segment]]:
    """How a checkpoint renders chats: its own template, else the built-in format. Both are called as `chat.render` is.

    Raises CheckpointError for a template that cannot be read or parsed.
    """
    template = ChatTemplate.from_directory(path, tokenizer) if path is not None and tokenizer is not None else None
    return chat.render if template is None else template.render


def _take_media(messages: Iterable[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The media of checked messages, (kind, item) in order, taken out: a template sees {"type": kind} and nothing more."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [(part["type"], part.pop(part["type"])) for part in parts if part["type"] not in TEXT_PARTS]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _translated(value: Any, table: Mapping[int, str]) -> Any:
    """`value` with every string in it, keys included, translated."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {_translated(key, table): _translated(item, table) for key, item in value.items()}
    return [_translated(v, table) for v in value] if isinstance(value, list | tuple) else value


def _to_json(
    value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False, ensure_ascii: bool = False
) -> str:
    """Plain JSON, non-ASCII kept: Jinja's own filter escapes for HTML, and an escaped stand-in could not be put back."""
    if ensure_ascii:
        raise jinja2.TemplateError("tojson(ensure_ascii=true) is not supported")
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
