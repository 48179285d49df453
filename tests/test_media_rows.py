"""Rows of the towers: computed once, kept by content within bounds, and laid out for any cut of any prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import engines
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import Tensors
from checkpoint_files import load as read_tensors
from text_checkpoint import write_text_checkpoint

from inkling_jax.engine.media import PIECE_ROWS, MediaRunner
from inkling_jax.errors import InputError
from inkling_jax.media import MediaItem
from inkling_jax.model import flat_parameters
from inkling_jax.sharding.mesh import make_mesh
from inkling_jax.towers import Towers

WIDTH = 48  # of the decoder
PIECE_BYTES = PIECE_ROWS * WIDTH * 4
Make = Callable[..., MediaRunner]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("rows") / "model")


@pytest.fixture(scope="module")
def tensors(directory: Path) -> Tensors:
    return {name: array.astype(np.float64) for name, array in read_tensors(directory).items() if "I64" not in str(array.dtype)}


@pytest.fixture(scope="module")
def make(directory: Path) -> Make:
    """A runner of its own over the checkpoint's towers, with what each tower was given in `calls`."""
    shared = engines.model(directory).media
    config = engines.model(directory).config

    def make(keep_bytes: int = 1 << 30, towers: Towers | None = None) -> MediaRunner:
        towers = towers or Towers(config.vision, config.audio, jnp.dtype(jnp.float32))
        assert len(flat_parameters(towers)) in (0, len(shared._leaves))
        runner = MediaRunner(towers, shared._leaves, make_mesh(), jnp.dtype(jnp.float32), keep_bytes)
        runner.calls = record_calls(runner)  # pyright: ignore[reportAttributeAccessIssue]
        return runner

    return make


def record_calls(runner: MediaRunner) -> dict[str, list[tuple[int, ...]]]:
    """The shapes that each tower is given from now on."""
    calls: dict[str, list[tuple[int, ...]]] = {name: [] for name in runner._programs}

    def recorded(name: str, program):
        def call(leaves, values):
            calls[name].append(values.shape)
            return program(leaves, values)

        return call

    runner._programs = {name: recorded(name, program) for name, program in runner._programs.items()}
    return calls


def counts(runner: MediaRunner) -> dict[str, int]:
    return {name: len(shapes) for name, shapes in runner.calls.items()}  # pyright: ignore[reportAttributeAccessIssue]


def image(rows: int, begin: int = 0, seed: int = 0) -> MediaItem:
    values = np.random.default_rng([seed, rows]).normal(size=(rows, 2, 40, 40, 3)).astype(np.float32)
    return MediaItem("vision", values, begin)


def clip(rows: int, begin: int = 0, seed: int = 0) -> MediaItem:
    return MediaItem("audio", np.random.default_rng([seed, rows]).integers(0, 16, (rows, 80)).astype(np.int32), begin)


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight


def answer(item: MediaItem, tensors: Tensors) -> np.ndarray:
    """The rows of an item by spec 4.2 and 5, in float64."""
    if item.tower == "vision":
        flat = item.values.reshape(len(item.values), -1).astype(np.float64)
        return norm(flat @ tensors["model.visual.layers.linear_0.weight"].T, tensors["model.visual.final_norm.weight"])
    table = tensors["model.audio.encoder.weight"].reshape(80, 16, WIDTH)
    return norm(table[np.arange(80), item.values].sum(axis=1), tensors["model.audio.final_norm.weight"])


def test_rows_for_every_cut(make: Make, tensors: Tensors) -> None:
    """Two prompts side by side: items of more than a piece, of less, several in a piece, both towers, cut anywhere."""
    runner = make()
    first = [image(PIECE_ROWS - 50, 3), clip(7, 300), image(130, 310, seed=1), clip(1, 500)]
    second = [image(20, 0, seed=2), image(20, 20, seed=3)]
    runner.admit("first", first)
    runner.admit("second", second)
    wanted = {name: np.zeros((510, WIDTH)) for name in ("first", "second")}
    there = {name: np.zeros(510, bool) for name in wanted}
    for name, items in (("first", first), ("second", second)):
        for item in items:
            place = slice(item.begin, item.begin + len(item.values))
            wanted[name][place], there[name][place] = answer(item, tensors), True
    for a, b, c, d in [(0, 510, 0, 50), (0, 2, 5, 45), (5, 40, 39, 40), (300, 320, 19, 21), (400, 501, 0, 1), (480, 510, 45, 50)]:
        found = runner.rows(640, [("first", a, b), ("second", c, d)])
        assert found is not None and found.rows.shape == (640, WIDTH)
        right = np.concatenate([wanted["first"][a:b], wanted["second"][c:d], np.zeros((640 - (b - a) - (d - c), WIDTH))])
        present = np.concatenate([there["first"][a:b], there["second"][c:d], np.zeros(640 - (b - a) - (d - c), bool)])
        assert np.array_equal(found.present, present)
        np.testing.assert_allclose(np.asarray(found.rows), right, atol=2e-5)
    assert runner.rows(16, [("first", 0, 3), ("second", 40, 45)]) is None
    assert runner.rows(16, []) is None
    assert counts(runner) == {"vision": 3, "audio": 1}  # 336 rows are two pieces


