"""Prompts with media: against the reference, however they are cut, alone and among texts, in programs that texts never see."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conftest
import engines
import jax
import numpy as np
import pytest
from checkpoint_files import load as read_tensors
from engines import GREEDY
from safetensors.numpy import load_file
from test_media_rows import answer, record_calls
from test_oracle_text import assert_close
from text_checkpoint import write_text_checkpoint

import inkling_jax
from inkling_jax import LLM, Completion, InputError, Prompt
from inkling_jax.inputs.chat import render
from inkling_jax.inputs.processor import Processor
from inkling_jax.inputs.tokenizer import Tokenizer
from inkling_jax.media import MediaItem

SHORT = dataclasses.replace(GREEDY, max_tokens=20)


def open_llm(directory: Path, page: int = 16, chunk: int = 16, max_query: int = 24) -> LLM:
    """The checkpoint behind the public names, on the programs that all tests share: not to be closed."""
    shared = engines.model(directory)
    tokenizer = Tokenizer.from_directory(directory, shared.config)
    towers = frozenset(shared.media._programs)
    fields = ["config", "engine", "tokenizer", "processor", "render_chat", "open_drafts", "summary"]
    loaded: Any = dataclasses.make_dataclass("Loaded", fields)
    engine = engines.engine(directory, chunk=chunk, shape=engines.cache_shape(page, max_query=max_query))
    processor = Processor(shared.config, tokenizer, towers)
    return LLM(loaded(shared.config, engine, tokenizer, processor, render, None, ""))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("media") / "model", num_hidden_layers=2, local_layer_ids=[0])


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return open_llm(directory)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[Prompt]:
    """Images and audio among texts; an image alone; audio at the very end."""
    rng = np.random.default_rng(0)

    def image(rows: int) -> dict[str, Any]:
        return {"type": "image", "image": rng.normal(size=(rows, 2, 40, 40, 3)).astype(np.float32)}

    def clip(rows: int) -> dict[str, Any]:
        return {"type": "audio", "audio": rng.integers(0, 16, (rows, 80)).astype(np.int32)}

    mixed = llm.processor.prompt(["Compare ", image(21), " with ", clip(9), " and ", image(5), "!"])
    alone = llm.processor.prompt([image(18)])
    heard = Prompt([3, *[llm.processor.slots["audio"]] * 4], audios=[clip(4)["audio"]])
    return [mixed, alone, heard]


def inside(llm: LLM, prompt: Prompt | str) -> tuple[np.ndarray, np.ndarray]:
    """Logits after each token, and the residual stream before the first layer, by one program for both."""
    chunks = list(llm._evaluate(prompt, trace=True))
    return np.concatenate([logits for logits, _ in chunks]), np.concatenate([tape["hidden.0"] for _, tape in chunks])


TEXTS = ["Once upon a time there was", "!"]


# Against the reference


def oracle_prompts(answers: dict[str, np.ndarray]) -> dict[str, tuple[Prompt, np.ndarray]]:
    """Each prompt with its logits. The reference keeps one of a still's two equal time slots."""
    patches = np.stack([answers["image.120x81.patches"]] * 2, axis=1)
    image = Prompt(answers["image_prompt.ids"], images=[patches]), answers["image_prompt.logits"]
    audio_ids, audio_logits = answers["audio_prompt.ids"], answers["audio_prompt.logits"]
    return {
        "image": image,
        "wave": (Prompt(audio_ids, audios=[(answers["audio.noise.wave"], 16000)]), audio_logits),
        "bins": (Prompt(audio_ids, audios=[answers["audio.noise.bins"]]), audio_logits),
    }


SLOW = [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((16, 7), (16, 5), (16, 1), (64, 16))]


@pytest.mark.parametrize(("page", "chunk"), [(4, 64), (4, 16), *SLOW])
def test_reference_logits(
    page: int, chunk: int, oracle_dir: Callable[..., Path], expected: Callable[..., dict[str, np.ndarray]]
) -> None:
    """Whole, and cut inside an item, and inside the page that its rows share."""
    llm = open_llm(oracle_dir("tiny"), page, chunk, max_query=64)
    for prompt, logits in oracle_prompts(expected("tiny")).values():
        assert_close(llm.score(prompt), logits)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "fmt"), [("tiny", "bf16"), ("wide", "nvfp4"), ("gpu", "nvfp4")])
def test_reference_logits_of_the_full_sets(preset: str, fmt: str) -> None:
    """Those whose towers are too large to keep in the repository."""
    directory = conftest.BESIDE / preset
    if not directory.is_dir():
        pytest.skip(f"{directory} is not there")
    llm = open_llm(directory / fmt, chunk=16)
    for prompt, logits in oracle_prompts(load_file(directory / f"expected-{fmt}.safetensors")).values():
        assert_close(llm.score(prompt), logits)


