"""Prefixes of past prompts that others may begin with: by content, in pages of both geometries, forgotten least recently used.

A prefix ends at a page's end. To go on from it a sequence needs all global pages before, the local pages that the window reaches
back to, and the inputs of the convolutions there, which the engine copies while they are in a slot. Host code, never imports jax.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from inkling_jax.cache.allocator import PagePool, SequencePages

Span = tuple[int, int, bytes]  # first token, tokens and digest of what stands in for tokens of a prompt


def chain(token_ids: Sequence[int], page_size: int, media: Iterable[Span] = ()) -> list[bytes]:
    """A hash for each full page: of all tokens up to its end and of the media among them, whose placeholders are alike."""
    inside: dict[int, bytes] = {}
    for begin, count, digest in media:
        for page in range(begin // page_size, -(-(begin + count) // page_size)):
            inside[page] = inside.get(page, b"") + digest + (begin - page * page_size).to_bytes(8, "little", signed=True)
    hashes, last = [], b""
    for page in range(len(token_ids) // page_size):
        ids = array("q", token_ids[page * page_size : (page + 1) * page_size]).tobytes()
        last = hashlib.blake2b(last + ids + inside.get(page, b""), digest_size=16).digest()
        hashes.append(last)
    return hashes


@dataclasses.dataclass
class PrefixStatistics:
    """What prefix reuse has come to."""

    asked: int = 0  # prompt tokens of requests that began
    reused: int = 0  # of these, tokens that were not computed again
    hits: int = 0  # requests that reused any
    kept: int = 0  # prefixes that were kept
    evicted: int = 0  # of these, forgotten for want of room

    def __str__(self) -> str:
        share = f" ({self.reused / self.asked:.0%})" if self.asked else ""
        return (
            f"prompt tokens: {self.asked:,}, of which {self.reused:,}{share} were reused of earlier prompts by {self.hits:,} "
            f"requests; {self.kept:,} beginnings were kept, {self.evicted:,} forgotten for want of room"
        )


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A kept prefix: the hashes of its pages, its pages by pool (absolute index of the first, ids), and the engine's copy."""

    hashes: tuple[bytes, ...]
    pages: Mapping[str, tuple[int, tuple[int, ...]]]
    snapshot: Any


class PrefixIndex:
    """Up to `room` prefixes, least recently used first."""

    def __init__(self, pools: Mapping[str, PagePool], room: int):
        self._pools, self._room = pools, room
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()
        self._known: Counter[bytes] = Counter()  # by page, of how many prefixes it is one
        self.statistics = PrefixStatistics()

    def __len__(self) -> int:
        return len(self._prefixes)

    def find(self, hashes: Sequence[bytes]) -> Prefix | None:
        """The longest prefix that these pages begin with."""
        for key in reversed(hashes):
            if key in self._prefixes:
                self._prefixes.move_to_end(key)
                return self._prefixes[key]
        return None

    def known(self, hashes: Sequence[bytes]) -> int:
        """How many of these pages a kept prefix begins with, though it may go on otherwise."""
        return next((n for n in range(len(hashes), 0, -1) if hashes[n - 1] in self._known), 0)

    def keep(self, hashes: Sequence[bytes], pages: Mapping[str, SequencePages], take: Callable[[], Any]) -> None:
        """Keep the prefix of these pages, which a sequence holds now, and what `take` returns; unless it is kept already."""
        if hashes[-1] in self._prefixes:
            return
        while len(self) >= self._room:
            self.evict()
        found = {name: held.seen_from(len(hashes) * held.page_size) for name, held in pages.items()}
        for name, (_, ids) in found.items():
            for page in ids:
                self._pools[name].keep(page)
        self._prefixes[hashes[-1]] = Prefix(tuple(hashes), found, take())
        self._known.update(hashes)
        self.statistics.kept += 1

    def evict(self) -> None:
        """Forget the prefix that was used least recently."""
        self.statistics.evicted += 1
        self.forget(next(iter(self._prefixes)))

    def forget_all(self) -> None:
        """Forget every prefix."""
        for key in list(self._prefixes):
            self.forget(key)

    def forget(self, key: bytes) -> None:
        """Forget a prefix by the hash of its last page, if it is kept."""
        prefix = self._prefixes.pop(key, None)
        if prefix is None:
            return
        for name, (_, ids) in prefix.pages.items():
            for page in ids:
                self._pools[name].forget(page)
        self._known.subtract(prefix.hashes)
        for digest in prefix.hashes:
            if not self._known[digest]:
                del self._known[digest]
