"""Training the nano model, at the size of a toy: it learns, goes on where it stopped, and what it exports is what it trained."""

from __future__ import annotations

import dataclasses
import functools
import json
import tarfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import nano_record
import numpy as np
import pytest
from nano_data import Batch, Packer, Recipe, last_answers, to_pixels
from nano_model import nano_config
from nano_record import Progress, Saved
from nano_step import Modules, State, Trainer, as_nvfp4, follows, patches_of

import inkling_jax
from inkling_jax import Prompt
from inkling_jax.config import AttentionConfig
from inkling_jax.evals.nano.sequence import TrainingSequence
from inkling_jax.evals.nano.tokenizer import processor_config
from inkling_jax.inputs.images import to_patches

IMAGE, AUDIO, USABLE = 60, 61, 64
RECIPE = Recipe("", {}, lines=2, length=40, tiles=6, frames=6)


def toy_config() -> Any:
    """Every kind of layer, narrow; windows and extents shorter than the examples."""
    config = nano_config(USABLE, {"eos_token_id": 62, "image_token_id": IMAGE, "audio_token_id": AUDIO})
    text = dataclasses.replace(
        config.text,
        hidden_size=32,
        num_layers=3,
        vocab_size=72,
        global_attention=AttentionConfig(2, 1, 16, rel_extent=9, window=None),
        local_attention=AttentionConfig(2, 1, 16, rel_extent=6, window=6),
        local_layers=(True, True, False),
        dense_layers=(True, False, False),
        dense_width=32,
        expert_width=32,
        num_experts=4,
    )
    return dataclasses.replace(
        config,
        text=text,
        audio=dataclasses.replace(config.audio, hidden_size=32),
        vision=dataclasses.replace(config.vision, hidden_size=32),
        mtp=dataclasses.replace(config.mtp, local_extent=6),
    )


def sequences() -> list[TrainingSequence]:
    """Four examples, three of which fit the first line; one with a picture of two tiles, one with three frames of sound."""
    rng = np.random.default_rng(0)
    picture = to_patches(rng.integers(0, 256, (30, 50, 3), np.uint8))
    sound = rng.integers(0, 16, (3, 80), dtype=np.int32)
    made = []
    for length, images, audios in ((14, [], []), (13, [picture], []), (12, [], [sound]), (21, [], [])):
        ids = rng.integers(0, 50, length).astype(np.int32)
        ids[2 : 2 + sum(map(len, images))] = IMAGE
        ids[2 : 2 + sum(map(len, audios))] = AUDIO
        made.append(TrainingSequence(ids, np.arange(length) > 5, images, audios))
    return made


@pytest.fixture(scope="module")
def batch() -> Batch:
    packer = Packer(RECIPE, (IMAGE, AUDIO))
    assert all(packer.add(sequence) for sequence in sequences())
    assert not packer.add(sequences()[3])  # no line has 21 places left
    return packer.batch


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(Modules(toy_config(), jnp.dtype(jnp.float32)))


def run(trainer: Trainer, state: State, batch: Batch, steps: int) -> tuple[State, list[float]]:
    """Some steps on one batch, and the loss of each."""
    losses = []
    for _ in range(steps):
        state, numbers = trainer.step(state, batch, jnp.float32(1e-2), jnp.float32(1), jnp.float32(0))
        losses.append(float(numbers["loss"]))
    return state, losses


def test_lines(batch: Batch) -> None:
    """Examples lie end to end in the first line with room, media in their places, and nothing is learned across a border."""
    assert (batch.example[0] == np.repeat([0, 1, 2, -1], [14, 13, 12, 1])).all()
    assert (batch.offset[0, 13:16] == [13, 0, 1]).all()
    assert (batch.target[0, [0, 5, 6, 13, 14, 16, 17, 39]] == [1, 1, 2, 2, 1, 0, 0, 0]).all()
    assert (batch.tile_place == [16, 17, *range(82, 86)]).all() and (batch.bin_place == [29, 30, 31, *range(83, 86)]).all()
    inside = np.asarray(follows(batch.example, 2))[0]
    assert (np.flatnonzero(~inside) == [12, 13, 25, 26, 37, 38, 39]).all()


def test_last_answers() -> None:
    """Of two answers in an example the last one is graded, and each example has a number of its own."""
    batch = Batch.empty(dataclasses.replace(RECIPE, length=8))
    batch.example[:] = [[0, 0, 0, 0, 0, 1, 1, -1], [0, 0, 0, 0, -1, -1, -1, -1]]
    batch.target[:] = [[1, 2, 1, 2, 2, 1, 2, 0], [2, 0, 2, 2, 0, 0, 0, 0]]
    graded, number = last_answers(batch)
    assert (graded == [[0, 0, 0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 0, 0, 0, 0]]).all()
    assert len(np.unique(number[graded])) == 3 and len(np.unique(number)) == 5


