"""Pages, slots and turns on the host: whatever comes, no page has two owners, none is lost, and every request ends."""

from __future__ import annotations

import dataclasses
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inkling_jax.cache.allocator import PagePool, SequencePages
from inkling_jax.cache.paged import CacheShape
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.scheduler import Limits, Scheduler, Sequence
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
)


def request(length: int, max_tokens: int | None = 4) -> Request:
    return Request(tuple(range(length)), SamplingParams(temperature=0, max_tokens=max_tokens))


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
    assert scheduler.admit() == sequences[:2] and scheduler.admit() == []
    assert {s.slot for s in sequences[:2]} == {0, 1}
    scheduler.retire(sequences[0])
    assert scheduler.admit() == [sequences[2]]
    assert sequences[2].slot == sequences[0].slot


def test_admission_waits_for_the_worst_case():
    """What may need 10 of 16 pages is not begun while another may come to need 8; a short one behind it waits too."""
    scheduler = Scheduler(LIMITS)
    first = scheduler.add(request(1, 32))  # 32 positions, 8 pages
    scheduler.admit()
    second, third = scheduler.add(request(36, 5)), scheduler.add(request(1, 1))
    assert scheduler.admit() == []
    scheduler.retire(first)
    assert scheduler.admit() == [second, third]


def test_what_can_never_run_is_refused_with_both_numbers():
    scheduler = Scheduler(LIMITS)
    with pytest.raises(CapacityError, match="the prompt has 41 tokens, the context holds 40"):
        scheduler.add(request(41))
    scheduler.add(request(40, 1))
    small = Scheduler(dataclasses.replace(LIMITS, global_pages=3))
    with pytest.raises(CapacityError, match=r"may need 4 pages of the global KV pool \(prompt 10 \+ 4 new tokens\), it has 3"):
        small.add(request(10, 4))
    assert small.add(request(9, 4)).total == 12
    with pytest.raises(CapacityError, match="may need 4 pages of the local KV pool .* it has 3"):
        Scheduler(dataclasses.replace(LIMITS, local_pages=3)).add(request(13, 1))
    with pytest.raises(InputError, match="empty"):
        scheduler.add(request(0))


def test_room_of_a_request():
    """Without max_tokens, what the context or the pools hold; the last token takes no position. More is cut to the context."""
    assert Scheduler(LIMITS).add(request(30, None)).max_tokens == 11
    assert Scheduler(LIMITS).add(request(30, 100)).max_tokens == 11
    assert Scheduler(LIMITS).add(request(40, None)).max_tokens == 1
    assert Scheduler(dataclasses.replace(LIMITS, global_pages=8)).add(request(30, None)).max_tokens == 3
    assert Scheduler(dataclasses.replace(LIMITS, local_pages=4)).add(request(10, None)).max_tokens == 7


# Turns


def test_prompts_share_a_chunk():
    """Six tokens a step over the prompts in order; a prompt goes on where it was cut."""
    scheduler = Scheduler(LIMITS)
    a, b = scheduler.add(request(4)), scheduler.add(request(9))
    scheduler.admit()
    assert scheduler.next_chunk() == [(a, 0, 4), (b, 0, 2)]
    assert scheduler.next_chunk() == [(b, 2, 8)]
    assert scheduler.next_chunk() == [(b, 8, 9)]
    assert scheduler.next_chunk() == []


def test_decoding_ends_with_what_may_have_been_made():
    """A sequence decodes once its prompt is in, and only while dispatched steps may not have made all its tokens."""
    sequence = Scheduler(LIMITS).add(request(3, 4))
    assert not sequence.decoding
    sequence.prefilled, sequence.dispatched = 3, 1
    assert sequence.decoding and sequence.position == 3
    sequence.dispatched = 4
    assert not sequence.decoding


def test_retiring_twice_or_while_waiting():
    scheduler = Scheduler(LIMITS)
    running, waiting = scheduler.add(request(3)), scheduler.add(request(3))
    scheduler.admit()
    last = scheduler.add(request(3))
    for sequence in (last, last, running, running, waiting):
        scheduler.retire(sequence)
    assert sorted(scheduler.free_slots) == [0, 1] and not scheduler.running and not scheduler.waiting


