"""Who runs next: slots, pages and prompt chunks, on the host alone. Never imports jax (a test holds it).

Requests stand in line by arrival, ahead of it by their priority. In that order a step decodes a token for those who have read
their prompts and fills up with prompts; without prompts it decodes several tokens. Pages are taken as positions need them. Where
none is left, kept prefixes go first, and then the slot of whoever is last in line and behind the one in need: it returns to the
line, and later reads again what it had. The first in line loses nothing, so everything ends.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import time
from collections.abc import Callable
from typing import Any

from inkling_jax.cache.allocator import PagePool, SequencePages
from inkling_jax.cache.prefix import PrefixIndex
from inkling_jax.engine.request import Request
from inkling_jax.engine.sequence import Sequence
from inkling_jax.errors import CapacityError, InputError


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes that the scheduler keeps to; tokens unless said otherwise."""

    slots: int  # sequences at once
    page_size: int
    global_pages: int
    local_pages: int
    global_width: int  # columns of a page table
    local_width: int
    window: int
    max_context: int
    chunk: int  # tokens a step that reads prompts
    steps: int  # decode steps of a call that reads none
    prefixes: int = 0  # prefixes that may be kept; none is looked for where it is 0
    spacing: int = 0  # between those kept within a prompt
    alone: bool = False  # a step reads one prompt and does nothing else; nobody loses its slot, nor begins with a prefix
    first_slot: int = 0  # that its slots are numbered from


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step. Its rows are those of `parts`, then those of `decoding`; pages are taken, and all is marked as dispatched."""

    steps: int  # tokens that a row of `decoding` makes: one beside prompts
    mixed: bool  # whether it may read prompts
    admitted: list[Sequence] = dataclasses.field(default_factory=list)  # those that begin, in a slot of their own
    parts: list[tuple[Sequence, int, int]] = dataclasses.field(default_factory=list)  # positions begin .. end to read
    decoding: list[Sequence] = dataclasses.field(default_factory=list)
    # (slot counted from its first, column, page) to set in the page tables
    entries: dict[str, list[tuple[int, int, int]]] = dataclasses.field(default_factory=lambda: {"global": [], "local": []})
    keep: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)  # prefixes to keep once it is dispatched


class Scheduler:
    """Waiting and running sequences, and the pages that they hold."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic):
        """Raises CapacityError where a pool could not hold one sequence of the longest context."""
        self.limits, self.clock = limits, clock
        self.pools = {"global": PagePool(limits.global_pages, "global KV"), "local": PagePool(limits.local_pages, "local KV")}
        self.free_slots = list(range(limits.first_slot + limits.slots - 1, limits.first_slot - 1, -1))
        self.waiting: list[Sequence] = []  # in order of line, as are the running ones
        self.running: list[Sequence] = []
        self.scoring: list[Sequence] = []  # read by the caller, chunk by chunk, who keeps slot and pages until then
        self.prefixes = PrefixIndex(self.pools, limits.prefixes) if limits.prefixes else None
        self.preemptions = 0
        self._first: Sequence | None = None  # admitted for the next plan
        self._arrivals = 0
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap
        for name, pages in self._pages().items():
            need, have = pages.missing(limits.max_context), pages.pool.pages
            if need > have:
                raise CapacityError(
                    f"max_context {limits.max_context} needs {need} pages of the {name} KV pool, it has {have}: "
                    "lower max_context or raise kv_memory"
                )

    def add(self, request: Request) -> Sequence:
        """Put a request in line. Raises CapacityError, with both numbers, for one that could never run."""
        sequence = self._sequence(request)
        self._line_up(sequence, self.waiting)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (self.clock() + request.deadline, sequence.place[1], sequence))
        return sequence

    def overdue(self) -> list[Sequence]:
        """Sequences whose deadline has passed, each once; the caller retires them."""
        found = []
        while self._deadlines and (self._deadlines[0][2].done or self._deadlines[0][0] <= self.clock()):
            sequence = heapq.heappop(self._deadlines)[2]
            if not sequence.done:
                found.append(sequence)
        return found

    def reads(self) -> bool:
        """Whether the next step reads prompts: of those that run, or of the next in line, who is admitted for it."""
        if not any(s.reading for s in self.running) and self._first is None:
            self._first = self._admit()
        return self._first is not None or any(s.reading for s in self.running)

    def plan(self, beside: bool = False) -> Plan:
        """The next step; without rows where there is nothing to do until results come. `beside`: other replicas read prompts.

        In order of line, so that who loses its slot has had no turn in it. Who is admitted finds all its pages.
        """
        limits, mixed = self.limits, self.reads() or beside
        plan = Plan(1 if mixed else limits.steps, mixed, [] if self._first is None else [self._first])
        self._first = None
        decoding = [s for s in self.running if s.decoding]
        if mixed:
            decoding = decoding[: 0 if limits.alone else limits.chunk // 2]  # the rest of the chunk is for prompts
        budget, rows = limits.chunk - len(decoding), set(decoding)
        for sequence in self.running[:]:
            if sequence.slot < 0:
                break
            if sequence.reading and budget and not (limits.alone and plan.parts):
                budget -= self._read(sequence, budget, plan)
            elif sequence in rows and self._hold(sequence, sequence.position, sequence.decode_end(plan.steps), plan.entries):
                plan.decoding.append(sequence)
                sequence.dispatched = min(sequence.dispatched + plan.steps, sequence.max_tokens)
                sequence.in_flight += 1
        while mixed and budget > 0 and not (limits.alone and plan.parts) and (sequence := self._admit()) is not None:
            plan.admitted.append(sequence)
            budget -= self._read(sequence, budget, plan)
        return plan

    def plans(self) -> list[Plan]:
        """The next step of each replica, of which there is one."""
        return [self.plan()]

    def take(self, sequence: Sequence) -> None:
        """Put a sequence in line that waited elsewhere, with pages of these pools."""
        sequence.pages = self._pages()
        self._line_up(sequence, self.waiting)

    def open(self, request: Request) -> Sequence:
        """A slot for a request that the caller reads by `hold`, at once and until `retire`. Raises CapacityError without one."""
        sequence = self._sequence(request)
        if not self.free_slots:
            raise CapacityError(
                f"no slot for scoring a prompt of {sequence.to_read} tokens (0 of {self.limits.slots} slots are free): "
                "finish or cancel other requests first"
            )
        sequence.begin(self.free_slots.pop())
        self.scoring.append(sequence)
        return sequence

    def hold(self, sequence: Sequence, begin: int, end: int) -> dict[str, list[tuple[int, int, int]]]:
        """Pages for positions begin .. end of an opened sequence: (slot, column, page) entries by pool, others making room."""
        entries: dict[str, list[tuple[int, int, int]]] = {"global": [], "local": []}
        if not self._hold(sequence, begin, end, entries):
            raise CapacityError(f"no pages for scoring a prompt of {sequence.to_read} tokens beside others that are scored")
        return entries

    def keep(self, sequence: Sequence, end: int, take: Callable[[], Any]) -> None:
        """Keep the prefix of a sequence that ends at `end`, with the copy of the state there that `take` makes."""
        assert self.prefixes is not None, "a plan asks for it"
        hashes = sequence.hashes[: end // self.limits.page_size]
        self.prefixes.keep(hashes, sequence.pages, take)
        sequence.kept.append(hashes[-1])

    def lose_all(self) -> None:
        """The cache is lost: who runs returns to the line, and will read again; who is scored ends; no prefix is kept."""
        while self.scoring:
            self.retire(self.scoring[-1])
        while self.running:
            self._preempt(self.running[-1])
        for sequence in self.waiting:
            sequence.in_flight = 0  # the results will not come
        self._first = None
        if self.prefixes is not None:
            self.prefixes.forget_all()

    def retire(self, sequence: Sequence, *, spoilt: bool = False) -> None:
        """End a sequence wherever it is: its slot and pages are free for the next. `spoilt`: none may go on from it."""
        if sequence.done:
            return
        sequence.done = True
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        (self.running if sequence in self.running else self.scoring).remove(sequence)
        self.free_slots.append(sequence.slot)
        for pages in sequence.pages.values():
            pages.drop_all()
        if spoilt and self.prefixes is not None:
            for key in sequence.kept:
                self.prefixes.forget(key)

    def _sequence(self, request: Request) -> Sequence:
        length, limits = len(request.prompt_ids), self.limits
        if not length:
            raise InputError("the prompt is empty: give at least one token")
        if length > limits.max_context:
            raise CapacityError(f"the prompt has {length} tokens, the context holds {limits.max_context}")
        room, wanted = limits.max_context - length + 1, request.params.max_tokens
        need = -(-(length + (wanted or 1) - 1) // limits.page_size)
        if need > limits.global_pages:
            raise CapacityError(
                f"the request may need {need} pages of the global KV pool (prompt {length} + {wanted} new tokens), "
                f"it has {limits.global_pages}: lower max_tokens or raise kv_memory"
            )
        self._arrivals += 1
        return Sequence(request, room if wanted is None else min(room, wanted), self._arrivals, self._pages())

    def _pages(self) -> dict[str, SequencePages]:
        limits = self.limits
        return {
            "global": SequencePages(self.pools["global"], limits.page_size, limits.global_width, None),
            "local": SequencePages(self.pools["local"], limits.page_size, limits.local_width, limits.window),
        }

    @staticmethod
    def _line_up(sequence: Sequence, line: list[Sequence]) -> None:
        bisect.insort(line, sequence, key=lambda s: s.place)

    def _admit(self) -> Sequence | None:
        """Give the next in line a slot and what is kept of its prompt, if there are pages for all of that and some to spare.

        To spare are one for each that runs, and twice that for each time it lost its slot: reading again has its price.
        """
        if not self.waiting or not self.free_slots or self.waiting[0].in_flight:  # what it made is not all known
            return None
        sequence = self.waiting[0]
        sequence.know()
        self._adopt(sequence)
        if not all(self._fits(sequence, name) for name in self.pools):
            for pages in sequence.pages.values():
                pages.drop_all()
            return None
        del self.waiting[0]
        sequence.begin(self.free_slots.pop())
        self._line_up(sequence, self.running)
        self._count(sequence)
        return sequence

    def _fits(self, sequence: Sequence, name: str) -> bool:
        """Whether a pool has the pages for a sequence to begin with, beside those that are promised to others or to spare."""
        pages = sequence.pages[name]
        if self.limits.alone:  # all that it and the others can ever need
            spare = sum(other.pages[name].missing(other.total) for other in self.running)
            return pages.missing(sequence.total) + spare <= pages.pool.available
        spare = len(self.running) << min(sequence.preempted, 8)
        return pages.missing(min(sequence.to_read + 1, sequence.total)) + spare <= pages.pool.available

    def _adopt(self, sequence: Sequence) -> None:
        """Begin with the longest prefix that is kept; at least one token is left to read."""
        sequence.prefix, sequence.began, sequence.prefilled, sequence.cuts = None, 0, 0, ()
        if self.prefixes is None:
            return
        page, pages = self.limits.page_size, (sequence.to_read - 1) // self.limits.page_size
        hashes = sequence.page_hashes(page)[:pages]
        sequence.prefix = self.prefixes.find(hashes)
        if sequence.prefix is not None:
            sequence.began = sequence.prefilled = len(sequence.prefix.hashes) * page
            for name, (first, shared) in sequence.prefix.pages.items():
                sequence.pages[name].adopt(first, shared)
        sequence.kept_at = sequence.prefilled
        if not sequence.preempted:  # where others parted from it, and where an answer begins, yet others may part
            wanted = {self.prefixes.known(hashes) * page, pages * page}
            sequence.cuts = tuple(sorted(cut for cut in wanted if cut > sequence.prefilled))

    def _count(self, sequence: Sequence) -> None:
        if self.prefixes is not None and not sequence.preempted:
            counts = self.prefixes.statistics
            counts.asked += sequence.to_read
            counts.reused += sequence.prefilled
            counts.hits += sequence.prefix is not None

    def _read(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        """Let a sequence read on by up to `budget` tokens; how many."""
        begin = sequence.prefilled
        end = min(sequence.to_read, begin + budget)
        worth = False
        if self.prefixes is not None:
            spaced = end - end % self.limits.page_size
            cuts = [cut for cut in sequence.cuts if begin < cut <= end]
            if cuts:
                end, worth = cuts[0], True
            elif spaced > begin and spaced - sequence.kept_at >= self.limits.spacing:
                end, worth = spaced, True
        if not self._hold(sequence, begin, end, plan.entries):
            self._preempt(sequence)  # it is the last in line
            return 0
        plan.parts.append((sequence, begin, end))
        sequence.prefilled = end
        if worth:
            sequence.kept_at = end
            plan.keep.append((sequence, end))
        if not sequence.reading:
            sequence.dispatched = sequence.resumed + 1
            sequence.in_flight += 1
        return end - begin

    def _hold(self, sequence: Sequence, begin: int, end: int, entries: dict[str, list[tuple[int, int, int]]]) -> bool:
        """Pages for queries at begin .. end, those behind them let go; False where only who is ahead in line has some."""
        for pages in sequence.pages.values():
            pages.drop_behind(begin)
        while any(pages.missing(end) > pages.pool.available for pages in sequence.pages.values()):
            if self.limits.alone or not self.running or self.running[-1] is sequence:
                return False
            self._preempt(self.running[-1])
        for name, pages in sequence.pages.items():
            while pages.missing(end) > pages.pool.free:
                assert self.prefixes is not None, "what is available and not free is kept"
                self.prefixes.evict()
            entries[name] += [(sequence.slot - self.limits.first_slot, column, page) for column, page in pages.grow(end)]
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take slot and pages of the last in line. What is in flight for it still counts as made."""
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        sequence.lose()
        self._line_up(sequence, self.waiting)
        self.preemptions += 1