def test_pictures(batch: Batch) -> None:
    """Tiles kept as bytes are the patches that serving makes, padding included."""
    patches = sequences()[1].images[0]
    assert to_pixels(patches).min() == -1
    np.testing.assert_allclose(np.asarray(patches_of(batch))[:2], patches, atol=1e-6)


def test_rounding_of_experts() -> None:
    """What training computes with at last is NVFP4: the nearest code under an E4M3 block scale, one float32 scale an expert."""
    weight = np.random.default_rng(0).standard_normal((2, 2, 3, 32)).astype(np.float32)
    weight[1] *= 9
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    wanted = np.empty(weight.shape)
    for index in np.ndindex(2, 2, 3, 2):
        block = weight[(*index[:3], slice(16 * index[3], 16 * index[3] + 16))].astype(np.float64)
        whole = np.abs(weight[index[0]]).max() / (6 * 448)
        scale = whole * float(np.float32(np.abs(block).max() / 6 / whole).astype(ml_dtypes.float8_e4m3fn))
        nearest = codes[np.abs(np.abs(block)[:, None] / scale - codes).argmin(1)]
        wanted[(*index[:3], slice(16 * index[3], 16 * index[3] + 16))] = np.sign(block) * nearest * scale
    np.testing.assert_allclose(jax.jit(as_nvfp4)(weight), wanted, rtol=1e-5, atol=1e-6)
    assert 0.05 < np.linalg.norm(wanted - weight) / np.linalg.norm(weight) < 0.12


@pytest.mark.slow
def test_training(trainer: Trainer, batch: Batch, tmp_path: Path) -> None:
    """Forty steps learn a batch by heart; half of them, saved and read back, go on to the same losses, bit for bit."""
    _, whole = run(trainer, trainer.start(trainer.modules.initial(0)), batch, 40)
    assert whole[0] > 3.5 and whole[-1] < 0.4, (whole[0], whole[-1])
    state, _ = run(trainer, trainer.start(trainer.modules.initial(0)), batch, 20)
    parameters = {path: np.asarray(value) for path, value in state.parameters.items()}
    saved = Saved(parameters, [np.asarray(leaf) for leaf in jax.tree.leaves(state.moments)], Progress(step=20), {"a": "b"})
    nano_record.save_state(tmp_path / "state.npz", saved)
    nano_record.save_parameters(tmp_path, saved)
    found = nano_record.load([tmp_path / "state.npz"])
    assert found.progress == Progress(step=20) and found.processing == {"a": "b"} and found.moments is not None
    again = trainer.start({path: jnp.asarray(value) for path, value in found.parameters.items()})
    again = State(again.parameters, jax.tree.unflatten(jax.tree.structure(again.moments), found.moments))
    assert run(trainer, again, batch, 20)[1] == whole[20:]
    travelled = nano_record.load(sorted(tmp_path.glob("params-*.npz")))
    assert travelled.moments is None
    assert all((travelled.parameters[path] == value).all() for path, value in parameters.items())


@pytest.mark.slow
def test_export(trainer: Trainer, batch: Batch, tmp_path: Path) -> None:
    """The checkpoint, loaded as any other, computes in its cache what training computed for each example of a line."""
    rng = np.random.default_rng(0)
    parameters = {}
    for path, value in trainer.modules.initial(0).items():
        moved = np.asarray(value) + 0.1 * rng.standard_normal(value.shape)  # no zeros, no ones: everything counts
        parameters[path] = moved.astype(jnp.bfloat16).astype(np.float32)
    forward = jax.jit(functools.partial(trainer.on_mesh, trainer.modules.forward))
    result = forward(parameters, batch, jnp.float32(0))
    nano_record.export(tmp_path / "nano.tar", trainer.modules.config, parameters, {})
    with tarfile.open(tmp_path / "nano.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "nano-bf16" / "processor_config.json").write_text(json.dumps(processor_config()))
    with inkling_jax.load(tmp_path / "nano-bf16", dtype="float32", quiet=True, page_size=8, chunk=16, max_context=64) as llm:
        for sequence, start in zip(sequences()[:3], (0, 14, 27), strict=True):
            prompt = Prompt(sequence.token_ids.tolist(), sequence.images, sequence.audios)
            part = slice(start, start + len(sequence.token_ids))
            np.testing.assert_allclose(llm.score(prompt), result.logits[0, part], rtol=1e-4, atol=1e-4)
            for depth, found in enumerate(llm.draft_logits(prompt)):
                trained = result.drafts[depth][0, part][: len(found)]
                np.testing.assert_allclose(found, trained, rtol=1e-4, atol=1e-4)
