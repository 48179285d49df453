"""From media to placeholders and back: counts, control tokens, places, and every mismatch by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import write_byte_tokenizer
from checkpoint_files import micro_config
from text_checkpoint import USABLE

from inkling_jax.config import ModelConfig
from inkling_jax.errors import ConfigError, InputError
from inkling_jax.inputs.chat import render
from inkling_jax.inputs.processor import Processor, media_slots
from inkling_jax.inputs.prompt import Prompt
from inkling_jax.inputs.segments import Media, encode_segments
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.inputs.video import VideoConfig

CASES = json.loads((Path(__file__).parent / "data" / "chat.json").read_text(encoding="utf-8"))["cases"]
BOTH = frozenset({"vision", "audio"})
RED = np.full((40, 40, 3), (255, 0, 0), np.uint8)  # as it is 2 tiles, at twice its size 2 rows of 3
VIDEO = np.stack([RED, RED // 2, RED // 3])


def patches(rows: int, value: float = 0.5) -> np.ndarray:
    return np.full((rows, 2, 40, 40, 3), value, np.float32)


def bins(rows: int) -> np.ndarray:
    return np.full((rows, 80), 3, np.int32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("processor")
    write_byte_tokenizer(directory, USABLE)
    return Tokenizer.from_directory(directory, None)


@pytest.fixture(scope="module")
def processor(tokenizer: Tokenizer) -> Processor:
    shape = micro_config(vocab_size=320, unpadded_vocab_size=USABLE)
    return Processor(shape, tokenizer, BOTH)


@pytest.fixture(scope="module")
def slots(processor: Processor) -> tuple[int, int]:
    return processor.slots["image"], processor.slots["audio"]


# Into a prompt


def test_a_raw_prompt_of_parts(processor: Processor, tokenizer: Tokenizer, slots: tuple[int, int]) -> None:
    """Begin and end tokens of spec 4.3 and 5, one placeholder a row, texts by themselves, items ready and in order."""
    role, encode = tokenizer.control, tokenizer.encode
    wave = (np.zeros(1601, np.float32), 16000)  # three frames of 800 samples, the last begun
    parts: list[Any] = ["<|content_image|>", {"type": "image", "image": RED}, {"type": "audio", "audio": wave}, "c"]
    prompt = processor.prompt([*parts, {"type": "image", "image": patches(3)}])
    wanted = [*encode("<|content_image|>"), role["content_image"], *[slots[0]] * 6]
    wanted += [role["content_audio_input"], *[slots[1]] * 3, role["audio_end"], *encode("c")]
    assert list(prompt.token_ids) == [*wanted, role["content_image"], *[slots[0]] * 3]
    assert [len(image) for image in prompt.images] == [6, 3] and (prompt.audios[0] == 2).all()
    found = processor.items(prompt)
    begin = list(prompt.token_ids).index(slots[0])
    assert [(item.tower, item.begin, len(item.values)) for item in found] == [
        ("vision", begin, 6),
        ("vision", len(wanted) + 1, 3),
        ("audio", begin + 7, 3),
    ]
    # dearer than the rest: a prompt is not prepared twice
    assert all(np.shares_memory(item.values, given) for item, given in zip(found, [*prompt.images], strict=False))


@pytest.mark.parametrize("parts", ["abc", {"type": "text", "text": "abc"}, None, 5])
def test_a_raw_prompt_is_a_list_of_parts(parts: Any, processor: Processor) -> None:
    """A string is not taken apart into characters, nor a part into its keys."""
    with pytest.raises(InputError, match=f"the parts of a prompt are a {type(parts).__name__}: expected a list of them"):
        processor.prompt(parts)


def test_a_video_is_its_frames(processor: Processor, tokenizer: Tokenizer, slots: tuple[int, int]) -> None:
    """Each behind its own begin token in a raw prompt; by hand, in the image placeholders one after the other."""
    shown = dataclasses.replace(processor, videos=VideoConfig(fps=1, max_frames=2))
    prompt = shown.prompt([{"type": "video", "video": VIDEO}])
    assert list(prompt.token_ids) == [tokenizer.control["content_image"], *[slots[0]] * 6] * 2
    given = Prompt([*[slots[0]] * 6, 1, *[slots[0]] * 6], videos=[VIDEO])
    found = shown.items(given)
    assert [(item.tower, item.begin) for item in found] == [("vision", 0), ("vision", 7)]
    for item, image in zip(found, prompt.images, strict=True):
        assert np.array_equal(item.values, image)
    assert not np.array_equal(found[0].values, found[1].values)


@pytest.mark.parametrize("case", [c for c in CASES if any(k in str(c["expect"]) for k in ("image_slots", "audio_slots"))])
def test_a_conversation(case: dict, processor: Processor, tokenizer: Tokenizer, slots: tuple[int, int]) -> None:
    """The conversations written out by hand, with items of as many rows."""
    messages = json.loads(json.dumps(case["messages"]))
    for part in messages[0]["content"]:
        if part["type"] == "image":
            part["image"] = patches(part.pop("tiles"))
        elif part["type"] == "audio":
            part["audio"] = bins(part.pop("frames"))
    wanted: list[int] = []
    for segment in case["expect"]:
        ((kind, value),) = segment.items()
        wanted += {
            "control": lambda v: [tokenizer.id_of(v)],
            "text": tokenizer.encode,
            "image_slots": lambda v: [slots[0]] * v,
            "audio_slots": lambda v: [slots[1]] * v,
        }[kind](value)
    prompt = processor.encode(render(messages))
    assert list(prompt.token_ids) == wanted
    assert len(processor.items(prompt)) == 1


# Out of a prompt


def test_items_fill_placeholders_in_order(processor: Processor, slots: tuple[int, int]) -> None:
    """Each kind by itself; items may touch one another, and placeholders need no begin token."""
    image, audio = slots
    ids = [image] * 2 + [audio] * 3 + [7] + [image] * 5 + [audio]
    found = processor.items(Prompt(ids, images=[patches(2, 1), patches(4, 2), patches(1, 3)], audios=[bins(3), bins(1)]))
    assert [(item.tower, item.begin, len(item.values)) for item in found] == [
        ("vision", 0, 2),
        ("vision", 6, 4),
        ("vision", 10, 1),
        ("audio", 2, 3),
        ("audio", 11, 1),
    ]
    assert [item.values[0, 0, 0, 0, 0] for item in found[:3]] == [1, 2, 3]
    assert processor.items(Prompt([1, 2, 3])) == ()


@pytest.mark.parametrize(
    ("ids", "media", "told"),
    [
        ("iii", {}, r"nothing is given for the image placeholder at token 0: .* 3 image placeholders .* image items are 0"),
        ("xaa", {}, r"nothing is given for the audio placeholder at token 1: .* 2 audio placeholders .* audio items are 0"),
        ("iiix", {"images": [2]}, "nothing is given for the image placeholder at token 2: .* 3 image placeholders .* are 2"),
        ("xx", {"images": [2]}, "image 0 has 2 rows, but no placeholder is left for it: .* 0 image placeholders .* are 2"),
        ("iix", {"images": [2, 1]}, "image 1 has 1 rows, but no placeholder is left for it: .* 2 image placeholders .* are 3"),
        ("iixi", {"images": [3]}, "image 0 has 3 rows, but 2 placeholders follow one another from token 0: .* 3 .* are 3"),
        ("iiixii", {"images": [2, 3]}, "image 1 has 3 rows, but 1 placeholders follow one another from token 2: .* 5 .* are 5"),
        ("iia", {"images": [2], "audios": [2]}, "audio 0 has 2 rows, but 1 placeholders follow .* 1 audio placeholders .* are 2"),
        ("aa", {"images": [2]}, "image 0 has 2 rows, but no placeholder is left for it"),
        ("ii", {"audios": [2]}, "nothing is given for the image placeholder at token 0"),
    ],
)
def test_mismatches(processor: Processor, slots: tuple[int, int], ids: str, media: dict[str, list[int]], told: str) -> None:
    """Each names the kind, the counts and the item."""
    make = {"images": patches, "audios": bins}
    spelled = {"i": slots[0], "a": slots[1], "x": 1}
    prompt = Prompt([spelled[c] for c in ids], **{kind: [make[kind](n) for n in rows] for kind, rows in media.items()})
    with pytest.raises(InputError, match=told):
        processor.items(prompt)


@pytest.mark.parametrize(
    ("media", "told"),
    [
        ({"images": "cat.png"}, "the prompt's images are a str: expected a list"),
        ({"images": RED}, "the prompt's images are a ndarray: expected a list"),
        ({"audios": b"RIFF"}, "the prompt's audios are a bytes: expected a list"),
        ({"images": [RED], "videos": [VIDEO]}, "holds images and videos, whose placeholders cannot be told apart"),
        ({"images": [RED, "none.png"]}, "image 1: none.png: no such file"),
        ({"audios": [(np.zeros(10, np.float32), 16000), np.full((2, 80), 16)]}, "audio 1 has bins from 16 to 16; 0 to 15"),
        ({"videos": [[]]}, "video 0 has no frames"),
    ],
)
def test_items_that_cannot_be_read(processor: Processor, media: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        processor.items(Prompt([1], **media))


@pytest.mark.parametrize("name", ["images", "audios", "videos"])
def test_without_the_tower(processor: Processor, slots: tuple[int, int], name: str) -> None:
    """Refused before the item is looked at; placeholders alone are ids like any to a model of text."""
    bare = dataclasses.replace(processor, towers=frozenset())
    tower = "audio" if name == "audios" else "vision"
    with pytest.raises(InputError, match=f"the prompt holds {name}: this model has no {tower} tower"):
        bare.items(Prompt([1], **{name: [object()]}))
    kind = name.removesuffix("s")
    with pytest.raises(InputError, match=rf"(parts\[0\].{kind}|{kind} 0): this model has no {tower} tower"):
        bare.prompt([{"type": kind, kind: object()}])
    assert bare.items(Prompt(list(slots))) == ()


def test_without_a_tokenizer(processor: Processor) -> None:
    """Ids need none, if config.json names the placeholders."""
    config = processor.config
    with pytest.raises(InputError, match="needs a tokenizer, and this model came without a tokenizer.json"):
        Processor(config, None, BOTH).prompt(["a"])
    with pytest.raises(InputError, match="the prompt holds audios: neither config.json nor a tokenizer says which id"):
        Processor(config, None, BOTH).items(Prompt([1], audios=[bins(1)]))
    named = dataclasses.replace(config, audio_token_id=5)
    (item,) = Processor(named, None, BOTH).items(Prompt([9, 5], audios=[bins(1)]))
    assert (item.tower, item.begin) == ("audio", 1)


def test_patches_of_another_size(processor: Processor) -> None:
    assert processor.config.vision is not None
    config = dataclasses.replace(processor.config, vision=dataclasses.replace(processor.config.vision, patch_size=14))
    with pytest.raises(ConfigError, match=r"vision_config asks for patches of \[2, 14, 14, 3\]: .* \[2, 40, 40, 3\]"):
        dataclasses.replace(processor, config=config).items(Prompt([1], images=[RED]))


# Placeholder ids


def test_placeholders_must_differ(processor: Processor) -> None:
    """Whether config.json or a tokenizer names them; by config.json alone it does not even become a configuration."""
    same = dataclasses.replace(processor.config, image_token_id=5, audio_token_id=5)
    with pytest.raises(ConfigError, match="the placeholders of images and audio have one id, 5"):
        media_slots(same, None)
    alike: Any = SimpleNamespace(control={"image_slot": 9, "audio_slot": 9})
    with pytest.raises(ConfigError, match="the placeholders of images and audio have one id, 9"):
        media_slots(processor.config, alike)
    assert media_slots(processor.config, None) == {}
    content = dict(same.to_dict(), image_token_id=5, audio_token_id=5)
    with pytest.raises(ConfigError, match=r"image_token_id is 5, expected another id than audio_token_id \(5\)"):
        ModelConfig.from_dict(content)


def test_media_need_somebody_who_counts_them(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="the conversation holds image, which this model does not take"):
        encode_segments([Media("image", RED)], tokenizer)
