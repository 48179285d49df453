"""Host-side page allocation: a pool of page ids with their owners, and the pages of one sequence in one geometry."""

from __future__ import annotations

from inkling_jax.errors import CapacityError


class PagePool:
    """Page ids of one pool, and how many sequences and kept prefixes own each. A page that nobody owns is free."""

    def __init__(self, pages: int, name: str):
        self.pages, self.name = pages, name
        self.used = [0] * pages  # sequences that own a page
        self.kept = [0] * pages  # prefixes that own a page
        self.busy = 0  # pages that a sequence owns
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that no sequence owns: free once the prefixes that own some of them are forgotten."""
        return self.pages - self.busy

    def take(self) -> int:
        """A free page for a sequence. Asking without looking first is a defect of the caller."""
        if not self._free:
            raise CapacityError(f"the {self.name} pool has no free page: all {self.pages} are held")
        page = self._free.pop()
        self.share(page)
        return page

    def share(self, page: int) -> None:
        """One more sequence owns a page."""
        self.busy += not self.used[page]
        self.used[page] += 1

    def give_back(self, page: int) -> None:
        """One sequence less owns a page."""
        self.used[page] -= 1
        self.busy -= not self.used[page]
        self._free_unowned(page)

    def keep(self, page: int) -> None:
        """One more prefix owns a page."""
        self.kept[page] += 1

    def forget(self, page: int) -> None:
        """One prefix less owns a page."""
        self.kept[page] -= 1
        self._free_unowned(page)

    def _free_unowned(self, page: int) -> None:
        if not self.used[page] and not self.kept[page]:
            self._free.append(page)


class SequencePages:
    """Pages that one sequence holds in one pool, by absolute page index (position // page size).

    With a window, pages wholly behind it can be let go; the page table is a ring of `width` columns.
    """

    def __init__(self, pool: PagePool, page_size: int, width: int, window: int | None):
        self.pool, self.page_size, self.width, self.window = pool, page_size, width, window
        self._first = 0  # absolute index of the oldest page held
        self._held: list[int] = []

    def held(self) -> dict[int, int]:
        """The pages held, by absolute index."""
        return dict(enumerate(self._held, self._first))

    def missing(self, length: int) -> int:
        """Pages still to take until a sequence of `length` tokens holds all that it ever holds at once."""
        return max(0, min(self.width, -(-length // self.page_size) - self._first) - len(self._held))

    def adopt(self, first: int, shared: tuple[int, ...]) -> None:
        """Begin with pages that others own too, the oldest of absolute index `first`; the next position lies behind them."""
        for page in shared:
            self.pool.share(page)
        self._first, self._held = first, list(shared)

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

    def row(self) -> list[int]:
        """The sequence's row of the page table; the number of pages stands for none."""
        row = [self.pool.pages] * self.width
        for absolute, page in self.held().items():
            row[absolute % self.width] = page
        return row

    def seen_from(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Absolute index of the oldest page that a query at `position`, a page's first, sees before it, and these pages."""
        end = position // self.page_size
        first = self._oldest_seen(position)
        return first, tuple(self._held[first - self._first : end - self._first])

    def drop_behind(self, position: int) -> list[int]:
        """Let go of pages that no query at `position` or later can see; their ids."""
        return self._release(min(self._oldest_seen(position) - self._first, len(self._held)))

    def drop_all(self) -> None:
        """Let go of everything."""
        self._release(len(self._held))
        self._first = 0

    def _oldest_seen(self, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 1) // self.page_size

    def _release(self, count: int) -> list[int]:
        count = max(0, count)
        released, self._held = self._held[:count], self._held[count:]
        self._first += count
        for page in released:
            self.pool.give_back(page)
        return released
