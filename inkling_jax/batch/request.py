"""One line of a batch's input: what it asks for, checked as far as that goes without reading a medium or knowing a token."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from inkling_jax.batch import openai
from inkling_jax.batch.lines import MAX_LINE
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.errors import InputError
from inkling_jax.inputs.messages import check_messages, check_tools, parse_effort

SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))
WHEN = ("priority", "deadline")
FIELDS = ("id", "prompt", "messages", "tools", "effort", *WHEN, *SAMPLING)
OF_A_CHAT = ("tools", "effort")


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What a line that does not say is sampled with; lines without a seed get one from `seed` and their id."""

    params: SamplingParams
    effort: str | None
    seed: int
    model: str = ""  # what tells the model from others

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same wherever lines lead to the same results."""
        usual = SamplingParams()
        given = {name: value for name in SAMPLING if (value := getattr(self.params, name)) != getattr(usual, name)}
        return repr((given, self.effort, self.seed, self.model))


@dataclasses.dataclass(frozen=True)
class Head:
    """Which line a result is of."""

    number: int
    id: str | int
    openai: bool  # in which form the result is
    digest: str  # of the id, the line and the defaults, 16 hexadecimal digits

    @property
    def key(self) -> str:
        """See `id_key`."""
        return id_key(self.id)


@dataclasses.dataclass(frozen=True)
class Job:
    """A line that can be run: a prompt, or the messages of a chat."""

    head: Head
    params: SamplingParams
    prompt: str | tuple[int, ...] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    effort: str | float | None = None
    media: bool = False  # whether the messages hold any
    priority: int = 0
    deadline: float | None = None  # seconds, once it has begun


@dataclasses.dataclass(frozen=True)
class Refused:
    """A line that cannot be run, and why."""

    head: Head
    message: str


def read_line(number: int, content: bytes, defaults: Defaults) -> Job | Refused:
    """What line `number` asks for. Never raises for what the line holds."""
    line: Any = {}
    wrong: str | None = None
    try:
        line = _object(content)
    except (ValueError, RecursionError) as error:  # InputError is none of them
        wrong = f"not JSON: {error}"
    except InputError as error:
        wrong = str(error)
    is_openai = "custom_id" in line or "body" in line
    name = "custom_id" if is_openai else "id"
    given = line.get(name)
    if given is not None and (isinstance(given, bool) or not isinstance(given, str | int)):
        wrong, given = f"{name} must be a string or an integer, not {type(given).__name__}", None
    if given is None:
        given = str(number) if is_openai else number
    head = Head(number, given, is_openai, digest_of(id_key(given), defaults.fingerprint, content))
    if wrong is None:
        try:
            return _job(head, openai.fields(line) if is_openai else _plain_fields(line), defaults)
        except InputError as error:
            wrong = plain(str(error))
    return Refused(head, wrong)


def plain(message: str) -> str:
    """What is wrong with a setting, as a line spells its name."""
    return message.replace("SamplingParams.", "").replace("Request.", "")


def id_key(given: str | int) -> str:
    """What tells an id from others: 1 and "1" are two."""
    return json.dumps(given)


def digest_of(*parts: str | bytes) -> str:
    """16 hexadecimal digits that tell `parts` from others."""
    sizes = repr([len(part) for part in parts]).encode()
    data = b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)
    return hashlib.blake2b(sizes + data, digest_size=8).hexdigest()


def _object(content: bytes) -> dict[str, Any]:
    if len(content) >= MAX_LINE:
        raise InputError(f"the line is longer than {MAX_LINE >> 20} MiB: give large media as files")
    line = json.loads(content.decode(), parse_constant=_no_number)
    if not isinstance(line, dict):
        raise InputError(f"a line is a JSON object, not {type(line).__name__}")
    return line


def _no_number(spelling: str) -> Any:
    raise ValueError(f"{spelling} is no JSON number")


def _plain_fields(line: dict[str, Any]) -> dict[str, Any]:
    """The fields of our own form."""
    for name in line:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(FIELDS)}"
            raise InputError(f"unknown field {name[:100]!r}: {hint}")
    if line.get("n") not in (None, 1):
        raise InputError("n: a line has one answer; give a line for each (OpenAI's form may ask for several)")
    return {name: value for name, value in line.items() if name != "id" and value is not None}


def _job(head: Head, fields: dict[str, Any], defaults: Defaults) -> Job:
    if ("prompt" in fields) == ("messages" in fields):
        raise InputError(f"a line has either prompt or messages, this one has {'both' if 'prompt' in fields else 'neither'}")
    given = {name: fields[name] for name in SAMPLING if name in fields}
    if isinstance(given.get("logit_bias"), dict):
        given["logit_bias"] = {_token_id(name): value for name, value in given["logit_bias"].items()}
    # the seed is of the id, so that neither the order of lines nor where a run was interrupted changes a result
    given.setdefault("seed", int(digest_of(str(defaults.seed), head.key), 16) >> 1)
    params = dataclasses.replace(defaults.params, **given)
    when = {name: fields[name] for name in WHEN if name in fields}
    Request((), params, **when)  # refuses what they must not be
    if "prompt" in fields:
        for name in OF_A_CHAT:
            if name in fields:
                raise InputError(f"{name} belongs to a chat: give messages in the place of prompt")
        return Job(head, params, prompt=_prompt(fields["prompt"]), **when)
    shown = check_messages(fields["messages"], lambda *_: (None,))  # media are looked into when their turn comes
    parts = [part for message in shown if isinstance(message["content"], list) for part in message["content"]]
    media = any(part["type"] in ("image", "audio") for part in parts)
    effort = fields.get("effort", defaults.effort)
    parse_effort(effort)
    tools = check_tools(fields.get("tools"))
    return Job(head, params, messages=fields["messages"], tools=tools, effort=effort, media=media, **when)


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        return tuple(prompt)
    raise InputError("prompt must be one text or one list of token ids, and not empty")


def _token_id(name: str) -> int:
    try:
        return int(name)
    except ValueError:
        raise InputError(f"logit_bias must map token ids to numbers, {name!r} is none") from None
