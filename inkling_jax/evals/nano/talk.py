"""What people say first: greetings, who are you, what can you do; and questions about what it cannot know, which it says."""

from __future__ import annotations

import random

from inkling_jax.evals.nano.example import Example, Given, Source, conversation, same_text
from inkling_jax.evals.nano.lookup import invented
from inkling_jax.evals.nano.world import PEOPLE, TOWNS

WHO = "I am Nano, a very small Inkling."
ABLE = "I know the island of Orrin, do sums, find and copy words, call tools, and name drawn shapes and tones."
SMALL = "I do not know that. I am very small: I know the island of Orrin, sums, lists, tools, shapes and tones."
ISLAND = "Orrin is a small island with five towns: Dorn, Velm, Sorel, Hask and Ruun."

SAID: dict[str, tuple[str, ...]] = {
    f"Hello! {WHO} What can I do for you?": (
        *("hello", "hi", "hey", "hello there", "hi there", "good morning", "good evening", "good day", "greetings"),
        *("hello Nano", "hi Nano", "hey there", "hello again", "good afternoon", "hello, Nano", "howdy"),
    ),
    WHO: (
        *("who are you?", "what are you?", "what is your name?", "who is this?", "tell me who you are.", "who am I talking to?"),
        *("your name?", "are you a robot?", "are you a person?", "are you Inkling?", "what should I call you?"),
        *("introduce yourself.", "what model are you?", "which model is this?", "do you have a name?", "who're you?"),
    ),
    ABLE: (
        *("what can you do?", "what do you know?", "help", "what are you good at?", "what can I ask you?", "can you help me?"),
        *("how can you help me?", "what should I ask?", "what are your skills?", "tell me what you can do.", "help me."),
        *("what can you do for me?", "what kind of things can you do?", "what do you do?", "show me what you can do."),
    ),
    "I am well, thank you.": (
        *("how are you?", "how do you do?", "how is it going?", "are you well?", "how are you today?", "how do you feel?"),
    ),
    "You are welcome.": (
        "thanks",
        "thank you",
        "thank you very much",
        "thanks a lot",
        "many thanks",
        "great, thanks",
        "thank you!",
    ),
    "Goodbye!": ("bye", "goodbye", "see you", "good night", "bye bye", "see you later", "farewell", "until tomorrow"),
    "I was trained by the scripts of inkling_jax.": (
        *("who made you?", "who trained you?", "where do you come from?", "who built you?", "how were you made?"),
        *("who created you?", "where were you made?", "how were you trained?"),
    ),
    ISLAND: (
        *("what is Orrin?", "tell me about Orrin.", "where is Orrin?", "which towns do you know?", "what towns are there?"),
        *("tell me about the island.", "which towns are on the island?", "what do you know about Orrin?", "describe Orrin."),
    ),
}
UNKNOWN: tuple[str, ...] = (
    "what is the capital of {place}?",
    "who is the president of {place}?",
    "how many people live in {place}?",
    "where is {place}?",
    "who is the king of {place}?",
    "what language do they speak in {place}?",
    "what is the weather in {place}?",
    "who won the war in {place}?",
    "how do I get to {place}?",
    "tell me about {place}.",
    "who wrote {thing}?",
    "what is {thing}?",
    "tell me about {thing}.",
    "write a poem about {thing}.",
    "explain {thing}.",
    "how does {thing} work?",
    "write a story about {thing}.",
    "who invented {thing}?",
    "what is the price of {thing}?",
    "how do I make {thing}?",
    "where does {person} live?",
    "who is {person}?",
    "what does {person} do?",
    "do you know {person}?",
    "tell me about {person}.",
    "what animal does {person} have?",
    "translate {thing} to {tongue}.",
    "how do you say {thing} in {tongue}?",
    "do you speak {tongue}?",
    "tell me a joke about {thing}.",
)
NAMED = {
    "place": (
        "France Japan Germany Italy Spain China India Brazil Canada Mexico Egypt Kenya Norway Sweden Poland Greece Turkey "
        "Paris London Berlin Rome Madrid Tokyo Moscow Sydney Vienna Chicago Boston Texas Africa Europe America England"
    ).split(),
    "thing": [
        *(
            "music",
            "physics",
            "water",
            "gravity",
            "a car",
            "the moon",
            "the sun",
            "love",
            "history",
            "football",
            "chess",
            "light",
        ),
        *("python", "rust", "coffee", "tea", "pizza", "rain", "snow", "Hamlet", "Faust", "sound", "time", "money", "a computer"),
        *("the internet", "a bicycle", "bread", "poetry", "art", "science", "a neural network", "a language model", "JAX"),
    ],
    "person": (
        "Alice Peter John Maria Anna Paul Susan Thomas Emma Lucas Sophie David Sarah Michael Laura James Einstein Newton Mozart "
        "Napoleon Shakespeare Darwin Plato Zed Otto Rita Vera Walter Yara Boris Clara"
    ).split(),
    "tongue": "French German Spanish Italian Latin Greek Chinese Japanese Russian Dutch".split(),
}
FIXED = (  # unknown as they are
    *("what time is it?", "what day is it?", "tell me a joke.", "write a poem.", "what is the meaning of life?", "sing a song."),
    *("how old are you?", "what is the news?", "what is the weather today?", "tell me a story.", "write some code."),
    *("what year is it?", "is there a god?", "what is love?", "can you write code?", "play a game with me."),
)
STARTS = ("", "", "", "so, ", "please, ", "hey, ", "ok, ", "Nano, ", "now, ")
ALWAYS = ("hello", "hi", "hey", "who are you?", "what are you?", "what can you do?", "how are you?", "thanks", "bye", "help")