class Driven(RuleBasedStateMachine):
    """A scheduler driven as the engine drives it, on a device that makes tokens, ends requests early and is read late."""

    @initialize(
        steps=st.integers(1, 5), ahead=st.integers(0, 2), global_pages=st.integers(10, 25), local_pages=st.integers(8, 20)
    )
    def begin(self, steps, ahead, global_pages, local_pages):
        self.steps, self.ahead = steps, ahead
        shape = CacheShape(3, 4, global_pages, local_pages, max_context=40, max_query=max(6, steps * (ahead + 2)))
        self.limits = dataclasses.replace(
            LIMITS, slots=3, global_pages=global_pages, local_pages=local_pages, local_width=shape.table_width(8)
        )
        self.scheduler = Scheduler(self.limits)
        self.in_flight: deque[list[tuple[Sequence, int]]] = deque()  # tokens that each sequence of a step makes
        self.made: dict[Sequence, int] = {}
        self.tables: dict[tuple[int, str], dict[int, int]] = {}  # what the device knows: (slot, pool) -> column -> page
        self.left: dict[Sequence, None] = {}  # in order of arrival

    @rule(length=st.integers(1, 40), max_tokens=st.one_of(st.none(), st.integers(1, 30)))
    def add(self, length, max_tokens):
        try:
            self.left[self.scheduler.add(request(length, max_tokens))] = None
        except CapacityError:
            need = min(length + (max_tokens or 1) - 1, 40)
            pages = -(-need // 4)
            assert pages > self.limits.global_pages or min(pages, self.limits.local_width) > self.limits.local_pages

    @rule(share=st.floats(0, 1))
    def step(self, share):
        """One turn of the engine; a token ends its sequence early where `share` says so."""
        for sequence in self.scheduler.admit():
            self.made[sequence] = 0
        parts = self.scheduler.next_chunk()
        decoding = [s for s in self.scheduler.running if s.decoding]
        if parts:
            for sequence, begin, end in parts:
                self.dispatch(sequence, begin, begin, end)
            ending = [s for s, _, end in parts if end == s.prompt_length]
            for sequence in ending:
                sequence.dispatched = 1
            self.in_flight.append([(s, self.make(s, 1, share)) for s in ending])
        elif decoding:
            for s in decoding:
                end = min(s.prompt_length + s.dispatched - 1 + self.steps, s.total)
                self.dispatch(s, s.position, s.prompt_length + max(self.made[s], 1) - 1, end)
                s.dispatched = min(s.dispatched + self.steps, s.max_tokens)
            self.in_flight.append([(s, self.make(s, self.steps, share)) for s in decoding])
        if len(self.in_flight) > (self.ahead if parts or decoding else 0):
            self.collect()

    def make(self, sequence: Sequence, steps: int, share: float) -> int:
        """Tokens that the device makes of `steps`; a negative count says that the last one ended the sequence."""
        if self.made[sequence] < 0:  # ended before this step, which the host did not know
            return 0
        count = min(steps, sequence.max_tokens - self.made[sequence])
        self.made[sequence] += count
        if self.made[sequence] == sequence.max_tokens or share > 0.8:
            self.made[sequence] = -1
            return -count
        return count

    def dispatch(self, sequence: Sequence, begin: int, first: int, end: int) -> None:
        """Queries from `first` (as the device knows; the host thinks `begin`) see their windows, and write up to `end`."""
        assert begin <= first or self.made[sequence] < 0
        for name, entries in self.scheduler.grow(sequence, begin, end).items():
            table = self.tables.setdefault((sequence.slot, name), {})
            table.update(entries)
            pages = sequence.pages[name]
            oldest = 0 if name == "global" else max(0, begin - self.limits.window + 1)
            for absolute in range(oldest // 4, -(-end // 4)):
                mine = pages._held[absolute - pages._first]
                assert absolute >= pages._first and table[absolute % pages.width] == mine

    def collect(self) -> None:
        for sequence, made in self.in_flight.popleft():
            if not sequence.done:
                sequence.collected += abs(made)
                if made < 0:
                    self.retire(sequence)

    def retire(self, sequence: Sequence) -> None:
        self.scheduler.retire(sequence)
        self.left.pop(sequence, None)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def cancel(self, data):
        self.retire(data.draw(st.sampled_from(list(self.left))))

    @invariant()
    def every_page_has_one_owner(self):
        for name, pool in self.scheduler.pools.items():
            held = [page for s in self.scheduler.running for page in s.pages[name]._held]
            assert sorted(held + pool._free) == list(range(pool.pages))
            assert pool.reserved == sum(s.pages[name].reserved for s in self.scheduler.running) <= pool.pages
            assert all(len(s.pages[name]._held) <= s.pages[name].reserved for s in self.scheduler.running)

    @invariant()
    def every_slot_has_one_owner(self):
        slots = [s.slot for s in self.scheduler.running] + self.scheduler.free_slots
        assert sorted(slots) == list(range(3))
        assert set(self.scheduler.running) | set(self.scheduler.waiting) == set(self.left)

    def teardown(self):
        """Whatever the device does, all that is left ends within the steps that its tokens take."""
        if not hasattr(self, "left"):
            return
        for _ in range(sum(s.total for s in self.left) + 10):
            self.step(0.0)
        assert not self.left and not self.in_flight
        assert all(pool.free == pool.pages and pool.reserved == 0 for pool in self.scheduler.pools.values())


TestDriven = Driven.TestCase
TestDriven.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
