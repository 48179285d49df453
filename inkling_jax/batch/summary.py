"""What a batch has come to, told of its records alone, so that those of earlier runs count too. Memory is bounded."""

from __future__ import annotations

from collections import Counter
from typing import Any

from inkling_jax.batch.records import Outcome, outcomes

_NAMED = 10  # ids that are told of each oddity
_PIECE, _REPEATED, _TIMES = 200, 120, 4  # characters of a piece at most, of its repetitions at least, and how many at least


class Summary:
    """Counts over records."""

    def __init__(self) -> None:
        self.lines = 0
        self.reasons: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()  # tokens made, by line
        self.odd: dict[str, list[Any]] = {}  # the first ids of each oddity
        self.counts: Counter[str] = Counter()

    def add(self, record: dict[str, Any]) -> None:
        """Count a record."""
        self.lines += 1
        error, tokens, answers = outcomes(record)
        kinds = {"error": error} if error is not None else {}
        for answer in answers:
            self.reasons[answer.finish_reason] += 1
            kinds |= dict.fromkeys(oddities(answer))
        if error is None:
            self.lengths[tokens] += 1
        else:
            self.reasons["error"] += 1
        name = record.get("custom_id", record["id"])
        for kind, message in kinds.items():
            self.counts[kind] += 1
            named = self.odd.setdefault(kind, [])
            if len(named) < _NAMED:
                named.append(f"{name!r} ({message[:100]})" if message else repr(name))

    def report(self) -> list[str]:
        """Lines for people."""
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.reasons.most_common())
        found = [f"ended by: {reasons}"] if reasons else []
        if self.lengths:
            total = sum(length * count for length, count in self.lengths.items())
            low, middle, high = (self._percentile(share) for share in (0.05, 0.5, 0.95))
            found.append(
                f"tokens a line: least {min(self.lengths):,}, 5% {low:,}, median {middle:,}, 95% {high:,}, "
                f"most {max(self.lengths):,}; {total:,} in all"
            )
        for kind in ("error", "unclosed thinking", "repetition", "empty"):
            count, named = self.counts[kind], self.odd.get(kind, [])
            rest = f" and {count - len(named):,} more" if count > len(named) else ""
            found.append(f"{kind}: {count:,}" + (f", id {', '.join(named)}{rest}" if named else ""))
        return found

    def _percentile(self, share: float) -> int:
        """The least length that at least `share` of the lines do not exceed."""
        seen, total = 0, sum(self.lengths.values())
        for length in sorted(self.lengths):
            seen += self.lengths[length]
            if seen >= share * total:
                return length
        raise AssertionError("there are lengths")


def oddities(answer: Outcome) -> list[str]:
    """Which of "unclosed thinking", "repetition" and "empty" an answer shows."""
    found = []
    silent = not answer.text.strip() and not answer.called
    if silent and answer.finish_reason == "length" and answer.reasoning:
        found.append("unclosed thinking")
    elif silent:
        found.append("empty")
    if repeats(answer.text) or repeats(answer.reasoning):
        found.append("repetition")
    return found


def repeats(text: str) -> bool:
    """Whether a text ends in one piece over and over: of up to 200 characters, four times or more, 120 characters or more."""
    for piece in range(1, min(_PIECE, len(text) // _TIMES) + 1):
        end = max(_TIMES * piece, _REPEATED)
        if end <= len(text) and text[-end:-piece] == text[piece - end :]:
            return bool(text[-piece:].strip())
    return False
