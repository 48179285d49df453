"""Compiles every program that requests can lead to, side by side, before the first request waits for one.

The programs are those of `engine.shapes`: a chunk of each size, a decode call of each number of rows, each for every bound on
lengths and both ways to sample. Where the model has towers, also these, what lays out their rows, and a chunk that takes rows.
What scores or traces a prompt is not among them.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TextIO

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inkling_jax.engine import sampler
from inkling_jax.engine.engine import Engine
from inkling_jax.engine.pack import pack_chunk, pack_decode, side_by_side
from inkling_jax.engine.request import SamplingParams
from inkling_jax.engine.steps import Sampling
from inkling_jax.errors import InputError

_SECONDS_BETWEEN_LINES = 10.0

Step = tuple[Callable[..., Any], Any, dict[str, Any]]  # a jitted one, its inputs and what is static


def warm_up(
    engine: Engine,
    *,
    samplings: list[Sampling] | None = None,
    media: bool = True,
    quiet: bool = False,
    stream: TextIO | None = None,
) -> int:
    """Compile all, and run each once with no row in it; how many there are. The engine must be idle.

    samplings: those of `engine.samplings` that requests will need, by default all. media: whether they may hold any. Progress
    goes to `stream`, standard error by default: a bar on a terminal, plain lines elsewhere, nothing when quiet.
    """
    if engine.busy:
        raise InputError("an engine is warmed up before it has requests")
    programs = list(idle_programs(engine, engine.samplings if samplings is None else samplings, media))
    towers = list(engine.media.programs(engine.replicas * engine.shapes.chunks[-1])) if media else []
    count = len(programs) + len(towers)
    tell = _Progress(count, sys.stderr if stream is None else stream, quiet)
    with tell, ThreadPoolExecutor(min(count, os.cpu_count() or 1)) as pool:
        # tracing holds the interpreter's lock, so this thread traces the next program while others compile
        compiling = [pool.submit(program.lower(*arguments).compile) for program, arguments in towers]
        compiling += [
            pool.submit(step.lower(engine.leaves, engine.state, inputs, **static).compile) for step, inputs, static in programs
        ]
        for future in as_completed(compiling):
            future.result()
            tell.advance()
    for program, arguments in towers:
        program(*arguments)
    for step, inputs, static in programs:
        made, engine.state = step(engine.leaves, engine.state, inputs, **static)
    values = sampler.slot_values(SamplingParams(temperature=0), (), engine.vocab, np.zeros(2, np.uint32))
    row = sampler.prompt_row((), engine.state.sampler.prompt_seen.shape[1])
    engine.state = dataclasses.replace(
        engine.state, sampler=sampler.resume(sampler.admit(engine.state.sampler, 0, values, row), 0, ())
    )
    if engine.scheduler.prefixes is not None:
        engine.state = dataclasses.replace(engine.state, cache=engine.snapshots.warm_up(engine.state.cache))
    jax.block_until_ready(engine.state)
    return count


def idle_programs(engine: Engine, samplings: list[Sampling], media: bool) -> Iterator[Step]:
    """Each step with inputs of its shapes that have no row: it changes nothing that a request could see."""
    shapes, nothing = engine.shapes, {"global": [], "local": []}
    steps = engine.options.tokens_per_call
    rows_of_media = engine.media.idle_rows(engine.replicas * shapes.chunks[-1]) if media else None
    for context in shapes.contexts:
        for rows in shapes.rows:
            inputs = side_by_side([pack_decode([], nothing, engine.shape, rows, steps)] * engine.replicas)
            for sampling in samplings:
                yield engine.programs.decode, inputs, {"context": context, "sampling": sampling, "steps": steps}
        chunks = [side_by_side([pack_chunk([], nothing, engine.shape, n)] * engine.replicas) for n in shapes.chunks]
        if rows_of_media is not None:
            chunks.append(dataclasses.replace(chunks[-1], media=rows_of_media))
        for chunk in chunks:
            for sampling in samplings:
                yield engine.programs.prefill, chunk, {"context": context, "sampling": sampling}


class _Progress:
    """A context manager; `advance` says that one more of `total` programs is compiled."""

    def __init__(self, total: int, stream: TextIO, quiet: bool):
        self._total, self._done, self._stream = total, 0, stream
        self._plain = not quiet and not stream.isatty()
        columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TextColumn("programs"), TimeElapsedColumn())
        self._bar = None if quiet or self._plain else Progress(*columns, console=Console(file=stream))

    def __enter__(self) -> None:
        self._start = self._told = time.monotonic()
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        self._line(f"compiling {self._total} programs")

    def advance(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        if time.monotonic() - self._told >= _SECONDS_BETWEEN_LINES:
            self._line(f"compiled {self._done} of {self._total} programs")

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._line(f"compiled {self._done} of {self._total} programs in {time.monotonic() - self._start:.1f} s")

    def _line(self, text: str) -> None:
        self._told = time.monotonic()
        if self._plain:
            print(text, file=self._stream, flush=True)
