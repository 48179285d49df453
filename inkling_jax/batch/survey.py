"""What a batch has still to do: its lines against the records that are there, before a weight is read.

Of each line and each record two numbers are kept, 16 bytes, and little more, so that millions of lines may be compared.
"""

from __future__ import annotations

import dataclasses
import zlib
from array import array
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from inkling_jax.batch.lines import numbered_lines
from inkling_jax.batch.request import Defaults, Head, Job, Refused, digest_of, read_line
from inkling_jax.errors import InputError
from inkling_jax.processes import of_all_processes, of_the_first


class Marks:
    """The digest of each id and of each line or record, in order."""

    def __init__(self) -> None:
        self.ids, self.digests = array("Q"), array("Q")

    def add(self, key: str, digest: str) -> None:
        """`key` is a `id_key`."""
        self.ids.append(int(digest_of(key), 16))
        self.digests.append(int(digest, 16))


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of the lines: those whose number, counted from 0, leaves `index` when divided by `count`."""

    index: int = 0
    count: int = 1

    def holds(self, number: int) -> bool:
        """Whether line `number`, counted from 1, belongs to it."""
        return (number - 1) % self.count == self.index


@dataclasses.dataclass(frozen=True)
class Survey:
    """The lines of a shard: how many, how many have their record, how many of the others cannot be run; and which these are."""

    total: int
    done: int
    wrong: int
    media: bool  # whether one that can be run holds any
    priorities: np.ndarray  # int8, for each line as in `todo`
    todo: np.ndarray  # bool, for each line of the file that is not blank
    repeats: dict[int, int]  # by place in `todo`: the number of the line whose id is repeated
    check: int  # a sum over all lines and the settings that they are answered with

    @property
    def left(self) -> int:
        """How many have no record."""
        return self.total - self.done

    def tasks(self, file: BinaryIO, defaults: Defaults) -> Iterator[Job | Refused]:
        """The lines without a record, read again: those of a priority in order, the highest first."""
        for priority in sorted(set(self.priorities[self.todo].tolist()), reverse=True):
            mine = self.todo & (self.priorities == priority)
            # a file that has grown has more lines: the next run will see
            for place, (number, content) in zip(range(len(mine)), numbered_lines(file), strict=False):
                if mine[place]:
                    task = read_line(number, content, defaults)
                    first = self.repeats.get(place)
                    yield task if first is None else _repeat(task.head, first)


def survey(file: BinaryIO, defaults: Defaults, records: Marks, shard: Shard, output: str) -> Survey:
    """Compare all lines with the records of the file `output`. Raises InputError where one's record is of another line."""
    lines, numbers, wrong, shows = Marks(), array("Q"), bytearray(), bytearray()
    priorities = array("b")
    for number, content in numbered_lines(file):
        task = read_line(number, content, defaults)
        lines.add(task.head.key, task.head.digest)
        numbers.append(number)
        wrong.append(isinstance(task, Refused))
        shows.append(isinstance(task, Job) and task.media)
        priorities.append(task.priority if isinstance(task, Job) else 0)
    ids, digests, places = (np.asarray(marks, np.uint64) for marks in (lines.ids, lines.digests, numbers))
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    repeated = np.flatnonzero(first[inverse] != np.arange(len(ids)))
    repeats = {int(place): numbers[int(first[inverse[place]])] for place in repeated}
    for place in repeats:
        digests[place] = int(_repeat_digest(f"{lines.digests[place]:016x}", numbers[place]), 16)
    there = np.asarray(records.digests, np.uint64)
    done = np.isin(digests, there)
    first_ones = np.asarray(records.ids, np.uint64)[~np.isin(there, digests[repeated])]
    changed = np.isin(ids, first_ones) & ~done
    changed[repeated] = False
    mine = (places - np.uint64(1)) % np.uint64(shard.count) == shard.index
    if changed.any():
        number = numbers[int(np.flatnonzero(changed)[0])]
        raise InputError(
            f"{output} holds a record with the id of line {number} ({changed.sum():,} such lines), made from another line or "
            "with other settings (model, sampling, effort, seed): give another --output, or what was given then"
        )
    refused = np.asarray(wrong, bool)
    refused[repeated] = True
    todo = mine & ~done
    total, ready, cannot = (int(np.count_nonzero(found)) for found in (mine, mine & done, todo & refused))
    media = bool((todo & ~refused & np.asarray(shows, bool)).any())
    return Survey(total, ready, cannot, media, np.asarray(priorities, np.int8), todo, repeats, zlib.crc32(digests.tobytes()))


def agreed(mine: Survey) -> Survey:
    """What all processes are to do: what the first found, which alone sees the records. InputError where their lines differ."""
    found = of_all_processes([len(mine.todo), mine.check, mine.total, mine.done, mine.wrong, mine.media])
    if len({(lines, check) for lines, check, *_ in found}) > 1:
        raise InputError("the processes do not have the same lines in --input, or not the same settings")
    total, done, wrong, media = found[0][2:]
    return dataclasses.replace(mine, total=total, done=done, wrong=wrong, media=bool(media), todo=of_the_first(mine.todo))


def _repeat(head: Head, first: int) -> Refused:
    again = dataclasses.replace(head, digest=_repeat_digest(head.digest, head.number))
    return Refused(again, f"line {head.number} repeats the id of line {first}")


def _repeat_digest(digest: str, number: int) -> str:
    """Lines that repeat an id may be equal: their records are told apart by their numbers."""
    return digest_of(digest, str(number))
