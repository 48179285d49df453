"""Tones to name, and digits told by three tones each. Held out are sequences, and of single ones their length and loudness."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from inkling_jax.evals.nano.example import Example, Given, Source, same_text

RATE = 16_000
NOTES = {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11, "high C": 12}  # semitones above C6
LOWEST = 1046.5  # Hz, C6: where neighbours are more than a band of the model's hearing apart
CODE = "CEG"  # a digit is three of these: its digits in base three
SECONDS = 2.0  # a clip is no longer
ASK_NOTE = ("Which note is this?", "What note do you hear?", "Name the note.", "Name this tone.", "What tone is this?")
ASK_NOTES = ("Which notes are these?", "What notes do you hear?", "Name the notes.", "Name these tones.", "What tones are these?")
ASK_DIGIT = ("Which digit is this?", "What digit do you hear?", "Name the digit.")
ASK_DIGITS = ("Which digits are these?", "What digits do you hear?", "Name the digits.")


class Clip(NamedTuple):
    """What sounds, and how: milliseconds of a tone and of the pause after it, decibels below full scale of tones and noise."""

    kind: str  # "notes" or "digits"
    symbols: tuple[str, ...]
    tone: int
    pause: int
    level: int
    noise: int


def make_tones(source: Source) -> Example:
    """One to four notes or one to two digits, as a wave."""
    rng = source.random
    clip = source.question(_draw_clip, key=lambda clip: clip if len(clip.symbols) == 1 else clip[:2])
    one, several = (ASK_NOTE, ASK_NOTES) if clip.kind == "notes" else (ASK_DIGIT, ASK_DIGITS)
    many, named = len(clip.symbols) > 1, ", ".join(clip.symbols)
    asked = rng.choice(several if many else one)
    answer = f"The {clip.kind} are {named}." if many else f"The {clip.kind[:-1]} is {named}."
    parts = [{"type": "audio", "audio": (wave(clip, rng), RATE)}, {"type": "text", "text": asked}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    return Example("tones", messages, effort=source.effort(), answer=answer)


def grade_tones(example: Example, given: Given) -> bool:
    """Whether the answer is the sentence: all the symbols in their order."""
    return same_text(example.answer, given.content)


def wave(clip: Clip, rng: random.Random) -> Float32[np.ndarray, " n"]:
    """The sound of a clip at 16 kHz, with a random silence before it, noise, and a little of the second harmonic."""
    notes = [note for symbol in clip.symbols for note in (_tones_of(symbol) if clip.kind == "digits" else (symbol,))]
    harmonic, amplitude = rng.uniform(0, 0.3), 10 ** (-clip.level / 20)
    tone, pause = (milliseconds * RATE // 1000 for milliseconds in (clip.tone, clip.pause))
    time = np.arange(tone) / RATE
    edge = np.minimum(1, np.minimum(time, time[::-1]) / 0.01)  # 10 ms, so that a tone begins and ends without a click
    pieces = [np.zeros(rng.randint(0, 100) * RATE // 1000)]
    for note in notes:
        angle = 2 * np.pi * LOWEST * 2 ** (NOTES[note] / 12) * time + rng.uniform(0, 2 * np.pi)
        pieces += [edge * (np.sin(angle) + harmonic * np.sin(2 * angle)), np.zeros(pause)]
    sound = amplitude / (1 + harmonic) * np.concatenate(pieces)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, 10 ** (-clip.noise / 20), len(sound))
    return (sound + noise).astype(np.float32)


def _draw_clip(rng: random.Random) -> Clip:
    """Tones of 120 to 400 ms and pauses of 100 to 160, in all no longer than a clip may be."""
    digits = rng.random() < 0.5
    known = [str(digit) for digit in range(10)] if digits else list(NOTES)
    symbols = tuple(rng.choice(known) for _ in range(rng.randint(1, 2 if digits else 4)))
    tones = 3 * len(symbols) if digits else len(symbols)
    pause = rng.randint(100, 160)
    longest = min(400, int((SECONDS - 0.1) * 1000 / tones) - pause)
    level = rng.randint(3, 26)
    return Clip("digits" if digits else "notes", symbols, rng.randint(120, longest), pause, level, level + rng.randint(25, 40))


def _tones_of(digit: str) -> tuple[str, ...]:
    value = int(digit)
    return tuple(CODE[value // 3**place % 3] for place in (2, 1, 0))
