"""Several schedulers as one: who goes where, with slots and pages of its own."""

from __future__ import annotations

import pytest

from inkling_jax.engine.replicas import Replicas
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.scheduler import Limits, Scheduler
from inkling_jax.errors import CapacityError

# pages of four tokens, six of each kind
LIMITS = Limits(2, 4, 6, 6, 4, 3, window=8, max_context=16, chunk=8, steps=2)


def request(prompt: int, tokens: int = 1, **more) -> Request:
    return Request(tuple(range(prompt)), SamplingParams(max_tokens=tokens), **more)


def admitted(replicas: Replicas) -> list:
    return [sequence for plan in replicas.plans() for sequence in plan.admitted]


def test_requests_go_where_most_slots_are_free() -> None:
    """Slots are numbered through, with one more in each replica for padding; nobody runs where there is no slot."""
    replicas = Replicas(LIMITS, 3)
    added = [replicas.add(request(4)) for _ in range(8)]
    assert admitted(replicas) == [added[i] for i in (0, 3, 1, 4, 2, 5)]
    assert [s.slot for s in added] == [0, 3, 6, 1, 4, 7, -1, -1] and len(replicas.waiting) == 2
    assert replicas.running == [added[i] for i in (0, 3, 1, 4, 2, 5)] and not replicas.free_slots
    replicas.retire(added[4])
    assert admitted(replicas) == [added[6]] and added[6].slot == 4


def test_replicas_have_pages_of_their_own() -> None:
    """Each takes pages from its own pool, and counts slots from its own first one where it tells of them."""
    replicas = Replicas(LIMITS, 2)
    large = [replicas.add(request(12, 4)) for _ in range(2)]
    first, second = replicas.plans()
    assert first.entries == second.entries == {"global": [(0, 0, 0), (0, 1, 1)], "local": [(0, 0, 0), (0, 1, 1)]}
    assert [s.slot for s in large] == [0, 3]
    for sequence in large:
        replicas.retire(sequence)
    assert all(pool.free == pool.pages == 6 for pool in replicas.pools.values())
    assert sorted(replicas.free_slots) == [0, 1, 3, 4]


def test_each_replica_has_a_chunk_of_its_own() -> None:
    """Where one reads a prompt, the other decodes a token beside it: a step is one program."""
    replicas = Replicas(LIMITS, 2)
    one, two, three = (replicas.add(request(n, 9)) for n in (8, 3, 2))
    assert [plan.parts for plan in replicas.plans()] == [[(one, 0, 8)], [(two, 0, 3)]] and three.slot == -1
    late = replicas.add(request(6))
    plans = replicas.plans()
    assert [s.slot for s in (one, two, three, late)] == [0, 3, 1, 4]
    assert [(plan.mixed, plan.steps) for plan in plans] == [(True, 1)] * 2
    assert [(plan.parts, plan.decoding) for plan in plans] == [([(three, 0, 2)], [one]), ([(late, 0, 6)], [two])]
    replicas.retire(three)
    replicas.retire(late)
    assert [(plan.decoding, plan.steps) for plan in replicas.plans()] == [([one], 2), ([two], 2)]
    replicas.add(request(8))
    assert [(plan.parts == [], plan.decoding, plan.steps) for plan in replicas.plans()] == [(False, [one], 1), (True, [two], 1)]


def test_who_waits_can_be_retired_and_what_never_fits_is_refused() -> None:
    replicas = Replicas(LIMITS, 2)
    sequence = replicas.add(request(4))
    replicas.retire(sequence)
    replicas.retire(sequence)
    assert sequence.done and not replicas.waiting and admitted(replicas) == []
    for scheduler in (Scheduler(LIMITS), replicas):
        with pytest.raises(CapacityError, match="the prompt has 17 tokens, the context holds 16"):
            scheduler.add(request(17))
    assert not replicas.waiting


def test_who_loses_its_slot_stays_with_its_replica() -> None:
    """And can be retired there; one that is overdue is told wherever it is."""
    now = 0.0
    replicas = Replicas(LIMITS, 2)
    replicas.schedulers[0].clock = lambda: now
    one, two = replicas.add(request(4, 9)), replicas.add(request(4, 9, deadline=1.0))
    replicas.plans()
    replicas.schedulers[1]._preempt(two)
    assert replicas.waiting == [two] and two in replicas.schedulers[1].waiting
    now = 2.0
    assert replicas.overdue() == [two]
    for sequence in (one, two, two):
        replicas.retire(sequence)
    assert not replicas.waiting and not replicas.running and len(replicas.free_slots) == 4
