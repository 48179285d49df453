"""The published layout, enumerated from a configuration: totals of the releases and names of the reference checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import TYPES, load

from inkling_jax.config import ModelConfig, preset
from inkling_jax.config_vision import vision_folds
from inkling_jax.convert.published import published_tensors


@pytest.mark.parametrize(
    ("name", "packed", "tensors", "elements", "nbytes"),
    [  # spec 7.5
        ("inkling-small", False, 1048, {"BF16": 265956428810, "F32": 10280}, 531912898740),
        (
            "inkling-small",
            True,
            1360,
            {"BF16": 14700842072, "U8": 125627793408, "F8_E4M3": 15703474176, "F32": 30248, "I64": 234},
            170733074592,
        ),
        ("inkling", False, 1552, {"BF16": 952377607178, "F32": 16448}, 1904755280148),
        (
            "inkling",
            True,
            2056,
            {"BF16": 39160185992, "U8": 456608710656, "F8_E4M3": 57076088832, "F32": 48704, "I64": 378},
            592005369312,
        ),
    ],
)
def test_releases_have_the_published_totals(name: str, packed: bool, tensors: int, elements: dict[str, int], nbytes: int) -> None:
    layout = published_tensors(preset(name), nvfp4=packed)
    counted: dict[str, int] = {}
    for dtype, shape in layout.values():
        counted[dtype] = counted.get(dtype, 0) + math.prod(shape)
    assert len(layout) == tensors
    assert counted == elements
    assert sum(count * np.dtype(TYPES[dtype]).itemsize for dtype, count in counted.items()) == nbytes
    draft = sum(2 * math.prod(shape) for key, (_, shape) in layout.items() if key.startswith("model.mtp."))
    assert draft == (4463824912 if name == "inkling-small" else 10520891408)


def test_vision_towers_have_the_published_widths() -> None:
    vision = preset("inkling").vision
    assert vision is not None
    released = [(1, 5, 75, 128), (1, 2, 512, 320), (1, 4, 5120, 4800), (2, 1, 9600, 6144)]
    assert vision_folds(vision) == released  # spec 4.2
    assert vision_folds(dataclasses.replace(vision, num_layers=1)) == [(2, 40, 9600, 6144)]
    deep = vision_folds(dataclasses.replace(vision, num_layers=24))
    assert len(deep) == 24 and deep[0].inputs == 3 and deep[-1] == (1, 1, 9600, 6144)


@pytest.mark.parametrize(("name", "fmt"), [("tiny", "bf16"), ("tiny", "nvfp4"), ("wide", "nvfp4"), ("gpu", "nvfp4")])
def test_reference_checkpoints_have_the_published_layout(oracle_dir: Callable[..., Path], name: str, fmt: str) -> None:
    directory = oracle_dir(name, fmt)
    layout = published_tensors(ModelConfig.from_directory(directory), nvfp4=fmt == "nvfp4")
    assert {key: (np.dtype(TYPES[dtype]), shape) for key, (dtype, shape) in layout.items()} == {
        key: (array.dtype, array.shape) for key, array in load(directory).items()
    }
