"""The scheduler driven at random, on a device that is ahead of the host and remembers what each page holds.

Whatever comes: every page that a query sees holds what its sequence wrote or would have written, owners are counted right, none
is leaked, and each request ends with the tokens that it has alone.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inkling_jax.cache.paged import CacheShape
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.scheduler import Limits, Plan, Scheduler
from inkling_jax.engine.sequence import Sequence
from inkling_jax.errors import CapacityError, InklingError

CONTEXT, WINDOW, PAGE, SLOTS, CHUNK = 40, 8, 4, 3, 6
Ids = tuple[int, ...]


def next_token(ids: Ids) -> int:
    """What the imagined model says after these tokens; few answers, so that sequences come to agree."""
    return zlib.crc32(bytes(ids)) % 3


def ends(ids: Ids) -> bool:
    """Whether the last of these tokens is one to stop at."""
    return zlib.crc32(bytes(ids), 1) % 11 == 0


def alone(request: Request, room: int) -> list[int]:
    """The tokens of a request that nobody disturbs."""
    made: list[int] = []
    while len(made) < room:
        made.append(next_token(request.prompt_ids + tuple(made)))
        if ends(request.prompt_ids + tuple(made)):
            break
    return made


class Device:
    """Pages whose every place holds all tokens up to it, tables by slot, and the tokens that each sequence has by now."""

    def __init__(self, limits: Limits):
        self.pages = {
            name: [[None] * PAGE for _ in range(n)]
            for name, n in (("global", limits.global_pages), ("local", limits.local_pages))
        }
        self.tables: dict[tuple[int, str], dict[int, int]] = {}
        self.conv: dict[int, Ids] = {}  # by slot, what was read to get there
        self.ids: dict[Sequence, Ids] = {}
        self.live: dict[Sequence, bool] = {}

    def begin(self, sequence: Sequence) -> None:
        self.conv[sequence.slot] = ()
        self.ids[sequence], self.live[sequence] = sequence.ids, False
        if sequence.prefix is not None:
            self.conv[sequence.slot] = sequence.prefix.snapshot
            for name, pages in sequence.pages.items():
                self.tables[sequence.slot, name] = dict(enumerate(pages.row()))

    def read(self, sequence: Sequence, begin: int, end: int) -> None:
        assert self.conv[sequence.slot] == sequence.ids[:begin]
        for position in range(begin, end):
            self._append(sequence, sequence.slot, position)
        for position in range(begin, end):
            self._look(sequence, sequence.slot, position)
        self.conv[sequence.slot] = sequence.ids[:end]

    def make(self, sequence: Sequence) -> list[int]:
        """The next token, unless the sequence has ended."""
        ids = (*self.ids[sequence], next_token(self.ids[sequence]))
        self.ids[sequence] = ids
        self.live[sequence] = not ends(ids) and len(ids) - len(sequence.request.prompt_ids) < sequence.max_tokens
        return [ids[-1]]

    def decode(self, sequence: Sequence) -> list[int]:
        if not self.live[sequence]:
            return []
        position = len(self.ids[sequence]) - 1
        assert position >= sequence.position, "the host must not be ahead of the device"
        self._append(sequence, sequence.slot, position)
        self._look(sequence, sequence.slot, position)
        return self.make(sequence)

    def _append(self, sequence: Sequence, slot: int, position: int) -> None:
        for name, pages in sequence.pages.items():
            page = self.tables[slot, name][position // PAGE % pages.width]
            self.pages[name][page][position % PAGE] = self.ids[sequence][: position + 1]

    def _look(self, sequence: Sequence, slot: int, position: int) -> None:
        for name, pages in sequence.pages.items():
            for seen in range(0 if name == "global" else max(0, position - WINDOW + 1), position + 1):
                page = self.tables[slot, name][seen // PAGE % pages.width]
                assert self.pages[name][page][seen % PAGE] == self.ids[sequence][: seen + 1]


class Driven(RuleBasedStateMachine):
    """A scheduler driven as the engine drives it."""

    @initialize(
        steps=st.integers(1, 5),
        ahead=st.integers(0, 2),
        global_pages=st.integers(10, 25),
        more_local=st.integers(0, 9),
        prefixes=st.sampled_from([0, 1, 3, 20]),
        spacing=st.integers(1, 12),
    )
    def begin(self, steps, ahead, global_pages, more_local, prefixes, spacing):
        self.ahead, self.now = ahead, 0.0
        width = CacheShape(SLOTS, PAGE, 1, 1, CONTEXT, max(CHUNK, steps * (ahead + 2))).table_width(WINDOW)
        self.limits = Limits(
            slots=SLOTS,
            page_size=PAGE,
            global_pages=global_pages,
            local_pages=width + more_local,
            global_width=CONTEXT // PAGE,
            local_width=width,
            window=WINDOW,
            max_context=CONTEXT,
            chunk=CHUNK,
            steps=steps,
            prefixes=prefixes,
            spacing=spacing,
        )
        self.scheduler = Scheduler(self.limits, clock=lambda: self.now)
        self.device = Device(self.limits)
        self.in_flight: deque[list[tuple[Sequence, list[int]]]] = deque()
        self.left: dict[Sequence, float] = {}  # with the time of its deadline
        self.scored: Sequence | None = None

    @rule(
        shared=st.integers(0, 30),
        own=st.integers(0, 20),
        kind=st.integers(0, 2),
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        priority=st.sampled_from([0, 0, 0, 1, -2]),
        deadline=st.one_of(st.none(), st.none(), st.floats(0.5, 30)),
    )
    def add(self, shared, own, kind, max_tokens, priority, deadline):
        ids = tuple(range(shared)) + (kind,) * own
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        try:
            sequence = self.scheduler.add(Request(ids, params, priority=priority, deadline=deadline))
            self.left[sequence] = self.now + (deadline or float("inf"))
        except InklingError:
            pool = self.limits.global_pages * PAGE
            assert not ids or len(ids) > CONTEXT or len(ids) + (max_tokens or 1) - 1 > pool

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def step(self):
        """One turn of the engine."""
        for sequence in self.scheduler.overdue():
            assert self.left.pop(sequence) <= self.now
            self.scheduler.retire(sequence)
        assert all(self.now < deadline for deadline in self.left.values())
        plan = self.scheduler.plan()
        self.dispatch(plan)
        if len(self.in_flight) > (self.ahead if plan.parts or plan.decoding else 0):
            self.collect()

    def dispatch(self, plan: Plan) -> None:
        assert plan.mixed or not (plan.parts or plan.admitted), "a call of several steps reads nothing"
        assert sum(end - begin for _, begin, end in plan.parts) + len(plan.decoding) * plan.mixed <= CHUNK
        for sequence in plan.admitted:
            self.device.begin(sequence)
        for name, entries in plan.entries.items():
            for slot, column, page in entries:
                self.device.tables.setdefault((slot, name), {})[column] = page
        made: dict[Sequence, list[int]] = {}
        for sequence, begin, end in plan.parts:
            self.device.read(sequence, begin, end)
            if end == sequence.to_read:
                made[sequence] = self.device.make(sequence)
        for sequence, _ in itertools.product(plan.decoding, range(plan.steps)):
            made.setdefault(sequence, []).extend(self.device.decode(sequence))
        if plan.parts or plan.decoding:
            self.in_flight.append(list(made.items()))
        for sequence, end in plan.keep:
            assert end % PAGE == 0 and sequence.ids[:end] == self.device.conv[sequence.slot]
            self.scheduler.keep(sequence, end, lambda ids=sequence.ids[:end]: ids)

    def collect(self) -> None:
        for sequence, made in self.in_flight.popleft() if self.in_flight else ():
            sequence.in_flight -= 1
            if sequence.done:
                continue
            sequence.made += made
            if (
                made
                and not self.device.live[sequence]
                and self.device.ids[sequence] == sequence.request.prompt_ids + tuple(sequence.made)
            ):
                assert sequence.made == alone(sequence.request, sequence.max_tokens)
                self.scheduler.retire(sequence)
                del self.left[sequence]

    @precondition(lambda self: self.left)
    @rule(data=st.data(), spoilt=st.booleans())
    def cancel(self, data, spoilt):
        sequence = data.draw(st.sampled_from(list(self.left)))
        self.scheduler.retire(sequence, spoilt=spoilt)
        del self.left[sequence]

    @precondition(lambda self: self.scored is None)
    @rule(length=st.integers(1, CONTEXT))
    def score(self, length):
        """A prompt read by the caller, who may step between its chunks."""
        try:
            self.scored = self.scheduler.open(Request((5,) * length, SamplingParams(max_tokens=1)))
        except CapacityError:
            assert not self.scheduler.free_slots
            return
        self.device.begin(self.scored)

    @precondition(lambda self: self.scored is not None)
    @rule(length=st.integers(1, CHUNK))
    def score_on(self, length):
        sequence = self.scored
        begin = sequence.prefilled
        end = min(begin + length, sequence.to_read)
        for name, entries in self.scheduler.hold(sequence, begin, end).items():
            for slot, column, page in entries:
                self.device.tables.setdefault((slot, name), {})[column] = page
        self.device.read(sequence, begin, end)
        sequence.prefilled = end
        if end == sequence.to_read:
            self.scheduler.retire(sequence)
            self.scored = None

    @invariant()
    def owners_are_counted(self):
        holders = self.scheduler.running + self.scheduler.scoring
        prefixes = [] if self.scheduler.prefixes is None else list(self.scheduler.prefixes._prefixes.values())
        assert len(prefixes) <= self.limits.prefixes
        for name, pool in self.scheduler.pools.items():
            used = Counter(page for s in holders for page in s.pages[name].held().values())
            kept = Counter(page for prefix in prefixes for page in prefix.pages[name][1])
            assert pool.used == [used[page] for page in range(pool.pages)]
            assert pool.kept == [kept[page] for page in range(pool.pages)]
            assert sorted(pool._free) == [page for page in range(pool.pages) if not used[page] and not kept[page]]
            assert pool.busy == len(used)

    @invariant()
    def every_slot_has_one_owner(self):
        slots = [s.slot for s in self.scheduler.running + self.scheduler.scoring] + self.scheduler.free_slots
        assert sorted(slots) == list(range(SLOTS))
        assert {*self.scheduler.running, *self.scheduler.waiting} == set(self.left)
        for line in (self.scheduler.running, self.scheduler.waiting):
            assert [s.place for s in line] == sorted(s.place for s in line)

    def teardown(self):
        """Whatever the device does, all that is left ends; and what was kept is all that is still held."""
        if not hasattr(self, "left"):
            return
        if self.scored is not None:
            self.scheduler.retire(self.scored)
        for _ in range(4 * sum(s.total for s in self.left) + 20):
            self.step()
            if not self.left and not self.in_flight:
                break
        assert not self.left and not self.in_flight
        while self.scheduler.prefixes:
            self.scheduler.prefixes.evict()
        assert all(pool.free == pool.pages for pool in self.scheduler.pools.values())


TestDriven = Driven.TestCase
TestDriven.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
