"""Requests that a declared tool answers: a call with JSON arguments, and what to say of its result."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from inkling_jax.evals.nano.example import Example, Given, Source, conversation, same_text
from inkling_jax.evals.nano.lookup import invented
from inkling_jax.evals.nano.world import PEOPLE, TOWNS

TEXTS = ("come home", "dinner is ready", "the boat is late", "good morning", "bring bread", "we meet at noon", "all is well")
COLOURS = ("red", "green", "blue", "yellow", "white", "purple", "orange")
SKIES = ("rain", "sun", "snow", "fog", "wind")
# Drawn once: in a call a name follows a quotation mark, which the tokenizer cuts otherwise than after a space.
NAMES = tuple(invented(random.Random(n)).capitalize() for n in range(100))
NO_TOOL = "I have no tool for that."


class Kind(NamedTuple):
    """A tool under one of several names; so are its parameters, each with a JSON type."""

    names: tuple[str, ...]
    description: str
    parameters: tuple[tuple[tuple[str, ...], str], ...]
    requests: tuple[str, ...]  # with the parameters as {0}, {1}
    result: str  # what is said of it, with the result's fields by name


KINDS = {
    "weather": Kind(
        ("weather", "get_weather"),
        "The weather of a place.",
        ((("city", "place"), "string"),),
        ("What is the weather in {0}?", "How is the weather in {0}?", "Tell me the weather in {0}.", "What weather has {0}?"),
        "In {0} there is {sky}, at {degrees} degrees.",
    ),
    "timer": Kind(
        ("set_timer", "timer"),
        "Rings after some minutes.",
        ((("minutes", "wait"), "integer"),),
        ("Set a timer for {0} minutes.", "Wake me in {0} minutes.", "Ring in {0} minutes.", "Start a timer of {0} minutes."),
        "The timer rings in {0} minutes.",
    ),
    "letter": Kind(
        ("send_letter", "write_to"),
        "Sends a text to a person.",
        ((("person", "to"), "string"), (("text", "words"), "string")),
        ("Write to {0}: {1}", "Send {0} a letter: {1}", "Tell {0} this: {1}", "A letter to {0}: {1}"),
        "The letter to {0} is sent.",
    ),
    "shop": Kind(
        ("buy", "order"),
        "Buys things.",
        ((("item", "thing"), "string"), (("count", "number"), "integer")),
        ("Buy {1} {0}.", "Please order {1} {0}.", "I need {1} {0}.", "Get me {1} {0}."),
        "You have {1} {0} for {price} coins.",
    ),
    "lamp": Kind(
        ("set_lamp", "lamp"),
        "Changes the colour of the lamp.",
        ((("colour", "light"), "string"),),
        ("Make the lamp {0}.", "I want the lamp to be {0}.", "Turn the lamp {0}.", "Let the lamp be {0}."),
        "The lamp is {0}.",
    ),
}


class Wish(NamedTuple):
    """What is asked for: a tool, the values of its parameters, and how it is said."""

    kind: str
    values: tuple[str | int, ...]
    request: str


class Declared(NamedTuple):
    """A tool under the names that it has in one example."""

    kind: str
    name: str
    parameters: tuple[str, ...]


def make_tools(source: Source) -> Example:
    """A call; in a third of the examples a result after it and what is to be said; sometimes no tool that fits."""
    rng = source.random
    wish = source.question(_draw)
    others = rng.sample([kind for kind in KINDS if kind != wish.kind], rng.randint(0, 2))
    fits = rng.random() < 0.9
    kinds = [*others, wish.kind] if fits or not others else others
    rng.shuffle(kinds)
    declared = [_declare(kind, rng) for kind in kinds]
    tools = [_schema(tool) for tool in declared]
    asked = wish.request.format(*wish.values)
    chosen = next((tool for tool in declared if tool.kind == wish.kind), None)
    if chosen is None:
        return Example("tools", conversation(asked, NO_TOOL), tools, source.effort(), answer=NO_TOOL)
    arguments = dict(zip(chosen.parameters, wish.values, strict=True))
    function = {"name": chosen.name, "arguments": arguments}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
    messages = conversation(asked, call)
    if rng.random() < 0.65:
        return Example("tools", messages, tools, source.effort(), answer=function)
    result = _result(wish.kind, rng)
    said = KINDS[wish.kind].result.format(*wish.values, **result)
    messages.append({"role": "tool", "tool_call_id": "call_0", "content": json.dumps(result, separators=(",", ":"))})
    messages.append({"role": "assistant", "content": said})
    return Example("tools", messages, tools, source.effort(), answer=said)


def grade_tools(example: Example, given: Given) -> bool:
    """Whether there is one call, the right one; or, where a sentence is the answer, no call and that sentence."""
    if isinstance(example.answer, str):
        return not given.tool_calls and same_text(example.answer, given.content)
    calls = [{"name": call.name, "arguments": call.arguments} for call in given.tool_calls]
    return calls == [example.answer]


def is_valid_call(example: Example, given: Given) -> bool:
    """Whether an answer that should be a call is one that can be made: a declared name, its parameters, of their types."""
    declared = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in example.tools or ()}
    return bool(given.tool_calls) and all(
        call.name in declared and _fits(call.arguments, declared[call.name]) for call in given.tool_calls
    )


def _fits(arguments: dict[str, Any], properties: dict[str, Any]) -> bool:
    types = {"string": str, "integer": int}
    return arguments.keys() == properties.keys() and all(
        type(value) is types[properties[name]["type"]] for name, value in arguments.items()
    )


def _draw(rng: random.Random) -> Wish:
    kind = rng.choice(list(KINDS))
    name = rng.choice(NAMES) if rng.random() < 0.5 else None
    values: dict[str, tuple[str | int, ...]] = {
        "weather": (name or rng.choice(list(TOWNS)),),
        "timer": (rng.randint(2, 99),),
        "letter": (name or rng.choice(list(PEOPLE)), rng.choice(TEXTS)),
        "shop": (rng.choice([person["food"] for person in PEOPLE.values()]), rng.randint(2, 99)),
        "lamp": (rng.choice(COLOURS),),
    }
    return Wish(kind, values[kind], rng.choice(KINDS[kind].requests))


def _declare(kind: str, rng: random.Random) -> Declared:
    return Declared(kind, rng.choice(KINDS[kind].names), tuple(rng.choice(names) for names, _ in KINDS[kind].parameters))


def _schema(tool: Declared) -> dict[str, Any]:
    kind = KINDS[tool.kind]
    properties = {name: {"type": of} for name, (_, of) in zip(tool.parameters, kind.parameters, strict=True)}
    parameters = {"type": "object", "properties": properties, "required": list(tool.parameters)}
    return {"type": "function", "function": {"name": tool.name, "description": kind.description, "parameters": parameters}}


def _result(kind: str, rng: random.Random) -> dict[str, Any]:
    if kind == "weather":
        return {"sky": rng.choice(SKIES), "degrees": rng.randint(1, 30)}
    return {"price": rng.randint(2, 99)} if kind == "shop" else {"done": True}
