"""Several schedulers as one: who goes where, with slots and pages of its own, and what a step does on each."""

from __future__ import annotations

import pytest

from inkling_jax.engine.replicas import Replicas
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.scheduler import Limits, Scheduler
from inkling_jax.errors import CapacityError

# two slots and six pages of four tokens of each kind, eight tokens a step that reads, four steps a call that does not
LIMITS = Limits(2, 4, 6, 6, 4, 4, window=8, max_context=16, chunk=8, steps=4)


def request(prompt: int, tokens: int = 1) -> Request:
    return Request(tuple(range(prompt)), SamplingParams(max_tokens=tokens))


def test_requests_go_where_most_slots_are_free() -> None:
    """Slots are numbered through, with one more in each replica for padding; nobody runs where there is no slot."""
    replicas = Replicas(LIMITS, 3)
    added = [replicas.add(request(3)) for _ in range(8)]
    plans = replicas.plans()
    assert [plan.admitted for plan in plans] == [[added[0], added[3]], [added[1], added[4]], [added[2], added[5]]]
    assert [sequence.slot for sequence in added] == [0, 3, 6, 1, 4, 7, -1, -1]
    assert replicas.waiting == added[6:] and not replicas.free_slots
    replicas.retire(added[4])
    plans = replicas.plans()
    assert [plan.admitted for plan in plans] == [[], [added[6]], []] and added[6].slot == 4


def test_replicas_have_pages_of_their_own() -> None:
    """Both take the first pages of their pools, for slots that each counts from its own first; all of it comes back."""
    replicas = Replicas(LIMITS, 2)
    sequences = [replicas.add(request(8, 4)) for _ in range(2)]
    plans = replicas.plans()
    assert plans[0].entries == plans[1].entries == {name: [(0, 0, 0), (0, 1, 1)] for name in ("global", "local")}
    for sequence in sequences:
        replicas.retire(sequence)
    assert all(pool.free == pool.pages == 6 for pool in replicas.pools.values())
    assert sorted(replicas.free_slots) == [0, 1, 3, 4] and not replicas.running


def test_all_take_steps_of_one_kind() -> None:
    """Where one reads, the others decode one token beside it; a replica with nothing to do has no rows; then several tokens."""
    replicas = Replicas(LIMITS, 3)
    long, short = replicas.add(request(12, 4)), replicas.add(request(3, 4))
    plans = replicas.plans()
    assert [plan.parts for plan in plans] == [[(long, 0, 8)], [(short, 0, 3)], []]
    plans = replicas.plans()
    assert [(plan.steps, plan.mixed) for plan in plans] == [(1, True)] * 3
    assert [plan.parts for plan in plans] == [[(long, 8, 12)], [], []]
    assert [plan.decoding for plan in plans] == [[], [short], []]
    plans = replicas.plans()
    assert [(plan.steps, plan.mixed, plan.decoding) for plan in plans] == [
        (4, False, [long]),
        (4, False, [short]),
        (4, False, []),
    ]


def test_who_waits_can_be_retired_and_what_never_fits_is_refused() -> None:
    replicas = Replicas(LIMITS, 2)
    sequence = replicas.add(request(4))
    replicas.retire(sequence)
    replicas.retire(sequence)
    assert sequence.done and not replicas.waiting and not any(plan.admitted for plan in replicas.plans())
    for scheduler in (Scheduler(LIMITS), replicas):
        with pytest.raises(CapacityError, match="the prompt has 17 tokens, the context holds 16"):
            scheduler.add(request(17))
    assert not replicas.waiting
