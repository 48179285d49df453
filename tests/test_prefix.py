"""Prompts that begin as others did go on from there, and nothing tells them from prompts that were read in full."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import engines
import numpy as np
import pytest
from engines import GREEDY, Result
from text_checkpoint import write_text_checkpoint

from inkling_jax.cache.prefix import chain
from inkling_jax.engine.engine import Engine
from inkling_jax.engine.request import Request
from inkling_jax.media import MediaItem

LONGEST = 130
TAIL = 3
SHORT = dataclasses.replace(GREEDY, max_tokens=4, logprobs=0)
DRAW = np.random.default_rng(0)
TEXT = DRAW.integers(0, 250, LONGEST + TAIL).tolist()
OTHER = DRAW.integers(0, 250, 40).tolist()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers: local, global with a dense part, local with experts. The window is 16 tokens."""
    return write_text_checkpoint(tmp_path_factory.mktemp("prefix") / "model")


@pytest.fixture(scope="module")
def open_engine(directory: Path) -> Callable[..., Engine]:
    """A fresh engine whose pages hold `page` tokens; `kept` is how many prefixes it may keep."""

    def build(page: int, kept: int, *, chunk: int = 16, spacing: int = 64) -> Engine:
        shape = engines.cache_shape(page)
        engine = engines.engine(directory, shape=shape, chunk=chunk, prefix_bytes=1 << 40, prefix_spacing=spacing)
        return engines.engine(
            directory, shape=shape, chunk=chunk, prefix_bytes=kept * engine.snapshots.nbytes, prefix_spacing=spacing
        )

    return build


def run(engine: Engine, ids: list[int], **more) -> tuple[Result, np.ndarray, int]:
    """What a prompt leads to, all convolution state once it is read, bit by bit, and how many of its tokens were reused."""
    before = dataclasses.replace(engine.prefix_statistics)
    request, results = engine.add(Request(tuple(ids), SHORT, **more)), {}
    state = None
    while engine.busy:
        engines.gather(engine.step(), results)
        running = engine.scheduler.running
        if state is None and running and not running[0].reading:
            state = np.asarray(engine.snapshots._take(engine.state.cache, np.int32(running[0].slot)))
    assert state is not None
    assert engine.prefix_statistics.asked - before.asked in (0, len(ids))
    return results[request], state, engine.prefix_statistics.reused - before.reused


def assert_same(found: tuple[Result, np.ndarray, int], cold: tuple[Result, np.ndarray, int]) -> None:
    """Tokens, log-probabilities and every bit of the convolutions' state."""
    assert found[0].tokens == cold[0].tokens and found[0].finish_reason == cold[0].finish_reason == "length"
    np.testing.assert_allclose([p.logprob for p in found[0].logprobs], [p.logprob for p in cold[0].logprobs], atol=1e-5)
    np.testing.assert_array_equal(found[1].view(np.int32), cold[1].view(np.int32))


def test_cuts_at_every_length(open_engine) -> None:
    """With pages of one token a hit may have any length: each from 1 to 130, then other tokens, against a run without reuse."""
    warm, cold = open_engine(1, 1000), open_engine(1, 0)
    for length in range(2, LONGEST + 2):
        run(warm, TEXT[:length])
    lengths = []
    for length in range(1, LONGEST + 1):
        ids = TEXT[:length] + [(token + 1) % 250 for token in TEXT[length : length + TAIL]]
        found = run(warm, ids)
        lengths.append(found[2])
        assert_same(found, run(cold, ids))
    assert lengths == list(range(1, LONGEST + 1))
    assert engines.all_given_back(warm) and engines.all_given_back(cold)


@pytest.mark.parametrize("chunk", [16, pytest.param(7, marks=pytest.mark.slow)])
def test_cuts_inside_pages(chunk: int, open_engine) -> None:
    """With pages of 16 tokens: every length of a common beginning, of which the whole pages that were kept are reused."""
    warm, cold = open_engine(16, 1000, chunk=chunk), open_engine(16, 0, chunk=chunk)
    run(warm, TEXT)
    for length in range(1, LONGEST + 1, 3):
        ids = TEXT[:length] + OTHER[: 1 + length % 40]
        found = run(warm, ids)
        assert found[2] <= length and found[2] % 16 == 0
        assert_same(found, run(cold, ids))
        again = run(warm, ids)
        assert again[2] == (len(ids) - 1) // 16 * 16  # the end of the prompt was kept
        assert_same(again, found)
    assert warm.prefix_statistics.evicted == 0


def test_a_prompt_that_is_kept_whole_runs_its_last_token(open_engine) -> None:
    """Of pages that hold it to the end, the last is read again; with pages of one token, one token."""
    for page in (1, 16):
        engine, ids = open_engine(page, 9), TEXT[:64]
        first, second = run(engine, ids), run(engine, ids)
        assert (first[2], second[2]) == (0, 64 - page)
        assert_same(second, first)


