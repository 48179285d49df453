"""With `deterministic`, what else runs changes no bit of a request, in bfloat16; without it rounding does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import engines
import jax.numpy as jnp
import numpy as np
import pytest
from engines import Result

from inkling_jax.engine.engine import Engine
from inkling_jax.engine.request import SamplingParams
from inkling_jax.kernels.paged_attention.plan import plan_decode, plan_fixed, tile_range

LENGTHS = (37, 5, 50, 21)
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=20)


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, 490, length).tolist() for length in LENGTHS]


def company(engine: Engine, order: list[int]) -> Result:
    """What the first prompt leads to, in an engine where these run, in this order."""
    results = engines.run(engine, [prompts()[i] for i in order], PARAMS)
    return results[order.index(0)]


def test_company_changes_bits_only_without_it(oracle_dir: Callable[..., Path]) -> None:
    """Alone, first of four, last of four, second of two: logprobs to the bit. One row and four are not the same product."""
    orders = ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0])
    engine = engines.small_engine(oracle_dir("tiny"), deterministic=True)
    alone = company(engine, [0])
    assert len(alone.tokens) == 24
    assert all(company(engine, order) == alone for order in orders)
    usual = engines.small_engine(oracle_dir("tiny"))
    assert any(company(usual, order) != company(usual, [0]) for order in orders)


def test_prompts_are_read_alone_and_cut_alike(oracle_dir: Callable[..., Path]) -> None:
    """A chunk holds tokens of one prompt, from a multiple of the chunk's size; every step has one of two shapes."""
    engine = engines.small_engine(oracle_dir("tiny"), deterministic=True)
    assert (engine.shapes.chunks, engine.shapes.rows, engine.shapes.contexts) == ((16,), (4,), (256,))
    assert len(engine.samplings) == 1
    seen, planned = [], engine.scheduler.plans

    def note() -> list:
        plans = planned()
        seen.extend([(len(s.request.prompt_ids), begin, end) for s, begin, end in plan.parts] for plan in plans)
        assert not any(plan.parts and plan.decoding for plan in plans)
        return plans

    engine.scheduler.plans = note
    company(engine, [3, 0, 1, 2])
    read = [part for parts in seen for part in parts]
    assert all(len(parts) <= 1 for parts in seen)
    assert sorted(read) == sorted((n, begin, min(n, begin + 16)) for n in LENGTHS for begin in range(0, n, 16))


# The division of the keys by Hopper's kernel.


ROWS = [
    ((1,), (1,), None),
    ((700, 0, 64, 65, 5000), (1, 0, 1, 1, 1), None),
    ((700, 0, 64, 65, 5000, 0), (9, 0, 2, 1, 9, 0), 512),
    ((0, 0), (0, 0), None),
    ((70000, 1024, 1025), (1, 1, 1), None),
]


def parts_of(lengths: tuple[int, ...], counts: tuple[int, ...], window: int | None, context: int) -> dict[int, set]:
    """By row, what programs do of it: (head, first tile, end). Checks that merges name just these programs."""
    start = np.concatenate([[0], np.cumsum(counts)[:-1]])
    rows = [jnp.asarray(a, jnp.int32) for a in (start, counts, lengths)]
    plan = plan_fixed(*rows, tokens=sum(counts) + 1, kv_heads=2, window=window, context=context)
    _, tiles = (np.asarray(a) for a in tile_range(rows[1], rows[2], window))
    done: dict[int, set] = {row: set() for row in range(len(counts))}
    programs: dict[tuple[int, int], list[int]] = {}
    for program in range(len(plan.row)):
        row, head, skip, count = (int(a[program]) for a in (plan.row, plan.head, plan.skip, plan.tiles))
        if count:
            done[row].add((head, skip, skip + count))
            programs.setdefault((row, head), []).append(program)
    for row, parts in done.items():
        covered = sorted((head, tile) for head, begin, end in parts for tile in range(begin, end))
        assert covered == [(head, tile) for head in range(2) for tile in range(tiles[row])]
    named = {
        (int(plan.row[c]), int(plan.head[c])): list(range(c - 1, c + int(plan.followers[c])))
        for c in range(len(plan.row))
        if plan.followers[c]
    }
    assert named == {item: several for item, several in programs.items() if len(several) > 1}
    assert np.asarray(plan.idle).tolist() == [0] * sum(counts) + [1]
    return done


@pytest.mark.parametrize(("lengths", "counts", "window"), ROWS)
@pytest.mark.parametrize("context", [70016, 1 << 20])
def test_a_fixed_plan_cuts_every_row_as_if_it_were_alone(
    lengths: tuple[int, ...], counts: tuple[int, ...], window: int | None, context: int
) -> None:
    """All tiles once, named for their merge; and a row's parts are those that it has in a plan of its own."""
    together = parts_of(lengths, counts, window, context)
    for row, parts in together.items():
        assert parts == parts_of((lengths[row],), (counts[row],), window, context)[0]
    most = max(len({begin for _, begin, _ in parts}) for parts in together.values())
    assert most <= 65


def test_equal_shares_do_not() -> None:
    """The usual plan gives a row's parts other bounds when it has company: what the fixed one is for."""
    rows = [jnp.asarray(a, jnp.int32) for a in ((0, 1), (1, 1), (2000, 3000))]
    options = {"tokens": 2, "kv_heads": 1, "window": None, "programs": 8, "shortest": 2}
    first = plan_decode(*(a[:1] for a in rows), **options)
    both = plan_decode(*rows, **options)
    assert int(first.tiles[0]) != int(both.tiles[0])


@pytest.mark.gpu
def test_company_changes_no_bit_on_hopper(oracle_dir: Callable[..., Path]) -> None:
    """The same with the kernels for Hopper: tokens and logprobs alone, among three others, and last of four."""
    from inkling_jax.llm import load

    options = {"kernels": "sm90", "slots": 4, "max_context": 512, "chunk": 64, "deterministic": True, "quiet": True}
    with load(oracle_dir("gpu"), **options) as llm:
        lot = [np.random.default_rng(n).integers(0, 250, n).tolist() for n in (150, 5, 70, 31)]
        (alone,) = llm.generate([lot[0]], PARAMS)
        for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
            found = llm.generate([lot[i] for i in order], PARAMS)[order.index(0)]
            assert (found.token_ids, found.logprobs) == (alone.token_ids, alone.logprobs)
