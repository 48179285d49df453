"""Looking a key up among many pairs, and saying words back: what only layers that see further than the window can do."""

from __future__ import annotations

import random

from inkling_jax.evals.nano.example import Example, Given, Source, conversation, same_text

CONSONANTS, VOWELS = "bdfklmnprstv", "aeiou"
FAR_PAIRS = 30  # pairs between the one that is asked for and the question: more than 128 tokens
MAX_PAIRS = 60
MAX_WORDS = 70
# Keys and copied words always follow a space: at the beginning of a text the tokenizer would cut them otherwise.
LISTS = (("Pairs: ", ", "), ("Pairs: ", "; "), ("The list: ", ", "), ("- ", "\n- "))
QUESTIONS = ("What is {key}?", "Find {key}.", "Look up {key}.", "And {key}?", "Tell me {key}.", "The value of {key}?")
SAID = "You said: {text}"
TOLD = ("Noted.", "I have it.")
COPIED = ("Repeat: {text}", "Say this back: {text}", "Copy: {text}", "Please repeat {text}")


def make_lookup(source: Source) -> Example:
    """A key of a list that begins before the window."""
    after = source.random.randint(FAR_PAIRS, MAX_PAIRS - 1)
    return _lookup("lookup", source, source.random.randint(0, MAX_PAIRS - 1 - after), after)


def make_lookup_near(source: Source) -> Example:
    """A key of a list of up to 20 pairs."""
    count = source.random.randint(1, 20)
    before = source.random.randrange(count)
    return _lookup("lookup_near", source, before, count - 1 - before)


def make_copy(source: Source) -> Example:
    """Words or digits to say back, in a fifth of the examples more than lie in the window."""

    def draw(rng: random.Random) -> tuple[str, ...]:
        count = rng.randint(MAX_WORDS - 10, MAX_WORDS) if rng.random() < 0.2 else rng.randint(1, 30)
        return tuple(str(rng.randrange(10)) if rng.random() < 0.1 else invented(rng) for _ in range(count))

    text = " ".join(source.question(draw))
    answer = SAID.format(text=text)
    return Example("copy", conversation(source.random.choice(COPIED).format(text=text), answer), None, source.effort(), answer)


def grade_text(example: Example, given: Given) -> bool:
    """Whether the answer is the text, but for spaces, case and the full stop."""
    return same_text(example.answer, given.content)


def invented(rng: random.Random) -> str:
    """A word of two syllables."""
    return "".join(rng.choice(letters) for letters in (CONSONANTS, VOWELS) * 2)


def _lookup(task: str, source: Source, before: int, after: int) -> Example:
    """A list of pairs and one to five questions; the last, which is graded, is about the pair number `before`."""
    rng = source.random
    asked = dict(source.question(_draw_pair) for _ in range(min(rng.randint(1, 5), before + after + 1)))
    key = next(reversed(asked))
    others: dict[str, str] = {name: asked[name] for name in asked if name != key}
    while len(others) < before + after:
        others |= {name: value for name, value in [_draw_pair(rng)] if name not in asked}
    pairs = list(others.items())
    rng.shuffle(pairs)
    pairs.insert(before, (key, asked[key]))
    head, joint = rng.choice(LISTS)
    listed = head + joint.join(f"{name}={value}" for name, value in pairs)
    questions = [rng.choice(QUESTIONS).format(key=name) for name in asked]
    first = [f"{listed}\n{questions[0]}"] if rng.random() < 0.5 else [listed, rng.choice(TOLD), questions[0]]
    turns = [turn for question, value in zip(questions, asked.values(), strict=True) for turn in (question, value)]
    return Example(task, conversation(*first, *turns[1:]), effort=source.effort(), answer=asked[key])


def _draw_pair(rng: random.Random) -> tuple[str, str]:
    return invented(rng), str(rng.randrange(10, 100))
