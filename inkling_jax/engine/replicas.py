"""The schedulers of all replicas as one: each has slots and pages of its own, a request goes where most slots are free.

Slots are numbered through: replica r has those from r * (slots + 1) on, the last of them reserved for padding. Never imports jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from inkling_jax.cache.allocator import PagePool
from inkling_jax.engine.request import Request
from inkling_jax.engine.scheduler import Limits, Plan, Scheduler
from inkling_jax.engine.sequence import Sequence


class Replicas:
    """What a Scheduler is to the engine, of several. Requests wait together until a replica has a slot for them."""

    prefixes = None  # a prefix lies on one replica: none is kept where there are several

    def __init__(self, limits: Limits, count: int):
        """`count` replicas of `limits`."""
        self.stride = limits.slots + 1
        self.schedulers = [Scheduler(dataclasses.replace(limits, prefixes=0, first_slot=r * self.stride)) for r in range(count)]
        self._line: list[Sequence] = []

    @property
    def running(self) -> list[Sequence]:
        """All that run, by replica."""
        return [sequence for scheduler in self.schedulers for sequence in scheduler.running]

    @property
    def waiting(self) -> list[Sequence]:
        """All that wait, those first that a replica has taken."""
        return [sequence for scheduler in self.schedulers for sequence in scheduler.waiting] + self._line

    @property
    def free_slots(self) -> list[int]:
        """Those of all replicas."""
        return [slot for scheduler in self.schedulers for slot in scheduler.free_slots]

    @property
    def pools(self) -> dict[str, PagePool]:
        """The pools of every replica, by its number and their names."""
        return {f"{name} {r}": pool for r, scheduler in enumerate(self.schedulers) for name, pool in scheduler.pools.items()}

    def add(self, request: Request) -> Sequence:
        """Put a request in line. Raises what `Scheduler.add` does; replicas are alike, so what one refuses all do."""
        first = self.schedulers[0]  # whose clock and arrivals are those of all
        sequence = first.add(request)
        first.waiting.remove(sequence)
        first._line_up(sequence, self._line)
        return sequence

    def overdue(self) -> list[Sequence]:
        """As `Scheduler.overdue`."""
        return self.schedulers[0].overdue()

    def plans(self) -> list[Plan]:
        """The next step of each replica: where one reads prompts, the others decode one token beside it."""
        while self._line:
            replica = max(self.schedulers, key=lambda scheduler: len(scheduler.free_slots) - len(scheduler.waiting))
            if len(replica.free_slots) <= len(replica.waiting):
                break
            replica.take(self._line.pop(0))
        beside = any(scheduler.reads() for scheduler in self.schedulers)
        return [scheduler.plan(beside) for scheduler in self.schedulers]

    def open(self, request: Request) -> Sequence:
        """As `Scheduler.open`, on the replica with most slots free."""
        return max(self.schedulers, key=lambda scheduler: len(scheduler.free_slots)).open(request)

    def hold(self, sequence: Sequence, begin: int, end: int) -> dict[str, list[tuple[int, int, int]]]:
        """As `Scheduler.hold`."""
        return self._of(sequence).hold(sequence, begin, end)

    def keep(self, sequence: Sequence, end: int, take: Callable[[], Any]) -> None:
        """As `Scheduler.keep`; no plan asks for it."""
        self._of(sequence).keep(sequence, end, take)

    def lose_all(self) -> None:
        """As `Scheduler.lose_all`."""
        for scheduler in self.schedulers:
            scheduler.lose_all()

    def retire(self, sequence: Sequence, *, spoilt: bool = False) -> None:
        """As `Scheduler.retire`."""
        if sequence in self._line:
            sequence.done = True
            self._line.remove(sequence)
        elif not sequence.done:
            self._of(sequence).retire(sequence, spoilt=spoilt)

    def _of(self, sequence: Sequence) -> Scheduler:
        """Where a sequence runs, or waits since it lost its slot."""
        pool = sequence.pages["global"].pool
        return next(scheduler for scheduler in self.schedulers if scheduler.pools["global"] is pool)
