"""Short dialogues about a small invented island: who lives where, what they do, what its towns are known for.

Every fact is trained in most of its phrasings, and held out in the others; so are statements to confirm or deny.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from inkling_jax.evals.nano.example import Example, Given, Source, conversation, same_text


def _table(columns: str, rows: str) -> dict[str, dict[str, str]]:
    """Rows by their first word, each a value by column."""
    words = (row.split() for row in rows.strip().splitlines())
    return {name: dict(zip(columns.split(), values, strict=True)) for name, *values in words}


PEOPLE = _table(
    "she town work animal food",
    """
    Mira she Dorn baker cat plums
    Tolo he Velm smith dog bread
    Anka she Sorel doctor goat honey
    Bram he Dorn sailor parrot fish
    Cela she Hask teacher raven pears
    Dario he Ruun farmer cow cheese
    Elva she Velm painter fox grapes
    Finn he Ruun miller donkey soup
    Gita she Hask weaver sheep nuts
    Hugo he Sorel gardener rabbit peas
    Ilse she Dorn fisher seal crabs
    Jory he Hask hunter wolf stew
    Kaya she Ruun singer finch cake
    Lenn he Velm guard horse eggs
    Nora she Sorel potter hen figs
    Oskar he Dorn cook pig beans
    """,
)
TOWNS = _table(
    "river goods mayor side",
    """
    Dorn Isk boats Ilse south
    Velm Aro swords Elva north
    Sorel Tamm pots Anka west
    Hask Quill cloth Cela east
    Ruun Brae flour Dario middle
    """,
)
for _name, _town in TOWNS.items():
    _people = [person for person, facts in PEOPLE.items() if facts["town"] == _name]
    _town["people"] = f"{', '.join(_people[:-1])} and {_people[-1]}"

# For each relation: the answer, then ways to ask.
PERSON_ASKED: dict[str, tuple[str, ...]] = {
    "town": (
        "{name} lives in {value}.",
        "Where does {name} live?",
        "In which town does {name} live?",
        "Where is {name} from?",
        "What is the home town of {name}?",
        "Tell me where {name} lives.",
        "Do you know where {name} lives?",
        "Which town is the home of {name}?",
    ),
    "work": (
        "{name} is a {value}.",
        "What does {name} do?",
        "What is {name}'s work?",
        "What is the job of {name}?",
        "What work does {name} do?",
        "Tell me what {name} does for a living.",
        "What job does {name} have?",
        "Do you know {name}'s job?",
    ),
    "animal": (
        "{name} has a {value}.",
        "What animal does {name} have?",
        "Which animal does {name} keep?",
        "Does {name} have an animal?",
        "What is {name}'s animal?",
        "Which pet does {name} have?",
        "What kind of animal lives with {name}?",
        "Tell me about {name}'s animal.",
    ),
    "food": (
        "{name} likes {value} best.",
        "What does {name} like to eat?",
        "What is {name}'s favourite food?",
        "Which food does {name} like best?",
        "What does {name} eat most gladly?",
        "What food would please {name}?",
        "Tell me what {name} likes to eat.",
        "What should I cook for {name}?",
    ),
}
TOWN_ASKED: dict[str, tuple[str, ...]] = {
    "river": (
        "{name} lies on the river {value}.",
        "Which river runs through {name}?",
        "On which river does {name} lie?",
        "What is the river of {name} called?",
        "What river is near {name}?",
        "Name the river of {name}.",
        "Which river is in {name}?",
    ),
    "goods": (
        "{name} is known for its {value}.",
        "What is {name} known for?",
        "What do they make in {name}?",
        "What is made in {name}?",
        "What does {name} sell?",
        "What goods come from {name}?",
        "Tell me what {name} makes.",
    ),
    "mayor": (
        "The mayor of {name} is {value}.",
        "Who is the mayor of {name}?",
        "Who leads {name}?",
        "Who rules {name}?",
        "Who is in charge of {name}?",
        "What is the name of the mayor of {name}?",
        "Tell me who leads {name}.",
    ),
    "people": (
        "{value} live in {name}.",
        "Who lives in {name}?",
        "Who is from {name}?",
        "Which people live in {name}?",
        "Who are the people of {name}?",
        "Name the people of {name}.",
        "Tell me who lives in {name}.",
    ),
    "side": (
        "{name} lies in the {value} of the island.",
        "Where is {name}?",
        "Where does {name} lie?",
        "In which part of the island is {name}?",
        "Which side of the island is {name} on?",
        "Where can I find {name}?",
        "Where on the island is {name}?",
    ),
}
STATED = {  # the relation as a question of yes or no
    "town": ("Does {name} live in {value}?", "Is {value} the home of {name}?", "Is it true that {name} lives in {value}?"),
    "work": ("Is {name} a {value}?", "Does {name} work as a {value}?", "Is it true that {name} is a {value}?"),
    "animal": ("Does {name} have a {value}?", "Is {name}'s animal a {value}?", "Is it true that {name} has a {value}?"),
    "food": (
        "Does {name} like {value} best?",
        "Are {value} what {name} likes best?",
        "Is it true that {name} likes {value} best?",
    ),
}
FOLLOWING = {  # after an answer about the person
    "town": ("And where does {she} live?", "Where does {she} live?", "In which town?"),
    "work": ("And what does {she} do?", "What is {her} work?", "And {her} job?"),
    "animal": ("And what animal does {she} have?", "Does {she} have an animal?", "And {her} animal?"),
    "food": ("And what does {she} like to eat?", "What does {she} like to eat?", "And {her} favourite food?"),
}


class Asked(NamedTuple):
    """A question of one turn, as it is asked and answered."""

    text: str
    answer: str
    person: str = ""  # whom it is about, for a question to follow


def make_world(source: Source) -> Example:
    """One to four questions, some of which follow from the one before; the last is graded."""
    turns: list[str] = []
    before: Asked | None = None
    for _ in range(source.random.choice((1, 1, 2, 2, 3, 4))):
        follows = before and before.person and source.random.random() < 0.5
        before = _follow(before.person, source.random) if before and follows else _ask(source)
        turns += [_written(before.text, source.random), before.answer]
    return Example("world", conversation(*turns), effort=source.effort(), answer=turns[-1])


def grade_world(example: Example, given: Given) -> bool:
    """Whether the answer is the sentence, but for case and the full stop."""
    return same_text(example.answer, given.content)


def _ask(source: Source) -> Asked:
    kind = source.random.choice(("person", "person", "town", "stated"))
    if kind == "stated":
        return _statement(source)
    people, asked = (PEOPLE, PERSON_ASKED) if kind == "person" else (TOWNS, TOWN_ASKED)

    def draw(rng: random.Random) -> tuple[str, str, str]:
        relation = rng.choice(list(asked))
        return rng.choice(list(people)), relation, rng.choice(asked[relation][1:])

    name, relation, phrasing = source.question(draw)
    answer = asked[relation][0].format(name=name, value=people[name][relation])
    return Asked(phrasing.format(name=name), answer, name if kind == "person" else "")


def _statement(source: Source) -> Asked:
    """A statement that is true as often as not; the answer says what is true."""

    def draw(rng: random.Random) -> tuple[str, str, str, str]:
        name, relation = rng.choice(list(PEOPLE)), rng.choice(list(STATED))
        other = rng.choice(list(PEOPLE)) if rng.random() < 0.5 else name
        return name, relation, PEOPLE[other][relation], rng.choice(STATED[relation])

    name, relation, value, phrasing = source.question(draw)
    truth = PEOPLE[name][relation]
    answer = ("Yes, " if value == truth else "No, ") + PERSON_ASKED[relation][0]
    return Asked(phrasing.format(name=name, value=value), answer.format(name=name, value=truth), name)


def _follow(name: str, rng: random.Random) -> Asked:
    """A question about the person before, who is named by a pronoun alone.

    It need not be held out by itself: what it follows is, and asks nothing without it.
    """
    relation = rng.choice(list(FOLLOWING))
    she = PEOPLE[name]["she"]
    text = rng.choice(FOLLOWING[relation]).format(she=she, her={"she": "her", "he": "his"}[she])
    return Asked(text, PERSON_ASKED[relation][0].format(name=name, value=PEOPLE[name][relation]), name)


def _written(text: str, rng: random.Random) -> str:
    """A question as people write it: sometimes without capital letters, or without the mark at its end."""
    text = text[0].lower() + text[1:] if rng.random() < 0.15 else text.lower() if rng.random() < 0.1 else text
    return text[:-1] if rng.random() < 0.15 else text
