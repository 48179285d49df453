"""Parameters written as a published checkpoint: every tensor comes back bit for bit, and what cannot be written is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import load, micro_checkpoint

from inkling_jax.config import ModelConfig
from inkling_jax.convert.publish import publish, published_arrays
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.errors import InputError

Parameters = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig, Parameters]:
    """A random checkpoint with both towers and a draft head, and its parameters in float32."""
    directory = tmp_path_factory.mktemp("published")
    config = micro_checkpoint(directory, False)
    plan = WeightPlan.build(config, Checkpoint.open(directory), draft=True)
    return directory, config, {path: plan.assemble(path).astype(np.float32) for path in plan.parameters}


def test_every_tensor_comes_back(read: tuple[Path, ModelConfig, Parameters], tmp_path: Path) -> None:
    directory, config, parameters = read
    assert any(path.startswith("draft.") for path in parameters) and any(path.startswith("vision.") for path in parameters)
    total = publish(tmp_path / "new", config, parameters)
    wanted, found = load(directory), load(tmp_path / "new")
    assert found.keys() == wanted.keys() and total == sum(array.nbytes for array in found.values())
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes(), name
    assert ModelConfig.from_directory(tmp_path / "new").text == config.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given: given.pop("norm.weight"), "norm.weight is missing"),
        (lambda given: given.update(unembed=given["unembed"].T), "unembed has shape"),
        (lambda given: given.update(embed=given["embed"] * np.nan), "embed holds numbers that are not finite"),
    ],
)
def test_what_is_refused(read: tuple[Path, ModelConfig, Parameters], change: Callable[[Parameters], object], words: str) -> None:
    _, config, parameters = read
    change(given := dict(parameters))
    with pytest.raises(InputError, match=words):
        published_arrays(config, given)
