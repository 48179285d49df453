"""Host-side page allocation: a pool of page ids, and the pages of one sequence in one geometry."""

from __future__ import annotations

from inkling_jax.errors import CapacityError


class PagePool:
    """Free page ids of one pool. Reservations are counts: a sequence reserves its worst case, then takes pages as it grows."""

    def __init__(self, pages: int, name: str):
        self.pages, self.name = pages, name
        self.reserved = 0
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """One page. Running out in spite of reservations is a defect of the caller."""
        if not self._free:
            raise CapacityError(f"the {self.name} pool has no free page: all {self.pages} are held")
        return self._free.pop()

    def give_back(self, page: int) -> None:
        """Return a page to the pool."""
        self._free.append(page)


class SequencePages:
    """Pages that one sequence holds in one pool, by absolute page index (position // page size).

    With a window, pages wholly behind it can be let go; the page table is a ring of `width` columns.
    """

    def __init__(self, pool: PagePool, page_size: int, width: int, window: int | None):
        self.pool, self.page_size, self.width, self.window = pool, page_size, width, window
        self.reserved = 0
        self._first = 0  # absolute index of the oldest page held
        self._held: list[int] = []

    def worst_case(self, length: int) -> int:
        """Most pages that a sequence of `length` tokens holds at once."""
        return min(self.width, -(-length // self.page_size))

    def reserve(self, length: int) -> None:
        """Count the worst case of `length` tokens against the pool."""
        self.reserved = self.worst_case(length)
        self.pool.reserved += self.reserved

    def fits(self, length: int) -> bool:
        """Whether the worst case of `length` tokens can be reserved now."""
        return self.pool.reserved + self.worst_case(length) <= self.pool.pages

    def grow(self, length: int) -> list[tuple[int, int]]:
        """Hold pages for positions below `length`; (column, page) of each new one."""
        entries = []
        while (self._first + len(self._held)) * self.page_size < length:
            absolute = self._first + len(self._held)
            if len(self._held) == self.width:
                raise CapacityError(f"a sequence needs more than {self.width} pages of the {self.pool.name} pool at once")
            page = self.pool.take()
            self._held.append(page)
            entries.append((absolute % self.width, page))
        return entries

    def held(self) -> dict[int, int]:
        """The id of each page that is held, by absolute index."""
        return dict(enumerate(self._held, self._first))

    def drop_behind(self, position: int) -> list[int]:
        """Let go of pages that no query at `position` or later can see; their ids."""
        if self.window is None:
            return []
        behind = min(max(0, (position - self.window + 1) // self.page_size - self._first), len(self._held))
        return self._release(behind)

    def drop_all(self) -> None:
        """Let go of everything, the reservation included."""
        self._release(len(self._held))
        self.pool.reserved -= self.reserved
        self.reserved = 0

    def _release(self, count: int) -> list[int]:
        released, self._held = self._held[:count], self._held[count:]
        self._first += count
        for page in released:
            self.pool.give_back(page)
        return released