@pytest.mark.slow
def test_on_a_mesh_of_two(oracle_dir: Callable[..., Path], expected: Callable[..., dict[str, np.ndarray]]) -> None:
    """Both devices compute the towers; all else is split. An image that is not ready gets the pre-scaling of the checkpoint."""
    answers = expected("tiny")
    with inkling_jax.load(oracle_dir("tiny"), dtype="float32", slots=1, chunk=16, mesh="tensor=2", quiet=True) as two:
        for prompt, logits in oracle_prompts(answers).values():
            assert_close(two.score(prompt), logits)
        scaled = two.processor.prompt([{"type": "image", "image": answers["image.120x81.rgb"]}])
        assert len(scaled.token_ids) == 1 + answers["image_x2.120x81.num_patches"]
        assert two.score(scaled).shape == (36, 500)


# Where rows go


def test_rows_stand_in_for_embeddings(llm: LLM, directory: Path, prompts: list[Prompt]) -> None:
    """Media rows are the tower's to the bit and not normed again; what lies between them is the normed embedding (spec 2.1)."""
    tensors = {name: array.astype(np.float64) for name, array in read_tensors(directory).items()}
    table = tensors["model.llm.embed.weight"]
    embedded = table / np.sqrt((table * table).mean(axis=1, keepdims=True) + 1e-6) * tensors["model.llm.embed_norm.weight"]
    for prompt in prompts:
        right = embedded[np.asarray(prompt.token_ids)]
        _, first = inside(llm, prompt)
        for item in llm.processor.items(prompt):
            place = slice(item.begin, item.begin + len(item.values))
            right[place] = answer(item, tensors)
            piece = np.zeros((256, *item.values.shape[1:]), item.values.dtype)
            piece[: len(item.values)] = item.values
            media = llm.engine.media
            assert np.array_equal(first[place], media._programs[item.tower](media._leaves, piece)[: len(item.values)])
        np.testing.assert_allclose(first, right, atol=2e-5)


# However they are cut


@pytest.fixture(scope="module")
def greedy(llm: LLM, prompts: list[Prompt]) -> list[Completion]:
    """Continuations of each prompt by itself."""
    return [llm.generate(prompt, SHORT)[0] for prompt in prompts]


def test_tokens_are_the_best_of_the_scored_sequence(llm: LLM, prompts: list[Prompt], greedy: list[Completion]) -> None:
    for prompt, made in zip(prompts, greedy, strict=True):
        count = len(made.token_ids)
        logits, _ = inside(llm, dataclasses.replace(prompt, token_ids=[*prompt.token_ids, *made.token_ids]))
        logits = logits[-count - 1 : -1]
        logits[:, list(llm.processor.slots.values())] = -np.inf
        assert tuple(logits.argmax(axis=1)) == made.token_ids and count == SHORT.max_tokens


@pytest.mark.parametrize("chunk", [7, 1])
def test_cuts_change_nothing(chunk: int, llm: LLM, directory: Path, prompts: list[Prompt], greedy: list[Completion]) -> None:
    """Chunks that begin and end inside items and inside what lies between them."""
    cut = open_llm(directory, chunk=chunk)
    assert [cut.generate(prompt, SHORT)[0] for prompt in prompts] == greedy
    assert_close(inside(cut, prompts[0])[0], inside(llm, prompts[0])[0], 1e-5)


def test_in_one_batch_with_texts(llm: LLM, prompts: list[Prompt], greedy: list[Completion]) -> None:
    """More than there are slots, in two orders: chunks hold parts of several prompts, with media and without."""
    alone = [*(llm.generate(text, SHORT)[0] for text in TEXTS), *greedy]
    for order in ([2, 0, 3, 1, 4, 2], [1, 4, 0, 2, 3, 3]):
        assert llm.generate([[*TEXTS, *prompts][i] for i in order], SHORT) == [alone[i] for i in order]
    assert not llm.engine.media._placed and engines.all_given_back(llm.engine)


def test_streamed(llm: LLM, prompts: list[Prompt], greedy: list[Completion]) -> None:
    """The tokens of generate; a stream that is dropped while the prompt is read leaves nothing behind."""
    pieces = list(llm.stream(prompts[0], SHORT))
    assert sum((piece.token_ids for piece in pieces), ()) == greedy[0].token_ids
    stream = llm.stream(prompts[0], SHORT)
    next(stream)
    stream.close()
    chunks = llm._evaluate(prompts[0], trace=True)
    next(chunks)
    chunks.close()
    assert not llm.engine.media._placed and engines.all_given_back(llm.engine)


