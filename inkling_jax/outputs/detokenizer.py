"""Token ids to text as they come: never half a character, never a stop string, never a second look at what was decoded."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Iterable

from inkling_jax.errors import InputError
from inkling_jax.inputs.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one growing sequence: what `push` and `finish` return, joined, is the decoding of all ids up to the stop string.

    Stop strings are matched on bytes, so across tokens and inside them; of several, the one that is complete first counts (the
    longest if two end together), however the ids are cut into calls. Text that may begin a stop string is held back. `stopped`
    is the stop string that was found; `kept_tokens` the number of leading ids that certainly belong to the text, which never
    falls: those of which nothing is held back; at a stop string all to the last one that has a byte before it or comes before
    it without any; all once finished. Once stopped, ids are ignored. Control tokens are no text. Costs O(1) amortised a token.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: str | Collection[str] = ()):
        """Raises InputError for a stop that is empty or not a string."""
        self.stopped: str | None = None
        self.kept_tokens = 0
        self._tokenizer = tokenizer
        self._matchers = [_Matcher(s) for s in ((stop,) if isinstance(stop, str) else stop)]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = bytearray()  # the last bytes seen, not decoded yet: perhaps the beginning of a stop string
        self._length = 0  # bytes seen, those held included
        self._places: deque[tuple[int, int]] = deque()  # offsets of the first byte and past the last of each token not kept yet

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` make certain, beyond what was returned before. Raises InputError for an id out of range."""
        if self.stopped is not None:
            return ""
        for token_id in ids:
            data = self._tokenizer.token_bytes(token_id)
            self._places.append((self._length, self._length + len(data)))
            found = self._append(data)
            if found is not None:
                self.stopped = found.text
                return self._release(self._length - len(found.pattern), final=True)
        return self._release(self._length - max((m.matched for m in self._matchers), default=0))

    def finish(self) -> str:
        """The rest of the text, no more ids coming: what was held back, and U+FFFD for a character left incomplete."""
        return "" if self.stopped is not None else self._release(self._length, final=True)

    def _append(self, data: bytes) -> _Matcher | None:
        """Hold `data`, up to the byte that completes a stop string if one does; returns that one."""
        if not self._matchers:
            self._held += data
            self._length += len(data)
            return None
        for byte in data:
            self._held.append(byte)
            self._length += 1
            complete = [m for m in self._matchers if m.advance(byte)]
            if complete:
                return max(complete, key=lambda m: len(m.pattern))
        return None

    def _release(self, until: int, final: bool = False) -> str:
        """Decode the held bytes before offset `until`, and keep their tokens: with `final`, one that has but some of them too."""
        while self._places and (self._places[0][1] <= until or (final and self._places[0][0] < until)):
            self._places.popleft()
            self.kept_tokens += 1
        count = until - (self._length - len(self._held))
        data = bytes(self._held[:count])
        del self._held[:count]
        return self._decoder.decode(data, final)


class _Matcher:
    """Knuth-Morris-Pratt search for one stop string in a stream of bytes."""

    def __init__(self, text: str):
        if not isinstance(text, str) or not text:
            raise InputError(f"stop string {text!r} must be a non-empty str")
        self.text = text
        self.pattern = text.encode("utf-8", "surrogatepass")
        self.matched = 0  # length of the longest beginning of the pattern that the stream ends with
        self._fallback = [0] * len(self.pattern)
        for n, byte in enumerate(self.pattern[1:], start=1):
            self.advance(byte)
            self._fallback[n] = self.matched
        self.matched = 0

    def advance(self, byte: int) -> bool:
        """Take the next byte of the stream; True when it completes the pattern."""
        while self.matched and self.pattern[self.matched] != byte:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.pattern[self.matched] == byte
        return self.matched == len(self.pattern)