def test_content_is_computed_once(make: Make) -> None:
    """Whatever its place and prompt; the same item twice in a prompt as well, and only what is new in a later turn."""
    runner = make()
    runner.admit(1, [image(5, 0), image(5, 9), image(6, 20), clip(4, 40)])
    assert counts(runner) == {"vision": 1, "audio": 1}
    runner.admit(2, [image(6, 1), image(5, 7), image(7, 14), clip(4, 30)])
    assert counts(runner) == {"vision": 2, "audio": 1}
    runner.admit(3, [image(7, 0), image(5, 8)])
    assert counts(runner) == {"vision": 2, "audio": 1}
    one, two = (runner.rows(64, [(owner, 0, 45)]) for owner in (1, 2))
    assert np.array_equal(one.rows[9:14], two.rows[7:12]) and np.array_equal(one.rows[0:5], one.rows[9:14])
    assert image(5).digest == image(5, 8).digest != image(5, seed=1).digest


def test_stills_are_told_apart_by_what_they_hold() -> None:
    """Time slots that share their memory are looked at once, and every tile is."""
    tiles = image(3).values[:, :1]
    tiles[1] = tiles[0]

    def still(tiles: np.ndarray) -> bytes:
        return MediaItem("vision", np.broadcast_to(tiles, (len(tiles), 2, 40, 40, 3)), 0).digest

    assert still(tiles) == still(tiles.copy())
    other = tiles.copy()
    other[2, 0, 39, 39, 2] += 1
    assert len({still(tiles), still(other), still(tiles[:2]), still(tiles[:1]), still(tiles[1:])}) == 5


def test_ready_patches_are_told_apart_by_what_is_repeated() -> None:
    """Stripes across and stripes down are the same forty numbers, broadcast along another axis."""
    ramp = np.arange(40, dtype=np.float32)
    across, down = (np.broadcast_to(stripes, (1, 2, 40, 40, 3)) for stripes in (ramp[:, None, None], ramp[:, None]))
    assert MediaItem("vision", across, 0).digest != MediaItem("vision", down, 0).digest


def test_what_is_kept_is_bounded(make: Make) -> None:
    """The run used least recently goes first; a prompt whose rows went keeps its own until it is read."""
    runner = make(2 * PIECE_BYTES)
    for seed in (0, 1):
        runner.admit(seed, [image(5, seed=seed)])
    before = np.asarray(runner.rows(16, [(1, 0, 5)]).rows)
    runner.admit("again", [image(5, seed=0)])
    runner.admit(2, [image(5, seed=2)])  # pushes 1 out
    assert counts(runner)["vision"] == 3 and len(runner._kept) == len(runner._known) == 2
    assert np.array_equal(runner.rows(16, [(1, 0, 5)]).rows, before)
    runner.admit(1, [image(5, seed=1)])  # admitted already
    runner.admit("yet again", [image(5, seed=0)])
    assert counts(runner)["vision"] == 3
    runner.release(1)
    runner.admit(1, [image(5, seed=1)])
    assert counts(runner)["vision"] == 4
    assert np.array_equal(runner.rows(16, [(1, 0, 5)]).rows, before)
    runner.admit("large", [image(2 * PIECE_ROWS + 1)])  # more than may be kept: it is used all the same
    assert counts(runner)["vision"] == 7 and not runner._kept and not runner._known
    assert runner.rows(16, [("large", 2 * PIECE_ROWS, 2 * PIECE_ROWS + 1)]).present.tolist() == [True] + [False] * 15


def test_a_prompt_that_was_not_admitted_is_an_error(make: Make) -> None:
    """Its placeholders would be read as words."""
    runner = make()
    runner.admit("a", [image(5)])
    runner.release("a")
    runner.release("a")
    with pytest.raises(KeyError):
        runner.rows(16, [("a", 0, 5)])


def test_a_tower_that_is_not_there(make: Make) -> None:
    runner = make(towers=Towers(None, None, jnp.dtype(jnp.float32)))
    runner.check([])
    with pytest.raises(InputError, match="an item for the audio tower, which this model has not"):
        runner.check([clip(3)])


def test_a_tower_computes_a_piece_at_a_time(make: Make) -> None:
    """However long the clip: a call has one shape."""
    runner = make()
    runner.admit(1, [clip(3 * PIECE_ROWS + 5), image(2)])
    assert runner.calls == {"audio": [(PIECE_ROWS, 80)] * 4, "vision": [(PIECE_ROWS, 2, 40, 40, 3)]}
