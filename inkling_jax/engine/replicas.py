"""The schedulers of all replicas as one: each has slots and pages of its own, a request goes where most slots are free.

Slots are numbered through: replica r has those from r * (slots + 1) on, the last of them reserved for padding. Never imports jax.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from inkling_jax.cache.allocator import PagePool
from inkling_jax.engine.request import Request
from inkling_jax.engine.scheduler import Limits, Scheduler, Sequence


class Replicas:
    """What a Scheduler is to the engine, of several. Requests wait together and are dealt out when they are admitted."""

    def __init__(self, limits: Limits, count: int):
        self.stride = limits.slots + 1
        self.schedulers = [Scheduler(dataclasses.replace(limits, first_slot=r * self.stride)) for r in range(count)]
        self.waiting: deque[Sequence] = deque()

    @property
    def running(self) -> list[Sequence]:
        """All that run, by replica."""
        return [sequence for scheduler in self.schedulers for sequence in scheduler.running]

    @property
    def free_slots(self) -> list[int]:
        """Those of all replicas."""
        return [slot for scheduler in self.schedulers for slot in scheduler.free_slots]

    @property
    def pools(self) -> dict[str, PagePool]:
        """The pools of every replica, by its number and their names."""
        return {f"{name} {r}": pool for r, scheduler in enumerate(self.schedulers) for name, pool in scheduler.pools.items()}

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises what `Scheduler.add` does; replicas are alike, so what one refuses all do."""
        first = self.schedulers[0]
        sequence = first.add(request)
        first.waiting.remove(sequence)
        self.waiting.append(sequence)
        return sequence

    def admit(self) -> list[Sequence]:
        """Move waiting sequences to the replicas with most slots free, in order, as far as any has slot and pages for them."""
        admitted = []
        while self.waiting:
            for scheduler in sorted(self.schedulers, key=lambda scheduler: -len(scheduler.free_slots)):
                if scheduler.take(self.waiting[0]):
                    admitted.append(self.waiting.popleft())
                    break
            else:
                break
        return admitted

    def next_chunk(self) -> list[tuple[Sequence, int, int]]:
        """The next prompt chunk of every replica that has one, as `Scheduler.next_chunk` has it."""
        return [part for scheduler in self.schedulers for part in scheduler.next_chunk()]

    def grow(self, sequence: Sequence, begin: int, end: int) -> dict[str, list[tuple[int, int]]]:
        """As `Scheduler.grow`."""
        return self._of(sequence).grow(sequence, begin, end)

    def retire(self, sequence: Sequence) -> None:
        """As `Scheduler.retire`."""
        if sequence.slot >= 0:
            self._of(sequence).retire(sequence)
        elif not sequence.done:
            sequence.done = True
            self.waiting.remove(sequence)

    def _of(self, sequence: Sequence) -> Scheduler:
        return self.schedulers[sequence.slot // self.stride]
