"""Pages, slots and turns on the host."""

from __future__ import annotations

import dataclasses

import pytest

from inkling_jax.cache.allocator import PagePool, SequencePages
from inkling_jax.cache.paged import CacheShape
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.scheduler import Limits, Plan, Scheduler
from inkling_jax.engine.sequence import PLACES, Sequence
from inkling_jax.errors import CapacityError, InputError

LIMITS = Limits(
    slots=2,
    page_size=4,
    global_pages=16,
    local_pages=10,
    global_width=10,
    local_width=5,
    window=8,
    max_context=40,
    chunk=6,
    steps=3,
)


def request(length: int, max_tokens: int | None = 4, **more) -> Request:
    return Request(tuple(range(length)), SamplingParams(temperature=0, max_tokens=max_tokens), **more)


def rows(plan: Plan) -> tuple[list, list]:
    return plan.parts, plan.decoding


def read_back(sequence: Sequence, token: int = 7) -> None:
    """Let the host see one token of a step in flight."""
    sequence.in_flight -= 1
    sequence.made.append(token)


# Pages of one sequence


def test_pages_grow_as_positions_need_them():
    pages = SequencePages(PagePool(8, "global KV"), page_size=4, width=8, window=None)
    assert [column for column, _ in pages.grow(1)] == [0]
    assert pages.grow(4) == []
    assert [column for column, _ in pages.grow(9)] == [1, 2]
    assert pages.drop_behind(9) == []  # without a window nothing is ever behind
    assert pages.pool.free == 5


def test_a_page_goes_when_its_last_position_leaves_the_window():
    """Window 8, pages of 4: the query at 10 sees positions 3 to 10, so page 0 goes with the query at 11, not before."""
    pages = SequencePages(PagePool(8, "local KV"), page_size=4, width=4, window=8)
    entries = dict(pages.grow(11))
    assert pages.drop_behind(10) == []
    assert pages.drop_behind(11) == [entries[0]]
    assert pages.drop_behind(14) == [] and pages.drop_behind(15) == [entries[1]]


def test_the_table_is_a_ring():
    """Window 4, pages of 1, a token at a time: columns 0, 1, 2, 3, 0, 1, ... and never more than four pages."""
    pool = PagePool(4, "local KV")
    pages = SequencePages(pool, page_size=1, width=4, window=4)
    columns = []
    for position in range(11):
        pages.drop_behind(position)
        columns += [column for column, _ in pages.grow(position + 1)]
        assert pool.free == max(0, 4 - position - 1)
    assert columns == [0, 1, 2, 3] * 2 + [0, 1, 2]


def test_a_table_too_narrow_is_refused():
    """More pages at once than columns would overwrite the oldest in silence."""
    pages = SequencePages(PagePool(9, "local KV"), page_size=4, width=2, window=8)
    with pytest.raises(CapacityError, match="more than 2 pages of the local KV pool"):
        pages.grow(9)


def test_an_empty_pool_is_told():
    pages = SequencePages(PagePool(1, "global KV"), page_size=4, width=9, window=None)
    with pytest.raises(CapacityError, match="global KV pool has no free page: all 1"):
        pages.grow(5)


