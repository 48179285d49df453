"""Ask the model that comes with the package: a sum, a person of its world, a picture and three notes.

python scripts/demo.py
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from PIL import Image

import inkling_jax
from inkling_jax.command_line import run, start_jax

RATE = 16_000
C, E, G = (1046.5 * 2 ** (steps / 12) for steps in (0, 4, 7))  # Hz
ABOUT = """\
nano, of the package: the Inkling architecture at 6.7 million parameters, in NVFP4. It knows a small invented world,
sums, drawn shapes and notes, and nothing else. Its programs are compiled now, and kept for the next time."""


def beeps(*pitches: float) -> np.ndarray:
    """Tones of 0.3 s, each with a pause after it, and the noise of a microphone, without which the model has heard nothing."""
    seconds, pause = np.arange(int(0.3 * RATE)) / RATE, np.zeros(int(0.1 * RATE))
    edge = np.minimum(1, np.minimum(seconds, seconds[::-1]) / 0.01)  # no click
    wave = np.concatenate([part for pitch in pitches for part in (0.2 * edge * np.sin(2 * np.pi * pitch * seconds), pause)])
    return wave + np.random.default_rng(0).normal(scale=1e-3, size=wave.size)


def questions() -> dict[str, list[Any]]:
    """As they are shown, and as the model gets them."""
    picture, sound = Image.new("RGB", (64, 64), "red"), (beeps(C, E, G), RATE)
    return {
        "What is 12 + 7?": ["What is 12 + 7?"],
        "Where does Mira live?": ["Where does Mira live?"],
        "[a red square] What is in this picture?": [{"type": "image", "image": picture}, "What is in this picture?"],
        "[the notes C, E, G] Which notes are these?": [{"type": "audio", "audio": sound}, "Which notes are these?"],
    }


def main() -> int:
    """Show each answer as it is made."""
    start_jax()
    print(ABOUT, flush=True)
    start = time.monotonic()
    sampling = inkling_jax.SamplingParams(temperature=0, max_tokens=200)
    with inkling_jax.load("nano", slots=1, quiet=True) as llm:
        for shown, content in questions().items():
            print(f"\n> {shown}", flush=True)
            with llm.chat([{"role": "user", "content": content}], sampling=sampling, stream=True) as pieces:
                thinking = False
                for piece in pieces:
                    if bool(piece.reasoning) != thinking and (piece.reasoning or piece.content):
                        thinking = not thinking
                        print("(" if thinking else ")", end="" if thinking else "\n")
                    print(piece.reasoning or piece.content, end="", flush=True)
            print()
    print(f"\n{time.monotonic() - start:.0f} s in all. Go on with: python -m inkling_jax.generate --chat")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