def test_where_prefixes_are_kept(open_engine) -> None:
    """At the end of a prompt, every `spacing` tokens within it, and where another prompt has parted from it."""
    engine = open_engine(16, 1000, spacing=32)
    run(engine, TEXT[:100])
    assert engine.prefix_statistics.kept == 3  # 32, 64, 96
    parted = TEXT[:50] + OTHER
    assert [run(engine, ids)[2] for ids in (parted, TEXT[:50] + OTHER[::-1])] == [32, 48]
    engine = open_engine(16, 1000, spacing=1000)
    assert [run(engine, ids)[2] for ids in (TEXT, parted, TEXT[:50] + OTHER[::-1], TEXT[:20])] == [0, 0, 48, 0]


def test_the_least_recently_used_go_first(open_engine) -> None:
    """Room for two: the one that was used again outlives the one that was not."""
    engine = open_engine(16, 2)
    texts = [[first, *TEXT[:32]] for first in (1, 2, 3)]
    assert [run(engine, texts[i])[2] for i in (0, 1, 0, 2, 0, 1)] == [0, 0, 32, 0, 32, 0]
    counts = engine.prefix_statistics
    assert (counts.asked, counts.reused, counts.hits, counts.kept, counts.evicted) == (6 * 33, 64, 2, 4, 2)


def test_pages_that_are_needed_are_taken_from_prefixes(open_engine) -> None:
    """What is kept never stands in the way: a sequence of the whole context gets all pages."""
    engine = open_engine(16, 1000)
    for first in range(20):
        run(engine, [first, *TEXT])
    assert engine.scheduler.pools["global"].free < 20
    ids = [engine.add(Request(tuple([n, *TEXT] * 3), GREEDY)) for n in range(4)]
    results: dict[int, Result] = {}
    engines.finish(engine, results)
    assert {results[i].finish_reason for i in ids} == {"length"} and engine.prefix_statistics.evicted > 0
    assert engine.scheduler.preemptions == 0 and engines.all_given_back(engine)


def test_a_prefix_of_numbers_that_are_not_finite_is_not_kept(open_engine) -> None:
    """A sequence that ends as an error takes the prefixes with it that were kept of it."""
    engine = open_engine(16, 1000)
    embed = engine.programs.paths.index("embed")
    sound = engine.leaves
    engine.leaves = [*sound]
    engine.leaves[embed] = engine.leaves[embed].at[TEXT[5]].set(np.nan)
    request, results = engine.add(Request(tuple(TEXT[:40]), SHORT)), {}
    engines.finish(engine, results)
    assert results[request].finish_reason == "error" and len(engine.scheduler.prefixes) == 0
    engine.leaves = sound
    found = run(engine, TEXT[:40])
    assert found[2] == 0
    assert_same(found, run(open_engine(16, 0), TEXT[:40]))


# Content


def test_hashes_tell_contents_apart() -> None:
    """A page's hash is of all before it too, and of media where they lie, whatever the placeholders."""
    plain = chain(TEXT[:40], 16)
    assert len(plain) == 2 and chain(TEXT[:32], 16) == plain and chain(TEXT[:47], 16)[:2] == plain
    changed = TEXT[:40]
    changed[3] += 1
    assert all(a != b for a, b in zip(plain, chain(changed, 16), strict=True))
    one, other = b"1" * 16, b"2" * 16
    variants = [[], [(2, 5, one)], [(2, 5, other)], [(3, 5, one)], [(2, 5, one), (9, 5, one)]]
    assert len({chain(TEXT[:16], 16, spans)[0] for spans in variants}) == len(variants)
    assert chain(TEXT[:40], 16, [(20, 4, one)])[0] == plain[0] != chain(TEXT[:40], 16, [(15, 4, one)])[0]
    assert chain(TEXT[:40], 16, [(33, 4, one)]) == plain  # behind the last full page


def test_pictures_are_told_apart(open_engine, directory) -> None:
    """Equal ids with another picture are another prompt; with the same one they are not, and its tower does not run again."""
    engine, cold = open_engine(16, 100), open_engine(16, 0)
    rng, image_id = np.random.default_rng(1), engines.model(directory).config.image_token_id
    pictures = [rng.normal(size=(20, 2, 40, 40, 3)).astype(np.float32) for _ in range(2)]
    ids = [3, *[image_id] * 20, *TEXT[:30]]

    def show(which: int) -> dict[str, tuple[MediaItem, ...]]:
        return {"media": (MediaItem("vision", pictures[which], 1),)}

    found = [run(engine, ids, **show(which)) for which in (0, 1, 0, 1)]
    assert [reused for _, _, reused in found] == [0, 0, 48, 48]
    for which in (0, 1):
        assert_same(found[2 + which], run(cold, ids, **show(which)))
    assert found[0][0].logprobs != found[1][0].logprobs