@pytest.mark.parametrize("page", [1, 4, 16, 64])
@pytest.mark.parametrize("window", [1, 8, 17])
@pytest.mark.parametrize("queries", [1, 7, 64])
def test_table_width_holds_every_step(page, window, queries):
    """For each place where a step's queries can begin, the pages from the window's oldest position to the last query."""
    shape = CacheShape(1, page, 1, 1, max_context=1000, max_query=queries)
    needed = max((first + queries - 1) // page - max(first - window + 1, 0) // page + 1 for first in range(200))
    assert shape.table_width(window) == needed
    assert shape.table_width(None) == -(-1000 // page)


# Admission


def test_first_come_first_served():
    """Two slots: the third waits for one, and takes the one that becomes free."""
    scheduler = Scheduler(LIMITS)
    sequences = [scheduler.add(request(3)) for _ in range(3)]
    assert scheduler.plan().admitted == sequences[:2]
    assert {s.slot for s in sequences[:2]} == {0, 1} and scheduler.waiting == sequences[2:]
    scheduler.retire(sequences[0])
    assert scheduler.plan().admitted == [sequences[2]]
    assert sequences[2].slot == sequences[0].slot


def test_priority_is_worth_places_in_line():
    """A later request of higher priority goes first, but not before all that came long ago: nobody starves."""
    scheduler = Scheduler(dataclasses.replace(LIMITS, slots=1))
    first, second = scheduler.add(request(3)), scheduler.add(request(3))
    urgent, idle = scheduler.add(request(3, priority=1)), scheduler.add(request(3, priority=-1))
    assert scheduler.waiting == [urgent, first, second, idle]
    for _ in range(PLACES):
        scheduler.add(request(3))
    late = scheduler.add(request(3, priority=1))
    assert scheduler.waiting.index(late) == 4  # behind what came 64 places before it: urgent, first, second and the fifth
    assert scheduler.waiting.index(idle) < len(scheduler.waiting) - 1


def test_deadlines():
    """Each is told once, when its time has come, wherever the request is by then; one that has ended is not."""
    now = 0.0
    scheduler = Scheduler(LIMITS, clock=lambda: now)
    late, soon, gone = (scheduler.add(request(3, deadline=seconds)) for seconds in (5.0, 1.0, 0.5))
    scheduler.retire(gone)
    assert scheduler.overdue() == []
    now = 1.0
    assert scheduler.overdue() == [soon] and scheduler.overdue() == [soon][:0]
    scheduler.plan()
    now = 9.0
    assert scheduler.overdue() == [late]


@pytest.mark.parametrize("field", [{"priority": 1.5}, {"priority": True}, {"deadline": -1}, {"deadline": "1"}])
def test_urgency_that_is_none(field):
    (name,) = field
    with pytest.raises(InputError, match=f"Request.{name} must be"):
        request(3, **field)


def test_what_can_never_run_is_refused_with_both_numbers():
    scheduler = Scheduler(LIMITS)
    with pytest.raises(CapacityError, match="the prompt has 41 tokens, the context holds 40"):
        scheduler.add(request(41))
    with pytest.raises(CapacityError, match=r"need 17 pages of the global KV pool \(prompt 10 \+ 56 new tokens\), it has 16"):
        scheduler.add(request(10, 56))
    with pytest.raises(InputError, match="empty"):
        scheduler.add(request(0))
    assert not scheduler.waiting


def test_pools_too_small_for_a_context_are_refused_at_once():
    """Naming the setting: what is never refused later, a sequence as long as the context, must fit."""
    with pytest.raises(CapacityError, match="max_context 40 needs 10 pages of the global KV pool, it has 9: lower max_context"):
        Scheduler(dataclasses.replace(LIMITS, global_pages=9))
    with pytest.raises(CapacityError, match="max_context 40 needs 5 pages of the local KV pool, it has 4"):
        Scheduler(dataclasses.replace(LIMITS, local_pages=4))


def test_room_of_a_request():
    """Without max_tokens, what the context holds; the last token takes no position. More is cut to the context."""
    assert Scheduler(LIMITS).add(request(30, None)).max_tokens == 11
    assert Scheduler(LIMITS).add(request(30, 34)).max_tokens == 11
    assert Scheduler(LIMITS).add(request(40, None)).max_tokens == 1


# Turns


def test_prompts_share_a_chunk():
    """Six tokens a step over the prompts in order; a prompt goes on where it was cut, beside those who have begun to decode."""
    scheduler = Scheduler(LIMITS)
    a, b = scheduler.add(request(4)), scheduler.add(request(11))
    assert rows(scheduler.plan()) == ([(a, 0, 4), (b, 0, 2)], [])
    assert rows(scheduler.plan()) == ([(b, 2, 7)], [a])
    assert rows(scheduler.plan()) == ([(b, 7, 11)], [a])
    assert (a.dispatched, b.dispatched) == (3, 1)
    plan = scheduler.plan()
    assert rows(plan) == ([], [a, b]) and plan.steps == 3
    assert (a.dispatched, b.dispatched) == (4, 4)
    assert rows(scheduler.plan()) == ([], [])


def test_prompts_have_half_of_a_step():
    """However many decode: those first in line go on with it, the others after the prompts."""
    scheduler = Scheduler(dataclasses.replace(LIMITS, slots=4, local_pages=20, chunk=4))
    early = [scheduler.add(request(1, 9)) for _ in range(3)]
    scheduler.plan()
    late = scheduler.add(request(5))
    assert rows(scheduler.plan()) == ([(late, 0, 2)], early[:2])
    assert rows(scheduler.plan()) == ([(late, 2, 4)], early[:2])
    assert rows(scheduler.plan()) == ([(late, 4, 5)], early[:2])
    assert rows(scheduler.plan()) == ([], [*early, late])


def test_nobody_is_admitted_to_a_call_of_several_steps():
    """Where pages that the next in line needs come free in the middle of a plan, it waits for the next one."""
    scheduler = Scheduler(LIMITS)
    first = scheduler.add(request(6, 30))
    for _ in range(5):
        scheduler.plan()
    assert len(first.pages["local"].held()) == 5  # the host has seen nothing: all is in the window
    first.made += [7] * first.dispatched
    second = scheduler.add(request(17))  # needs five of ten, and one to spare
    plan = scheduler.plan()
    assert rows(plan) == ([], [first]) and plan.steps == 3 and not plan.admitted
    assert len(first.pages["local"].held()) == 4
    plan = scheduler.plan()
    assert plan.admitted == [second] and plan.steps == 1 and rows(plan) == ([(second, 0, 5)], [first])


def test_alone_a_step_reads_one_prompt_and_nobody_loses_pages():
    """Cut at multiples of the chunk, without those who decode beside it; admitted with all pages that it may ever need."""
    scheduler = Scheduler(dataclasses.replace(LIMITS, alone=True))
    first, second = scheduler.add(request(8, 30)), scheduler.add(request(3, 30))
    assert rows(scheduler.plan()) == ([(first, 0, 6)], [])
    assert rows(scheduler.plan()) == ([(first, 6, 8)], [])
    assert second.slot < 0 and rows(scheduler.plan()) == ([], [first])  # it may need 10 pages, and the other 8, of 16
    scheduler.retire(first)
    third = scheduler.add(request(8, 1))
    assert rows(scheduler.plan()) == ([(second, 0, 3)], []) and rows(scheduler.plan()) == ([(third, 0, 6)], [])


def test_decoding_ends_with_what_may_have_been_made():
    """A sequence decodes once its prompt is in, and only while dispatched steps may not have made all its tokens."""
    scheduler = Scheduler(LIMITS)
    sequence = scheduler.add(request(3, 4))
    assert sequence.reading and not sequence.decoding
    scheduler.plan()
    assert sequence.decoding and sequence.position == 3
    scheduler.plan()
    assert sequence.dispatched == 4 and not sequence.decoding


def test_the_last_in_line_loses_its_slot_and_goes_on_later():
    """Two sequences that come to need 18 of 16 pages: the second reads again all it had made, once the first has ended."""
    scheduler = Scheduler(dataclasses.replace(LIMITS, steps=4))
    first, second = scheduler.add(request(4, 33)), scheduler.add(request(2, 33))
    while second.slot >= 0 or second.preempted == 0:
        for sequence in scheduler.plan().decoding:
            read_back(sequence, 5)
            sequence.made += [5] * (sequence.dispatched - len(sequence.made))
        for sequence in (first, second):
            while sequence.in_flight:
                read_back(sequence)
    assert scheduler.waiting == [second] and scheduler.running == [first]
    assert len(first.pages["global"].held()) == 9 and not second.pages["global"].held()
    made = len(second.made)
    assert scheduler.plan().admitted == []  # its pages are there, but not those to spare
    scheduler.retire(first)
    plan = scheduler.plan()
    assert plan.admitted == [second] and plan.parts == [(second, 0, 6)]
    assert second.ids == tuple(range(2)) + tuple(second.made) and second.resumed == made


def test_who_lost_its_slot_waits_for_what_is_in_flight():
    """Tokens that the device has made for it count: it must know them before it reads again."""
    scheduler = Scheduler(LIMITS)
    sequence = scheduler.add(request(3))
    scheduler.plan()
    scheduler._preempt(sequence)
    assert scheduler.plan().admitted == []
    read_back(sequence, 9)
    assert scheduler.plan().parts == [(sequence, 0, 4)] and sequence.ids == (0, 1, 2, 9)
    assert sequence.position == 4 and sequence.dispatched == 2


def test_retiring_twice_or_while_waiting():
    scheduler = Scheduler(LIMITS)
    lot = [scheduler.add(request(3)) for _ in range(3)]
    scheduler.plan()
    scored = None
    for sequence in (lot[2], lot[2], lot[0], lot[0]):
        scheduler.retire(sequence)
    scored = scheduler.open(request(5))
    with pytest.raises(CapacityError, match=r"no slot for scoring a prompt of 5 tokens \(0 of 2 slots are free\)"):
        scheduler.open(request(5))
    for sequence in (lot[1], scored, scored):
        scheduler.retire(sequence)
    assert sorted(scheduler.free_slots) == [0, 1] and not scheduler.running and not scheduler.waiting and not scheduler.scoring


def test_scoring_takes_pages_from_who_runs():
    """All ten local pages would be held by two that decode: who is last in line loses its slot."""
    scheduler = Scheduler(dataclasses.replace(LIMITS, slots=3))
    first, second = scheduler.add(request(6)), scheduler.add(request(20))
    for _ in range(6):
        scheduler.plan()
    scored = scheduler.open(request(40, 1))
    for begin in range(0, 40, 6):
        scheduler.hold(scored, begin, min(begin + 6, 40))
    assert second.preempted and not first.preempted
    other = scheduler.open(request(40, 1))
    with pytest.raises(CapacityError, match="no pages for scoring a prompt of 40 tokens beside others"):
        for begin in range(0, 40, 6):
            scheduler.hold(other, begin, min(begin + 6, 40))
