"""Many requests at once, with little memory: each yields the tokens that it yields alone."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
from engines import Result
from text_checkpoint import write_text_checkpoint

from inkling_jax.cache.paged import CacheShape
from inkling_jax.engine.engine import Engine
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.scheduler import Plan
from inkling_jax.media import MediaItem

IDS = 250  # those above are control tokens


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, one of each kind, both towers."""
    return write_text_checkpoint(tmp_path_factory.mktemp("serving") / "model")


@dataclasses.dataclass
class Seen:
    """What happened to an engine whose plans it looks at."""

    mixed: int = 0  # steps that read prompts while others decoded
    most: int = 0  # sequences in one step

    def watch(self, engine: Engine) -> None:
        plans = engine.scheduler.plans

        def seen() -> list[Plan]:
            (found,) = plans()
            self.mixed += bool(found.parts and found.decoding)
            self.most = max(self.most, len(found.parts) + len(found.decoding))
            return [found]

        engine.scheduler.plans = seen


def settings(draw: np.random.Generator) -> SamplingParams:
    """Greedy, plain noise, or all that a sampler has."""
    params: dict[str, Any] = {"max_tokens": int(draw.integers(1, 60)), "seed": int(draw.integers(1 << 30)), "ignore_eos": True}
    kind = draw.integers(4)
    if kind == 0:
        params |= {"temperature": 0}
    elif kind == 1:
        params |= {"temperature": float(draw.uniform(0.3, 1.5)), "logprobs": int(draw.integers(4))}
    elif kind == 2:
        params |= {"top_k": int(draw.integers(2, 50)), "top_p": 0.9, "frequency_penalty": 0.7, "presence_penalty": 0.3}
    else:
        stops = draw.integers(0, IDS, 8).tolist()
        params |= {"repetition_penalty": 1.3, "min_p": 0.02, "min_tokens": params["max_tokens"] // 3, "stop_token_ids": stops}
    return SamplingParams(**params)


def requests(directory: Path, count: int, draw: np.random.Generator) -> list[Request]:
    """Prompts that begin alike or not, a few of them with a picture or a sound in what is alike."""
    config = engines.model(directory).config
    pictures = [draw.normal(size=(6, 2, 40, 40, 3)).astype(np.float32) for _ in range(2)]
    sound = draw.integers(0, 16, (9, 80)).astype(np.int32)
    beginnings = [draw.integers(0, IDS, n).tolist() for n in (40, 90, 130)]
    found = []
    for _ in range(count):
        own = draw.integers(0, IDS, int(draw.integers(1, 60))).tolist()
        ids, media = own, ()
        if draw.random() < 0.6:
            beginning = beginnings[draw.integers(3)]
            ids = beginning[: int(draw.integers(1, len(beginning) + 1))] + own
        if draw.random() < 0.15:
            which = int(draw.integers(3))
            tower, values = ("audio", sound) if which == 2 else ("vision", pictures[which])
            slot = config.audio_token_id if which == 2 else config.image_token_id
            at = min(3, len(ids))
            ids = ids[:at] + [slot] * len(values) + ids[at:]
            media = (MediaItem(tower, values, at),)
        found.append(Request(tuple(ids), settings(draw), 0, media, int(draw.integers(-1, 2))))
    return found


def together(engine: Engine, lot: list[Request], draw: np.random.Generator, between: Any) -> tuple[list[Result], set[int]]:
    """Results of requests that come a few at a time, and the numbers of those that were cancelled on the way."""
    ids: list[int] = []
    results: dict[int, Result] = {}
    cancelled: set[int] = set()
    while len(ids) < len(lot) or engine.busy:
        for _ in range(min(int(draw.poisson(0.5)), len(lot) - len(ids))):
            ids.append(engine.add(lot[len(ids)]))
        if ids and draw.random() < 0.03:
            victim = int(draw.integers(len(ids)))
            if results.get(ids[victim], Result([], [])).finish_reason is None:
                engine.cancel(ids[victim])
                cancelled.add(victim)
        between(engine)
        engines.gather(engine.step(), results)
    return [results.get(i, Result([], [])) for i in ids], cancelled


@pytest.mark.parametrize(("count", "ahead"), [(40, 1), pytest.param(200, 1, marks=pytest.mark.slow)])
def test_each_request_is_served_as_if_alone(count: int, ahead: int, directory: Path) -> None:
    """Random lengths, settings, arrivals, priorities, cancellations and media; pages for one of the longest and little more."""
    draw = np.random.default_rng(count)
    shape = CacheShape(engines.SLOTS, 16, 17, 17, 256, 24)
    lot = requests(directory, count, draw)
    config = engines.model(directory).config.text
    poison = functools.partial(engines.poison, local_layers=config.local_layers)
    engine = engines.engine(directory, shape=shape, ahead=ahead, prefix_bytes=1 << 20)
    seen = Seen()
    seen.watch(engine)
    results, cancelled = together(engine, lot, draw, poison)
    alone = engines.engine(directory, shape=shape, ahead=ahead)
    for number, (request, found) in enumerate(zip(lot, results, strict=True)):
        wanted: dict[int, Result] = {}
        reference = alone.add(request)
        engines.finish(alone, wanted)
        if number in cancelled:
            assert found.finish_reason is None and found.tokens == wanted[reference].tokens[: len(found.tokens)], number
            continue
        assert (found.tokens, found.finish_reason) == (wanted[reference].tokens, wanted[reference].finish_reason), number
        logprobs = [[entry.logprob for entry in result.logprobs] for result in (found, wanted[reference])]
        np.testing.assert_allclose(*logprobs, atol=1e-4)
    assert engines.all_given_back(engine) and engines.all_given_back(alone)
    counts = engine.prefix_statistics
    assert min(engine.scheduler.preemptions, counts.hits, counts.evicted, seen.mixed) >= count // 40 and cancelled
    assert seen.most == engines.SLOTS and counts.reused < counts.asked


def test_one_long_sequence_gets_all_pages(directory: Path) -> None:
    """Of four whose contexts come to be full with pages for one of them, all end, the first without losing its slot."""
    engine = engines.engine(directory, shape=engines.cache_shape(pages=32))
    lot = [engine.add(Request((n, 7, 9), SamplingParams(temperature=0, ignore_eos=True))) for n in range(4)]
    first = engine._sequences[lot[0]]
    results: dict[int, Result] = {}
    engines.finish(engine, results)
    assert [len(results[i].tokens) for i in lot] == [engines.CONTEXT - 2] * 4
    assert not first.preempted and engine.scheduler.preemptions >= 3 and engines.all_given_back(engine)


def test_a_deadline_ends_a_request(directory: Path) -> None:
    """Waiting or decoding, it ends as cancelled and says how far it came; the others go on."""
    engine = engines.engine(directory)
    now = 0.0
    engine.scheduler.clock = lambda: now
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    ids = [engine.add(Request((5, 6), greedy, deadline=seconds)) for seconds in (None, 2.0, None, None, 1.0)]
    results: dict[int, Result] = {}
    while len(results.get(ids[1], Result([], [])).tokens) < 8:
        engines.gather(engine.step(), results)
    now = 3.0
    engines.finish(engine, results)
    assert [results[i].finish_reason for i in ids] == ["length", "cancelled", "length", "length", "cancelled"]
    made = len(results[ids[1]].tokens)
    assert results[ids[1]].error == f"the deadline of 2 s has passed ({made} tokens were made)"
    assert results[ids[4]].error == "the deadline of 1 s has passed (0 tokens were made)"
    assert results[ids[1]].tokens == results[ids[0]].tokens[:made] and engines.all_given_back(engine)
