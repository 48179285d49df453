"""Drawn shapes: how many there are, their colour, what they are and where. Held out are combinations of these."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from inkling_jax.evals.nano.example import Example, Given, Source, same_text

COLOURS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((255, 0, 0), (220, 20, 40), (200, 30, 30), (178, 34, 34)),
    "green": ((0, 128, 0), (0, 255, 0), (34, 139, 34), (60, 180, 75)),
    "blue": ((0, 0, 255), (30, 60, 220), (0, 0, 139), (65, 105, 225)),
    "yellow": ((255, 255, 0), (255, 225, 0), (240, 220, 60)),
    "purple": ((128, 0, 128), (148, 0, 211), (160, 32, 240)),
    "orange": ((255, 165, 0), (255, 140, 0), (250, 120, 20)),
}
SHAPES = {"square": "squares", "circle": "circles", "triangle": "triangles", "cross": "crosses", "ring": "rings"}
COUNTS = ("no", "one", "two", "three")
PLACES = (  # by row
    *("in the top left", "at the top", "in the top right"),
    *("on the left", "in the middle", "on the right"),
    *("in the bottom left", "at the bottom", "in the bottom right"),
)
FILLS = "fills"  # a place: one shape as large as the picture
SCATTERED = "scattered"  # a place: several shapes
CELL = 40  # side of each of the 3 x 3 places: one tile to the tower, which is linear and knows a shape where it has seen it
WHOLE = (40, 80, 120, 160)  # sides of pictures that one shape fills
FREE = (*range(40, 161), 200, 224, 256, 320, 512)  # sides of pictures of one square, which is but its colour
SMOOTH = 3  # how much larger a picture is drawn whose edges are smooth

DESCRIBE = ("What is in this picture?", "Describe the picture.", "What do you see?", "What is this?", "Describe this image.")
COLOUR = ("What colour is this {shape}?", "What colour is the {shape}?", "Which colour does the {shape} have?")
COLOUR_MANY = ("What colour are these {shapes}?", "What colour are the {shapes}?")
SHAPE = ("What shape is this?", "Which shape do you see?", "What {colour} thing is this?")
SHAPE_MANY = ("What shapes are these?", "Which shapes do you see?", "What {colour} things are these?")
WHERE = ("Where is the {shape}?", "In which part of the picture is the {shape}?", "Where do you see the {colour} {shape}?")
COUNT = ("How many {shapes} are there?", "How many {shapes} do you see?", "Count the {shapes}.")


class Scene(NamedTuple):
    """What a picture shows; `place` is one of PLACES or FILLS for one shape, SCATTERED for several."""

    colour: str
    shape: str
    count: int
    place: str


def make_shapes(source: Source) -> Example:
    """A picture, as an array, and a question about it in one of several forms."""
    scene = source.question(draw_scene, key=lambda scene: None if is_red_square(scene) else scene)
    asked, answer = _asked(scene, source.random)
    parts = [{"type": "image", "image": picture(scene, source.random)}, {"type": "text", "text": asked}]
    if source.random.random() < 0.2:
        parts.reverse()
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    return Example("shapes", messages, effort=source.effort(), answer=answer)


def grade_shapes(example: Example, given: Given) -> bool:
    """Whether the answer is the sentence, but for case and the full stop: every word of it is count, colour, shape or place."""
    return same_text(example.answer, given.content)


def draw_scene(rng: random.Random) -> Scene:
    """One shape in two of three pictures, large in a quarter of these."""
    count = rng.choice((1, 1, 1, 1, 2, 3))
    place = SCATTERED if count > 1 else FILLS if rng.random() < 0.25 else rng.choice(PLACES)
    return Scene(rng.choice(list(COLOURS)), rng.choice(list(SHAPES)), count, place)


def is_red_square(scene: Scene) -> bool:
    """Whether it is what everybody tries first: trained wherever it is."""
    return scene.count == 1 and (scene.colour, scene.shape) == ("red", "square")


def picture(scene: Scene, rng: random.Random) -> UInt8[np.ndarray, "h w 3"]:
    """The scene drawn on a random ground, in a shade of its colour, perhaps with noise."""
    free = scene.shape == "square" and (scene.place == FILLS or (scene.place == "in the middle" and rng.random() < 0.5))
    side = rng.choice(FREE) if free else rng.choice(WHOLE) if scene.place == FILLS else 3 * CELL
    scale = SMOOTH if rng.random() < 0.5 else 1
    image = Image.new("RGB", (side * scale, side * scale), _ground(rng))
    draw = ImageDraw.Draw(image)
    shade = tuple(min(255, max(0, value + rng.randint(-12, 12))) for value in rng.choice(COLOURS[scene.colour]))
    if scene.place == FILLS and scene.shape == "square" and rng.random() < 0.5:
        image.paste(shade, (0, 0, *image.size))
    else:
        for x, y, radius in _spots(scene, side, rng):
            _draw_shape(draw, scene.shape, x * scale, y * scale, radius * scale, shade)
    if scale > 1:
        image = image.resize((side, side), Image.Resampling.BOX)
    pixels = np.asarray(image)
    if rng.random() < 0.5:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(1, 8), pixels.shape)
        pixels = np.clip(np.rint(pixels + noise), 0, 255).astype(np.uint8)
    return pixels


def _ground(rng: random.Random) -> tuple[int, int, int]:
    """White in half of the pictures, else black or a grey."""
    grey = 255 if rng.random() < 0.5 else 0 if rng.random() < 0.3 else rng.randint(60, 245)
    return grey, grey, grey


def _spots(scene: Scene, side: int, rng: random.Random) -> list[tuple[float, float, float]]:
    """Centre and radius of each shape: near the middles of different cells of a grid of 3 x 3, if the picture is one."""
    if scene.place == FILLS:
        return [(side / 2, side / 2, side * rng.uniform(0.4, 0.5))]
    if side != 3 * CELL:
        return [(side / 2, side / 2, side * rng.uniform(0.15, 0.35))]
    cells = [PLACES.index(scene.place)] if scene.count == 1 else rng.sample(range(len(PLACES)), scene.count)
    radius = rng.uniform(13, 17)
    return [
        ((cell % 3 + 0.5) * CELL + rng.uniform(-2, 2), (cell // 3 + 0.5) * CELL + rng.uniform(-2, 2), radius) for cell in cells
    ]


def _draw_shape(draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, shade: tuple[int, ...]) -> None:
    box = (x - r, y - r, x + r, y + r)
    if shape == "square":
        draw.rectangle(box, fill=shade)
    elif shape == "circle":
        draw.ellipse(box, fill=shade)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=shade)
    elif shape == "cross":
        draw.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=shade)
        draw.rectangle((x - r / 3, y - r, x + r / 3, y + r), fill=shade)
    else:
        draw.ellipse(box, outline=shade, width=max(2, round(r * 0.4)))


def _asked(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """A question and its answer, which always names colour and shape."""
    colour, shape, count, place = scene
    shapes = SHAPES[shape]
    words = {"colour": colour, "shape": shape, "shapes": shapes}
    many = f"{COUNTS[count]} {colour} {shapes}"
    kinds = ["describe", "describe", "colour", "shape", "count"] + ["where"] * (count == 1 and place != FILLS)
    kind = rng.choice(kinds)
    if kind == "count":
        answer = f"There are {many}." if count > 1 else f"There is one {colour} {shape}."
        return rng.choice(COUNT).format(**words), answer
    if kind == "where":
        return rng.choice(WHERE).format(**words), f"The {colour} {shape} is {place}."
    if kind == "describe":
        where = "that fills the picture" if place == FILLS else place
        article = "An" if colour[0] in "aeiou" else "A"
        answer = f"{many.capitalize()}." if count > 1 else f"{article} {colour} {shape} {where}."
        return rng.choice(DESCRIBE), answer
    one, several = (COLOUR, COLOUR_MANY) if kind == "colour" else (SHAPE, SHAPE_MANY)
    article = "an" if colour[0] in "aeiou" else "a"
    answer = f"These are {many}." if count > 1 else f"This is {article} {colour} {shape}."
    return rng.choice(several if count > 1 else one).format(**words), answer
