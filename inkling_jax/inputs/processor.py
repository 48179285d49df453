"""Media on their way into a prompt: how many placeholders an item has, and which of them each of its rows takes (spec 4.3, 5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from inkling_jax.config import ModelConfig
from inkling_jax.errors import ConfigError, InputError
from inkling_jax.inputs.audio import to_bins
from inkling_jax.inputs.images import ImageConfig, image_patches
from inkling_jax.inputs.messages import check_content
from inkling_jax.inputs.prompt import Prompt
from inkling_jax.inputs.segments import Media, Segment, Text, encode_segments, media_segments
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.inputs.video import VideoConfig, read_video
from inkling_jax.media import MediaItem

TOWERS = {"image": "vision", "audio": "audio"}  # by kind of item


def media_slots(config: ModelConfig, tokenizer: Tokenizer | None) -> dict[str, int]:
    """The placeholder id of each kind, "image" and "audio", for which one is known (spec 1.2). ConfigError if they are equal."""
    known = {"image": config.image_token_id, "audio": config.audio_token_id}
    if tokenizer is not None:
        known |= {kind: tokenizer.control.get(f"{kind}_slot", slot) for kind, slot in known.items()}
    slots = {kind: slot for kind, slot in known.items() if slot is not None}
    if len(set(slots.values())) < len(slots):
        raise ConfigError(
            f"the placeholders of images and audio have one id, {slots['image']}: image_token_id and audio_token_id must differ"
        )
    return slots


@dataclasses.dataclass(frozen=True)
class Processor:
    """What one model takes beside text, and how it is prepared."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    towers: frozenset[str]  # of "vision" and "audio"
    images: ImageConfig = ImageConfig()
    videos: VideoConfig = VideoConfig()

    @property
    def slots(self) -> dict[str, int]:
        """See `media_slots`."""
        return media_slots(self.config, self.tokenizer)

    def prompt(self, parts: Sequence[str | Mapping[str, Any]]) -> Prompt:
        """A raw prompt of parts as the content of a chat message has them, each item with the control tokens that belong to it.

        Such as ["Compare ", {"type": "image", "image": "a.png"}, " with ", {"type": "audio", "audio": "b.wav"}]. InputError names
        the part at fault.
        """
        segments: list[Segment] = []
        if not isinstance(parts, list | tuple):  # a string has characters and a mapping keys, and neither are parts
            raise InputError(f"the parts of a prompt are a {type(parts).__name__}: expected a list of them")
        checked = check_content(parts, "user", "parts", self.frames)
        assert isinstance(checked, list)
        for part in checked:
            kind = part["type"]
            segments += [Text(part[kind])] if kind == "text" else media_segments(kind, part[kind])
        return self.encode(segments)

    def encode(self, segments: Iterable[Segment]) -> Prompt:
        """The prompt of a rendered conversation: its media prepared, each with as many placeholders as it has rows.

        Raises InputError naming the item, counted from 0 a kind, that cannot be read or that this model does not take.
        """
        if self.tokenizer is None:
            raise InputError("text with media needs a tokenizer, and this model came without a tokenizer.json: give token ids")
        ready: dict[str, list[np.ndarray]] = {"image": [], "audio": []}

        def expand(media: Media) -> list[int]:
            items = ready[media.kind]
            name = f"{media.kind} {len(items)}"
            self._require(media.kind, name)
            items.append(self._values(media.kind, media.item, name))
            return [self.slots[media.kind]] * len(items[-1])

        ids = encode_segments(segments, self.tokenizer, expand)
        return Prompt(ids, images=ready["image"], audios=ready["audio"])

    def frames(self, video: Any, name: str) -> list[Any]:
        """The images that a video is shown as (spec 4.4)."""
        self._require("image", name)
        return [moment.image for moment in read_video(video, self.videos, name)]

    def items(self, prompt: Prompt) -> tuple[MediaItem, ...]:
        """The prompt's media, prepared and each in its place: one after the other within a kind, each in one run of placeholders.

        Raises InputError naming the kind, the counts and the item at fault; before anything is read where there is no tower.
        """
        for name, given in (("images", prompt.images), ("audios", prompt.audios), ("videos", prompt.videos)):
            if not isinstance(given, list | tuple):
                raise InputError(f"the prompt's {name} are a {type(given).__name__}: expected a list of them")
        if prompt.images and prompt.videos:
            raise InputError(
                "the prompt holds images and videos, whose placeholders cannot be told apart: give the frames as images, in order"
            )
        for given in prompt.media:
            self._require("audio" if given == "audios" else "image", f"the prompt holds {given}")
        named = {
            "image": [(f"image {n}", image) for n, image in enumerate(prompt.images)],
            "audio": [(f"audio {n}", audio) for n, audio in enumerate(prompt.audios)],
        }
        for n, video in enumerate(prompt.videos):
            frames = enumerate(self.frames(video, f"video {n}"))
            named["image"] += [(f"video {n}, frame {i}", frame) for i, frame in frames]
        placed: list[MediaItem] = []
        for kind, tower in TOWERS.items():
            if tower in self.towers and kind in self.slots:
                ready = [(name, self._values(kind, item, name)) for name, item in named[kind]]
                places = [i for i, token in enumerate(prompt.token_ids) if token == self.slots[kind]]
                placed += _place(kind, self.slots[kind], places, ready)
        return tuple(placed)

    def _require(self, kind: str, what: str) -> None:
        """Refuse a kind of item that this model has no tower or no placeholder for; the message begins with `what`."""
        tower = TOWERS[kind]
        if tower not in self.towers:
            raise InputError(f"{what}: this model has no {tower} tower")
        if kind not in self.slots:
            raise InputError(f"{what}: neither config.json nor a tokenizer says which id stands for {kind} rows")

    def _values(self, kind: str, item: Any, name: str) -> np.ndarray:
        """What the tower takes for an item, one entry a row."""
        if kind == "audio":
            assert self.config.audio is not None
            return to_bins(item, self.config.audio, name)
        vision = self.config.vision
        assert vision is not None
        patches = image_patches(item, self.images, name)
        wanted = (vision.temporal_patch_size, vision.patch_size, vision.patch_size, vision.num_channels)
        if patches.shape[1:] != wanted:
            raise ConfigError(f"vision_config asks for patches of {list(wanted)}: images are cut into {list(patches.shape[1:])}")
        return patches


def _place(kind: str, slot: int, places: Sequence[int], items: Sequence[tuple[str, np.ndarray]]) -> list[MediaItem]:
    """Items on the placeholders at `places`, which they must fill."""
    rows = sum(len(values) for _, values in items)
    counts = f"the prompt holds {len(places)} {kind} placeholders (id {slot}), and the rows of its {kind} items are {rows}"
    placed, at = [], 0
    for name, values in items:
        run = places[at : at + len(values)]
        found = next((i for i in range(1, len(run)) if run[i] != run[0] + i), len(run))
        if found < len(values):
            left = f"{found} placeholders follow one another from token {run[0]}" if run else "no placeholder is left for it"
            raise InputError(f"{name} has {len(values)} rows, but {left}: {counts}")
        placed.append(MediaItem(TOWERS[kind], values, run[0]))
        at += found
    if at < len(places):
        raise InputError(f"nothing is given for the {kind} placeholder at token {places[at]}: {counts}")
    return placed