# What they cost


def test_texts_keep_their_programs(llm: LLM, prompts: list[Prompt], caplog: pytest.LogCaptureFixture) -> None:
    """Media add programs for prompts and none for decoding; once these are there, other media of other sizes compile nothing."""
    programs = llm.engine.programs

    def count() -> dict[str, int]:
        return {name: getattr(programs, name)._cache_size() for name in ("prefill", "decode", "score")}

    for text in (*TEXTS, TEXTS):
        llm.generate(text, SHORT)
    inside(llm, TEXTS[0])
    warm = count()
    for prompt in prompts:
        llm.generate(prompt, SHORT)
        inside(llm, prompt)
    after = count()
    assert after["decode"] == warm["decode"]
    rng = np.random.default_rng(1)
    values = rng.normal(size=(300, 2, 40, 40, 3)).astype(np.float32)
    others = [llm.processor.prompt([{"type": "image", "image": values[:rows]}, "a"]) for rows in (1, 300)]
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for prompt in [*others, *TEXTS, *prompts]:
            llm.generate(prompt, SHORT)
        for prompt in others:
            inside(llm, prompt)
        assert not caplog.messages
    assert count() == after


def test_steps_without_rows_take_none(llm: LLM, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    """A text's steps have no more inputs than before there were towers, nor have a prompt's chunks that hold text alone."""
    given: list[bool] = []
    prefill = llm.engine.programs.prefill
    monkeypatch.setattr(
        llm.engine.programs,
        "prefill",
        lambda *args, **options: given.append(args[2].media is not None) or prefill(*args, **options),
    )
    llm.generate(TEXTS[0], SHORT)
    assert given and not any(given)
    given.clear()
    slot = llm.processor.slots["image"]
    llm.generate(Prompt([1] * 20 + [slot] * 5 + [1] * 20, images=[prompts[1].images[0][:5]]), SHORT)
    assert given == [False, True, False]


def test_towers_run_once_a_request(directory: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    """For all of a request's items and samples together, and in the next turn only for what is new."""
    llm = open_llm(directory)
    media = llm.engine.media
    monkeypatch.setattr(media, "_programs", dict(media._programs))
    media._kept.clear()
    media._known.clear()
    calls = record_calls(media)
    mixed = prompts[0]
    llm.generate(mixed, dataclasses.replace(SHORT, n=3))
    assert {name: len(shapes) for name, shapes in calls.items()} == {"vision": 1, "audio": 1}
    inside(llm, mixed)
    slot = llm.processor.slots["image"]
    turn = Prompt([*mixed.token_ids, 5, slot, slot, 6], images=[*mixed.images, prompts[1].images[0][:2]], audios=mixed.audios)
    first = llm.generate(turn, SHORT)
    assert {name: len(shapes) for name, shapes in calls.items()} == {"vision": 2, "audio": 1}
    media._kept.clear()
    media._known.clear()
    assert llm.generate(turn, SHORT) == first
    assert {name: len(shapes) for name, shapes in calls.items()} == {"vision": 3, "audio": 2}


# What is refused


def test_a_mismatch_is_refused_before_anything_runs(llm: LLM, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    """By every entrance, alone and beside a good prompt."""
    monkeypatch.setattr(llm.engine.media, "admit", lambda *_: pytest.fail("a tower was asked"))
    bad = dataclasses.replace(prompts[0], images=prompts[0].images[:1])
    for call in (llm.score, llm.trace, llm.generate, llm.stream, lambda prompt: llm.generate([prompts[1], prompt])):
        with pytest.raises(InputError, match="nothing is given for the image placeholder at token .* 26 image placeholders"):
            call(bad)
    assert not llm.engine.scheduler.running and not llm.engine.scheduler.waiting


def test_a_model_of_text_refuses_media_by_name(oracle_dir: Callable[..., Path], prompts: list[Prompt]) -> None:
    """Its engine does so too, for whoever comes another way."""
    llm = open_llm(oracle_dir("wide"))
    assert llm.processor.towers == frozenset()
    with pytest.raises(InputError, match="the prompt holds images: this model has no vision tower"):
        llm.score(Prompt([1], images=[object()]))
    item = MediaItem("vision", prompts[1].images[0], 0)
    with pytest.raises(InputError, match="an item for the vision tower, which this model has not"):
        next(llm.engine.evaluate([1] * 18, media=(item,)))
    assert not llm.engine.scheduler.running