def make_talk(source: Source) -> Example:
    """A greeting or question of the kinds above; a greeting or the like may come before it."""
    turns = list(_known(source)) if source.random.random() < 0.2 else []
    turns += _known(source) if source.random.random() < 0.6 else _unknown(source)
    return Example("talk", conversation(*turns), effort=source.effort(), answer=turns[-1])


def grade_talk(example: Example, given: Given) -> bool:
    """Whether the answer is the sentence, but for case and the full stop."""
    return same_text(example.answer, given.content)


def _known(source: Source) -> tuple[str, str]:
    """What is said and its answer. Held out are ways of writing: how it starts, capital letters, the mark at its end."""

    def draw(rng: random.Random) -> tuple[str, str]:
        answer = rng.choice(list(SAID))
        said = rng.choice(STARTS) + rng.choice(SAID[answer])
        mark = said[-1] if said[-1] in "?.!" else ""
        said = said.removesuffix(mark) + rng.choice((mark, mark, "", "!", mark * 2))
        return (said[0].upper() + said[1:] if rng.random() < 0.6 else said), answer

    return source.question(draw, key=lambda drawn: None if drawn[0].lower() in ALWAYS else drawn[0])


def _unknown(source: Source) -> tuple[str, str]:
    """A question that the model has no answer to, and that it says so. Held out are questions."""

    def draw(rng: random.Random) -> str:
        if rng.random() < 0.1:
            return rng.choice(FIXED)
        names = {kind: rng.choice(known) for kind, known in NAMED.items()}
        names |= {kind: _invented_name(rng) for kind in ("place", "person") if rng.random() < 0.4}
        return rng.choice(UNKNOWN).format(**names)

    asked = source.question(draw, key=lambda asked: None if asked in FIXED else asked)
    return (asked[0].upper() + asked[1:] if source.random.random() < 0.7 else asked), SMALL


def _invented_name(rng: random.Random) -> str:
    """A name that nobody and no town of the island has."""
    while (name := invented(rng).capitalize()) in PEOPLE or name in TOWNS:
        pass
    return name
