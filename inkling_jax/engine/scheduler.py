"""Who runs next: slots, pages and prompt chunks, on the host alone. Never imports jax (a test holds it).

First come, first served. A sequence is admitted when a slot is free and its worst case of pages can be reserved, so that nothing
admitted ever runs out. Prompts go before decoding.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from inkling_jax.cache.allocator import PagePool, SequencePages
from inkling_jax.engine.request import Request
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
    chunk: int  # prompt tokens a step
    alone: bool = False  # a step reads one prompt, cut at multiples of `chunk`
    first_slot: int = 0  # that its slots are numbered from


class Sequence:
    """A request on its way. The device may be ahead: `dispatched` counts what it may have made, `collected` what is known."""

    def __init__(self, request: Request, room: int, global_pages: SequencePages, local_pages: SequencePages):
        self.id = -1  # given by the engine
        self.request = request
        self.max_tokens = room  # tokens that it may generate
        self.pages = {"global": global_pages, "local": local_pages}
        self.slot = -1
        self.prefilled = 0  # prompt tokens dispatched
        self.collected = 0  # generated tokens that the host has seen
        self.dispatched = 0  # generated tokens that dispatched steps may have made, at most
        self.done = False

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def total(self) -> int:
        """Cache positions in the worst case: the last generated token is never appended."""
        return self.prompt_length + self.max_tokens - 1

    @property
    def position(self) -> int:
        """Lowest position that a query of a decode step not yet dispatched can have; the host may be behind."""
        return self.prompt_length + max(self.collected - 1, 0)

    @property
    def decoding(self) -> bool:
        """Whether a decode step may still make a token."""
        return not self.done and self.prefilled == self.prompt_length and self.dispatched < self.max_tokens


class Scheduler:
    """Waiting and running sequences, and the pages that they hold."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.pools = {"global": PagePool(limits.global_pages, "global KV"), "local": PagePool(limits.local_pages, "local KV")}
        self.free_slots = list(range(limits.first_slot + limits.slots - 1, limits.first_slot - 1, -1))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises CapacityError, with both numbers, for one that could never run."""
        length, context = len(request.prompt_ids), self.limits.max_context
        if not length:
            raise InputError("the prompt is empty: give at least one token")
        if length > context:
            raise CapacityError(f"the prompt has {length} tokens, the context holds {context}")
        capacity = min(context, self._capacity())
        wanted = request.params.max_tokens
        room = min(context - length + 1, capacity - length + 1 if wanted is None else wanted)
        sequence = Sequence(request, max(room, 1), self._pages("global"), self._pages("local"))
        for name, pages in sequence.pages.items():
            need, have = pages.worst_case(sequence.total), self.pools[name].pages
            if need > have:
                raise CapacityError(
                    f"the request may need {need} pages of the {name} KV pool "
                    f"(prompt {length} + {sequence.max_tokens} new tokens), it has {have}: lower max_tokens or raise kv_memory"
                )
        self.waiting.append(sequence)
        return sequence

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into free slots, in order, as far as pages can be reserved."""
        admitted = []
        while self.waiting and self.free_slots:
            sequence = self.waiting[0]
            if not all(pages.fits(sequence.total) for pages in sequence.pages.values()):
                break
            self.waiting.popleft()
            for pages in sequence.pages.values():
                pages.reserve(sequence.total)
            sequence.slot = self.free_slots.pop()
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def take(self, sequence: Sequence) -> bool:
        """Admit a sequence that waits elsewhere, with pages of these pools; False where slot or pages for it are not free."""
        sequence.pages = {name: self._pages(name) for name in self.pools}
        self.waiting.append(sequence)
        if not self.admit():
            self.waiting.remove(sequence)
        return sequence.slot >= 0

    def next_chunk(self) -> list[tuple[Sequence, int, int]]:
        """Up to `chunk` prompt tokens of running sequences: (sequence, begin, end), marked as dispatched."""
        left, parts = self.limits.chunk, []
        for sequence in self.running:
            begin = sequence.prefilled
            end = min(sequence.prompt_length, begin + left)
            if sequence.done or begin == end:
                continue
            parts.append((sequence, begin, end))
            sequence.prefilled = end
            left -= end - begin
            if not left or self.limits.alone:
                break
        return parts

    def grow(self, sequence: Sequence, begin: int, end: int) -> dict[str, list[tuple[int, int]]]:
        """Hold pages for queries at positions begin .. end (never past the worst case); new (column, page) entries by pool."""
        for pages in sequence.pages.values():
            pages.drop_behind(begin)
        return {name: pages.grow(min(end, sequence.total)) for name, pages in sequence.pages.items()}

    def retire(self, sequence: Sequence) -> None:
        """End a sequence wherever it is: its slot and pages are free for the next."""
        if sequence.done:
            return
        sequence.done = True
        if sequence in self.running:
            self.running.remove(sequence)
            self.free_slots.append(sequence.slot)
            for pages in sequence.pages.values():
                pages.drop_all()
        else:
            self.waiting.remove(sequence)

    def _pages(self, name: str) -> SequencePages:
        limits = self.limits
        width, window = (limits.global_width, None) if name == "global" else (limits.local_width, limits.window)
        return SequencePages(self.pools[name], limits.page_size, width, window)

    def _capacity(self) -> int:
        """Longest sequence, in cache positions, that the pools can hold."""
        limits = self.limits
        local = limits.max_context if limits.local_pages >= limits.local_width else limits.local_pages * limits.page_size
        return min(limits.global_pages * limits.page_size, local)
