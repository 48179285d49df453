"""The sizes that steps are compiled for: few, chosen once, so that a start can compile them all and traffic compiles none.

On a large model every program takes the compiler tens of seconds, so sizes grow in strides: what is padded costs less than a
program more. Weights are read once a step whatever its rows, idle rows read no cache and hit no expert.
"""

from __future__ import annotations

import dataclasses

from inkling_jax.cache.paged import CacheShape
from inkling_jax.engine.request import MAX_LOGPROBS
from inkling_jax.engine.sampler import Mode

SMALLEST_CHUNK = 16  # tokens of the smallest prompt chunk
SMALLEST_CONTEXT = 1024  # positions of the smallest bound on lengths
ROWS_STRIDE, CHUNK_STRIDE, CONTEXT_STRIDE = 4, 8, 4
# How steps sample, each of which expresses all that those before it do: noise, or everything. The mode changes no token.
SAMPLINGS: tuple[tuple[Mode, int | None], ...] = (("sample", None), ("full", MAX_LOGPROBS))


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Ascending sizes; a step takes the smallest that holds it."""

    chunks: tuple[int, ...]  # tokens of a prompt chunk
    rows: tuple[int, ...]  # sequences of a decode call
    contexts: tuple[int, ...]  # bounds on lengths, in positions

    @staticmethod
    def of(cache: CacheShape, chunk: int, *, bounded: bool = True, single: bool = False) -> Shapes:
        """Sizes for a cache and prompt chunks of `chunk` tokens. `bounded`: attention's work grows with the bound on lengths.

        Hopper's attention reads what there is, whatever the bound, so that with it the whole context is the only one. `single`:
        the largest of everything, so that a step's shape says nothing of who is in it.
        """
        whole = -(-cache.max_context // cache.page_size) * cache.page_size
        contexts = _up_to(whole, SMALLEST_CONTEXT, CONTEXT_STRIDE) if bounded else (whole,)
        chunks = _down_from(max(SMALLEST_CHUNK, bucket(chunk)), SMALLEST_CHUNK, CHUNK_STRIDE)
        rows = _down_from(bucket(cache.slots), ROWS_STRIDE, ROWS_STRIDE)
        rows = rows if rows[0] == 1 else (1, *rows)
        return Shapes(chunks[-1:], rows[-1:], contexts[-1:]) if single else Shapes(chunks, rows, contexts)


def bucket(size: int) -> int:
    """The power of two that holds `size`."""
    return 1 << max(0, size - 1).bit_length()


def smallest(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest of ascending sizes that holds what is wanted."""
    return next(size for size in sizes if size >= wanted)


def _down_from(largest: int, least: int, stride: int) -> tuple[int, ...]:
    sizes = [largest]
    while sizes[-1] // stride >= least:
        sizes.append(sizes[-1] // stride)
    return tuple(reversed(sizes))


def _up_to(whole: int, least: int, stride: int) -> tuple[int, ...]:
    sizes = [least]
    while sizes[-1] < whole:
        sizes.append(sizes[-1] * stride)
    return (*sizes[:-1], min(sizes[-1], whole))
