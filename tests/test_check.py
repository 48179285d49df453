"""The check of the device's state: silent where all is well, and each kind of fault is found."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import jax.numpy as jnp
import numpy as np
import pytest
from engines import GREEDY, Result

from inkling_jax.cache.paged import CacheShape
from inkling_jax.engine.check import KINDS, _overwritten
from inkling_jax.engine.engine import Engine
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.state import EngineState
from inkling_jax.errors import InklingError


def engine_of(directory: Path) -> Engine:
    return engines.small_engine(directory, check=True)


def prompts() -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(0, 497, length).tolist() for length in (1, 5, 33, 60, 2, 17)]


@pytest.fixture(scope="module")
def tiny(oracle_dir: Callable[..., Path]) -> Path:
    return oracle_dir("tiny")


def test_a_run_agrees_and_is_counted(tiny: Path) -> None:
    """More requests than slots, stops, cancellations, a prompt scored in between: no difference, and pairs of every kind."""
    engine = engine_of(tiny)
    with pytest.raises(InklingError, match="compared no positions"):
        engine.check.report()
    ids = [engine.add(Request(tuple(prompt), GREEDY)) for prompt in prompts()]
    same = engine.add(Request((7,) * 40, SamplingParams(seed=3, max_tokens=30)))
    results: dict[int, Result] = {}
    for turn in range(12):
        engines.gather(engine.step(), results)
        if turn == 6:
            engine.cancel(ids[2])
    engines.finish(engine, results)
    beside = engine.add(Request(tuple(prompts()[2]), GREEDY))
    for _ in engine.evaluate(prompts()[3]):
        engines.gather(engine.step(), results)
    engines.finish(engine, results)
    assert len(results[beside].tokens) == 40
    assert {len(results[i].tokens) for i in ids if i != ids[2]} == {40} and same in results
    counted = engine.check.report()
    assert set(counted) == set(KINDS)
    appended = sum(len(prompt) + 39 for i, prompt in zip(ids, prompts(), strict=True) if i != ids[2])
    assert counted["positions"] >= 2 * appended  # in a layer of each kind
    assert engines.run(engine, prompts()[:2]) == engines.run(engines.small_engine(tiny), prompts()[:2])


@pytest.mark.slow
def test_lost_slots_prefixes_and_a_failure(tiny: Path) -> None:
    """Little memory, prompts that begin alike, and an embedding row of NaN that one of them meets: the check finds nothing, that
    request ends alone, naming the step, and each slot serves a next one as a fresh engine does, to the bit.
    """
    shape, bad = CacheShape(engines.SLOTS, 16, 20, 20, 256, 24), 480
    params = dataclasses.replace(GREEDY, bad_token_ids=(bad,), logprobs=2)
    random = np.random.default_rng(2)
    beginning, *own = (random.integers(0, 470, n).tolist() for n in (40, 30, 9, 20, 50, 12, 33, 41))
    lot = [beginning + rest for rest in own]
    lot[3][60] = bad

    def spoilt_engine() -> Engine:
        engine = engines.small_engine(tiny, shape=shape, check=True, prefix_bytes=1 << 20)
        embed = engine.programs.paths.index("embed")
        engine.leaves = list(engine.leaves)
        engine.leaves[embed] = engine.leaves[embed].at[bad].set(jnp.nan)
        return engine

    engine = spoilt_engine()
    results = engines.run(engine, lot, params)
    assert [r.finish_reason for r in results] == ["error" if i == 3 else "length" for i in range(len(lot))]
    assert re.fullmatch(r"the logits of step \d+ are not finite \(generated token 1\)", results[3].error or "")
    assert engine.scheduler.preemptions and engine.prefix_statistics.hits and engine.check is not None
    assert all(engine.check.report().values())
    (fresh,) = engines.run(spoilt_engine(), [own[1]], params)
    for _ in range(engines.SLOTS):  # slots are taken from the last one freed: hold each in turn
        assert engines.run(engine, [own[1]], params) == [fresh]
        engine.scheduler.free_slots.insert(0, engine.scheduler.free_slots.pop())


def _length(state: EngineState, slot: int) -> EngineState:
    return dataclasses.replace(state, length=state.length.at[slot].add(1))


def _live(state: EngineState, slot: int) -> EngineState:
    return dataclasses.replace(state, live=state.live.at[slot].set(False))


def _page(state: EngineState, slot: int) -> EngineState:
    table = state.cache.local_table
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, local_table=table.at[slot, 0].add(1)))


def _layer(state: EngineState, **arrays: Any) -> EngineState:
    layers = (dataclasses.replace(state.cache.layers[0], **arrays), *state.cache.layers[1:])
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=layers))


def _position(state: EngineState, slot: int) -> EngineState:
    """The first layer's keys of some place are written to another page, which nobody holds."""
    pages = state.cache.layers[0].k_pages
    return _layer(state, k_pages=pages.at[60, :, 3].set(pages[0, :, 0] + 1))


