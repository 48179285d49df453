"""A request on its way through the engine: what was read, what may have been made and what is known to be. No jax."""

from __future__ import annotations

from typing import Any

from inkling_jax.cache.allocator import SequencePages
from inkling_jax.cache.prefix import chain
from inkling_jax.engine.request import Request

PLACES = 64  # places in line that one level of priority is worth


class Sequence:
    """A request on its way. The device may be ahead: `dispatched` counts tokens that it may have made, `made` holds those known.

    A sequence that lost its slot begins anew with the tokens that it has made as part of what it reads: `resumed` counts them.
    """

    def __init__(self, request: Request, room: int, arrival: int, pages: dict[str, SequencePages]):
        self.id = -1  # given by the engine
        self.request = request
        self.key: Any = None  # of its random numbers, given by the engine
        self.max_tokens = room  # tokens that it may generate
        # A later request overtakes by its priority, and only as many places as that is worth: all come to their turn.
        self.place = (arrival - PLACES * request.priority, arrival)
        self.pages = pages
        self.slot = -1
        self.ids = request.prompt_ids  # what it reads: the prompt, and tokens made before it lost its slot
        self.resumed = 0
        self.began = 0  # where it began to read
        self.prefilled = 0  # of `ids`, those before and in dispatched steps
        self.made: list[int] = []  # generated tokens that the host has seen
        self.dispatched = 0  # generated tokens that dispatched steps may have made, at most
        self.in_flight = 0  # dispatched steps whose results for it the host has not seen
        self.preempted = 0  # times that it lost its slot
        self.done = False
        self.prefix: Any = None  # what it began with
        self.hashes: list[bytes] = []  # of the full pages of `ids`
        self.cuts: tuple[int, ...] = ()  # positions where a prefix is to be kept
        self.kept_at = 0  # the last position where one was found or kept
        self.kept: list[bytes] = []  # prefixes that were kept of it

    @property
    def to_read(self) -> int:
        """Tokens that it reads before it generates."""
        return len(self.ids)

    @property
    def total(self) -> int:
        """Cache positions in the worst case: the last generated token is never appended."""
        return len(self.request.prompt_ids) + self.max_tokens - 1

    @property
    def position(self) -> int:
        """Lowest position that a query of a decode step not yet dispatched can have; the host may be behind."""
        return len(self.request.prompt_ids) + max(len(self.made) - 1, self.resumed)

    @property
    def reading(self) -> bool:
        """Whether part of what it reads has not been dispatched."""
        return self.prefilled < self.to_read

    @property
    def decoding(self) -> bool:
        """Whether a decode step may still make a token."""
        return not self.done and not self.reading and self.dispatched < self.max_tokens

    @property
    def positions(self) -> int:
        """Cache positions that decode steps dispatched so far may have come to use: all but that of the last token made."""
        return len(self.request.prompt_ids) + self.dispatched - 1

    def decode_end(self, steps: int) -> int:
        """`positions` once `steps` more decode steps are dispatched."""
        return min(self.positions + steps, self.total)

    def begin(self, slot: int) -> None:
        """Take a slot, with all that is known to be read."""
        self.slot = slot
        self.resumed = self.dispatched = len(self.made)

    def lose(self) -> None:
        """Give up slot and pages, to begin anew later."""
        self.slot, self.began, self.prefilled, self.cuts, self.prefix = -1, 0, 0, (), None
        self.preempted += 1
        for pages in self.pages.values():
            pages.drop_all()

    def know(self) -> None:
        """Bring what it reads up to date with what it has made."""
        self.ids = self.request.prompt_ids + tuple(self.made)

    def page_hashes(self, page_size: int) -> list[bytes]:
        """The hashes of the full pages of what it reads."""
        if len(self.hashes) != len(self.ids) // page_size:
            spans = [(item.begin, len(item.values), item.digest) for item in self.request.media]
            self.hashes = chain(self.ids, page_size, spans)
        return self.hashes
