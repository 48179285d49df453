"""Batches for the nano model: examples as token ids, packed into lines, with the pictures and sounds of all lines beside them."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import queue
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from inkling_jax.evals.nano.sequence import TrainingSequence, training_sequence
from inkling_jax.evals.nano.tasks import make_example
from inkling_jax.inputs.images import SIDE, ImageConfig
from inkling_jax.inputs.tokenizer import Tokenizer

TRIES = 12  # examples in a row that no line has room for, after which a batch is full
DRAWS = 1 << 14  # example numbers set aside for a batch

Values = Any  # an array of numpy here, of jax where a program has the batch


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What batches are made of."""

    tokenizer: str  # directory of tokenizer.json
    mix: Mapping[str, float]  # task -> weight
    lines: int
    length: int  # tokens of a line
    tiles: int  # most of a batch
    frames: int  # of sound
    seed: int = 0
    split: str = "train"


@dataclasses.dataclass(frozen=True)
class Batch:
    """L lines of S tokens, each several examples end to end. A place is a flat index into [L, S], beyond it where nothing is."""

    ids: Values  # int16 [L, S]
    example: Values  # int16 [L, S]: which of its line's examples a token is of, -1: padding
    offset: Values  # int16 [L, S]: index within the example
    target: Values  # uint8 [L, S]: 2 for what the model is to write, 1 for other text, 0 for padding and media
    tiles: Values  # uint8 [tiles, 40, 40, 3]
    tile_extent: Values  # uint8 [tiles, 2]: rows and columns that are picture, the rest being padding
    tile_place: Values  # int32 [tiles]
    bins: Values  # uint8 [frames, 80]
    bin_place: Values  # int32 [frames]

    @classmethod
    def empty(cls, recipe: Recipe) -> Batch:
        """Padding alone."""
        shape = (recipe.lines, recipe.length)
        nowhere = recipe.lines * recipe.length
        return cls(
            np.zeros(shape, np.int16),
            np.full(shape, -1, np.int16),
            np.zeros(shape, np.int16),
            np.zeros(shape, np.uint8),
            np.zeros((recipe.tiles, SIDE, SIDE, 3), np.uint8),
            np.full((recipe.tiles, 2), SIDE, np.uint8),
            np.arange(nowhere, nowhere + recipe.tiles, dtype=np.int32),  # all different, as the scatter is promised
            np.zeros((recipe.frames, 80), np.uint8),
            np.arange(nowhere, nowhere + recipe.frames, dtype=np.int32),
        )


class Packer:
    """Fills one batch."""

    def __init__(self, recipe: Recipe, slots: tuple[int, int]):
        self.recipe, self.slots = recipe, slots  # ids of the image's and the sound's placeholder
        self.batch = Batch.empty(recipe)
        self.used = np.zeros(recipe.lines, int)
        self.examples = np.zeros(recipe.lines, int)
        self.tiles = self.frames = 0

    def add(self, sequence: TrainingSequence) -> bool:
        """Whether there was room for the example."""
        ids, batch = sequence.token_ids, self.batch
        tiles, frames = sum(map(len, sequence.images)), sum(map(len, sequence.audios))
        fits = np.flatnonzero(self.used + len(ids) <= self.recipe.length)
        if not len(fits) or self.tiles + tiles > self.recipe.tiles or self.frames + frames > self.recipe.frames:
            return False
        line = fits[0]
        start = self.used[line]
        part = slice(start, start + len(ids))
        batch.ids[line, part] = ids
        batch.example[line, part] = self.examples[line]
        batch.offset[line, part] = np.arange(len(ids))
        media = np.isin(ids, self.slots)
        batch.target[line, part] = np.where(sequence.loss_mask, 2, np.where(media, 0, 1))
        first = line * self.recipe.length + start
        self._tiles(sequence.images, first + np.flatnonzero(ids == self.slots[0]))
        self._bins(sequence.audios, first + np.flatnonzero(ids == self.slots[1]))
        self.used[line] += len(ids)
        self.examples[line] += 1
        return True

    def _tiles(self, images: list[np.ndarray], places: np.ndarray) -> None:
        if not images:
            return
        pixels = to_pixels(np.concatenate(images))
        part = slice(self.tiles, self.tiles + len(pixels))
        inside = pixels[..., 0] >= 0
        self.batch.tiles[part] = np.maximum(pixels, 0)
        self.batch.tile_extent[part] = np.stack([inside.any(2).sum(1), inside.any(1).sum(1)], axis=1)
        self.batch.tile_place[part] = places
        self.tiles += len(pixels)

    def _bins(self, audios: list[np.ndarray], places: np.ndarray) -> None:
        if not audios:
            return
        bins = np.concatenate(audios)
        part = slice(self.frames, self.frames + len(bins))
        self.batch.bins[part] = bins
        self.batch.bin_place[part] = places
        self.frames += len(bins)


def last_answers(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Whether a token is of its example's last answer, which is the one that is graded; and a number for its example, [L, S]."""
    lines, length = batch.ids.shape
    number = np.arange(lines)[:, None] * (length + 1) + batch.example + 1  # 0, length + 1, ...: padding
    place = np.broadcast_to(np.arange(length), number.shape)
    read = np.full(lines * (length + 1), -1)
    np.maximum.at(read, number[batch.target != 2], place[batch.target != 2])
    return (batch.target == 2) & (place > read[number]), number


def to_pixels(patches: np.ndarray) -> np.ndarray:
    """Patches [N, 2, 40, 40, 3] of stills as pixels [N, 40, 40, 3] from 0 to 255; padding is -1."""
    config = ImageConfig()
    return np.rint((patches[:, 0] * np.array(config.std, np.float32) + np.array(config.mean, np.float32)) * 255).astype(np.int16)


def make_batch(recipe: Recipe, tokenizer: Tokenizer, number: int) -> Batch:
    """Batch number `number`: the same for the same recipe. No two share an example."""
    rng = np.random.default_rng([recipe.seed, number])
    tasks = sorted(recipe.mix)
    weights = np.array([recipe.mix[task] for task in tasks], float)
    packer = Packer(recipe, (tokenizer.control["image_slot"], tokenizer.control["audio_slot"]))
    drawn = failed = 0
    while failed < TRIES and drawn < DRAWS:
        task = tasks[rng.choice(len(tasks), p=weights / weights.sum())]
        example = make_example(task, recipe.seed, recipe.split, number * DRAWS + drawn)  # pyright: ignore[reportArgumentType]
        drawn += 1
        failed = 0 if packer.add(training_sequence(example, tokenizer)) else failed + 1
    return packer.batch


def batches(recipe: Recipe, first: int, workers: int) -> Iterator[Batch | None]:
    """Batches from number `first` on, for ever: made here in order without workers, else by them, None where none is ready."""
    if not workers:
        tokenizer = Tokenizer.from_directory(recipe.tokenizer, None)
        while True:
            yield make_batch(recipe, tokenizer, first)
            first += 1
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the workers, each of which has a processor to itself
    context = multiprocessing.get_context("spawn")
    made = context.Queue(maxsize=2 * workers)
    for worker in range(workers):
        context.Process(target=_work, args=(recipe, first + worker, workers, made), daemon=True).start()
    yield made.get()  # nothing can begin without one
    while True:
        try:
            yield made.get_nowait()
        except queue.Empty:
            yield None


def _work(recipe: Recipe, number: int, stride: int, made: multiprocessing.Queue) -> None:
    tokenizer = Tokenizer.from_directory(Path(recipe.tokenizer), None)
    while True:
        made.put(make_batch(recipe, tokenizer, number))
        number += stride