def _stray(state: EngineState, slot: int) -> EngineState:
    """Another slot's convolution inputs are overwritten."""
    ring = state.cache.layers[0].mlp_conv
    return _layer(state, mlp_conv=ring.at[(slot + 1) % engines.SLOTS, 1].add(1.0))


FAULTS = [
    ("lengths", _length, r"tokens in the cache: the device has \d+, the host \d+"),
    ("lengths", _live, "live: the device has 0|live: the device has False"),
    ("pages", _page, r"local page table, column 0"),
    ("positions", _position, r"local page 60, place 3"),
    ("conv", _stray, r"convolution slot \d, place 1"),
]


# a slot is not live before its prompt has been read
CASES = [(at, *fault) for fault in FAULTS for at in (("decode",) if fault[1] is _live else ("prefill", "decode"))]


@pytest.mark.parametrize(("at", "kind", "fault", "told"), CASES, ids=[f"{at} {fault.__name__}" for at, _, fault, _ in CASES])
def test_each_kind_of_fault_is_found(
    at: str, kind: str, fault: Callable[[EngineState, int], EngineState], told: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that leaves something else on the device than it should ends with an error that names it."""
    engine = engine_of(tiny)
    engine.add(Request(tuple(prompts()[2]), GREEDY))
    step = getattr(engine.programs, at)

    def faulty(leaves: Any, state: EngineState, inputs: Any, **static: Any) -> Any:
        made, state = step(leaves, state, inputs, **static)
        return made, fault(state, engine.scheduler.running[0].slot)

    monkeypatch.setattr(engine.programs, at, faulty)
    with pytest.raises(InklingError, match=f"check, {kind}: .*({told})"):
        for _ in range(10):
            engine.step()


def test_a_lost_write_of_convolution_inputs_is_found(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that returns the rings as they were."""
    engine = engine_of(tiny)
    engine.add(Request(tuple(prompts()[2]), GREEDY))
    step = engine.programs.decode

    def lossy(leaves: Any, state: EngineState, inputs: Any, **static: Any) -> Any:
        names = ("k_conv", "v_conv", "attn_conv", "mlp_conv")
        kept = [{name: jnp.copy(getattr(layer, name)) for name in names} for layer in state.cache.layers]
        made, state = step(leaves, state, inputs, **static)
        layers = tuple(dataclasses.replace(layer, **old) for layer, old in zip(state.cache.layers, kept, strict=True))
        return made, dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=layers))

    monkeypatch.setattr(engine.programs, "decode", lossy)
    with pytest.raises(InklingError, match=r"check, conv: slot \d, convolution inputs of position \d+, written"):
        for _ in range(10):
            engine.step()


def test_what_a_ring_held_before() -> None:
    """By writing positions one by one into a ring of three."""
    for begin in range(8):
        for end in range(begin, 14):
            ring = [-1] * 3
            for position in range(begin):
                ring[position % 3] = position
            before = list(ring)
            for position in range(begin, end):
                ring[position % 3] = position
            wanted = sorted((i, ring[i], before[i]) for i in range(3) if ring[i] != before[i])
            found = sorted((place, position, max(old, -1)) for place, position, old in _overwritten(begin, end, 3))
            assert found == wanted
