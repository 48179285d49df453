"""Arithmetic of the parts of an array: what a device holds, in which blocks it is read, and which blocks are one in the file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from inkling_jax.convert.view import Box


def whole(shape: Sequence[int]) -> Box:
    """All of an array."""
    return tuple(slice(0, size) for size in shape)


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """An index as a sharding gives it, with every start and stop written out."""
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a part."""
    return tuple(part.stop - part.start for part in box)


def within(box: Box, outer: Box) -> Box:
    """Where the part `box` lies in the part `outer` that holds it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def moved(box: Box, outer: Box) -> Box:
    """Where the part `box` of the part `outer` lies in the array."""
    return tuple(slice(a.start + b.start, a.stop + b.start) for a, b in zip(box, outer, strict=True))


def blocks(shape: Sequence[int], order: Sequence[int], grain: Sequence[int], limit: int) -> Iterator[Box]:
    """Cut an array into parts of at most `limit` elements, or of `grain`, one after the other in the file.

    `order` names the axes from the one that jumps furthest in the file; an axis is cut at multiples of its `grain`.
    """
    if not order or math.prod(shape) <= limit:
        yield whole(shape)
        return
    axis, *inner = order
    row = math.prod(shape) // shape[axis]
    # A row of the file's outermost axis is cut further only where it does not fit.
    rows = limit // row // grain[axis] * grain[axis] or min(grain[axis], shape[axis])
    for start in range(0, shape[axis], rows):
        stop = min(start + rows, shape[axis])
        part = [*shape]
        part[axis] = stop - start
        for box in blocks(part, inner, grain, limit):
            cut = list(box)
            cut[axis] = slice(start, stop)
            yield tuple(cut)


def joined(boxes: Sequence[Box], shape: Sequence[int], order: Sequence[int]) -> list[tuple[Box, list[int]]]:
    """Parts of an array as fewer ones, each with the numbers of those that it is made of.

    Parts become one where that leaves no gap in the file: columns of the same rows.
    """
    differing = [axis for axis in order if len({(box[axis].start, box[axis].stop) for box in boxes}) > 1]
    axis = differing[-1] if differing else None
    if axis is None or any(extents(boxes[0])[a] < shape[a] for a in order[list(order).index(axis) + 1 :]):
        return [(box, [i]) for i, box in enumerate(boxes)]
    found: list[tuple[Box, list[int]]] = []
    for i in sorted(range(len(boxes)), key=lambda i: tuple((boxes[i][a].start) for a in (*differing[:-1], axis))):
        box = boxes[i]
        last = found[-1][0] if found else None
        if last and last[axis].stop == box[axis].start and _apart(last, axis) == _apart(box, axis):
            found[-1] = ((*box[:axis], slice(last[axis].start, box[axis].stop), *box[axis + 1 :]), [*found[-1][1], i])
        else:
            found.append((box, [i]))
    return found


def _apart(box: Box, axis: int) -> Box:
    return (*box[:axis], *box[axis + 1 :])
