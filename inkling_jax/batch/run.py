"""A batch from its options to its summary: see what is to do, load the model, write what ends."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
from collections.abc import Callable, Iterable
from typing import BinaryIO

from inkling_jax.batch.lines import open_input
from inkling_jax.batch.progress import Progress
from inkling_jax.batch.records import error_record
from inkling_jax.batch.request import Defaults, Refused, id_key
from inkling_jax.batch.results import ResultFile, digest_in
from inkling_jax.batch.runner import Event, Runner
from inkling_jax.batch.summary import Summary
from inkling_jax.batch.survey import Marks, Shard, Survey, agreed, survey
from inkling_jax.command_line import OK
from inkling_jax.errors import InputError
from inkling_jax.interrupts import stop_signals
from inkling_jax.llm import LLM
from inkling_jax.processes import Place

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A file of requests ("-": standard input), the file of their records, and what runs them."""

    input: str
    output: str
    defaults: Defaults
    model: str  # what responses call it
    load: Callable[[bool], LLM]  # called, with whether there are media, where there is a line that can be run
    slots: int  # requests at once
    shard: Shard = Shard()
    quiet: bool = False
    place: Place | None = None  # among several processes

    def run(self) -> int:
        """Write the record of every line that has none; the exit code: 0 when every line has its record.

        A first Ctrl-C or SIGTERM drops what runs, and what is left is for the next run. Raises InputError, before the model is
        loaded, for files that are not what they must be. Of several processes the first alone has the output.
        """
        if self.place is not None and self.place.index:
            return self._follow()
        with open_input(self.input) as file, ResultFile(self.output) as results:
            if results.is_file(file.fileno()):
                raise InputError(f"--output {self.output} is the input: give another file")
            records, summary = Marks(), Summary()
            for found in results.records():
                records.add(id_key(found.get("custom_id", found["id"])), digest_in(found) or "")
                summary.add(found)
            todo = survey(file, self.defaults, records, self.shard, self.output)
            if self.place is not None:
                todo = agreed(todo)
            self._tell_what_is_to_do(todo)
            if todo.left == todo.wrong:
                refused = (task for task in todo.tasks(file, self.defaults) if isinstance(task, Refused))
                self._write((Event(error_record(task), 0) for task in refused), todo, results, summary)
                self._tell_what_was_done(summary)
                return OK
            with self.load(todo.media) as llm, stop_signals() as stop:
                runner = self._runner(llm, todo, file)
                with contextlib.closing(runner.events(lambda: stop)) as events:
                    written = self._write(events, todo, results, summary)
                reuse = llm.engine.prefix_statistics
        self._tell_what_was_done(summary)
        logger.info("  %s", reuse)
        if written == todo.left:
            return OK
        logger.warning(
            "stopped by %s: %s lines have no record yet; the same command goes on with them",
            signal.Signals(stop[0]).name if stop else "the file, which has become shorter",
            f"{todo.left - written:,}",
        )
        return 128 + stop[0] if stop else 1

    def _follow(self) -> int:
        """Take the steps that the first process takes, and leave the records to it."""
        with open_input(self.input) as file:
            todo = agreed(survey(file, self.defaults, Marks(), self.shard, self.output))
            if todo.left > todo.wrong:
                with (
                    self.load(todo.media) as llm,
                    contextlib.closing(self._runner(llm, todo, file).events(lambda: False)) as events,
                ):
                    for _ in events:
                        pass
        return OK

    def _runner(self, llm: LLM, todo: Survey, file: BinaryIO) -> Runner:
        slots = self.slots * llm.engine.replicas
        return Runner(llm, todo.tasks(file, self.defaults), slots, self.model, in_step=self.place is not None)

    def _write(self, events: Iterable[Event], todo: Survey, results: ResultFile, summary: Summary) -> int:
        """Write records as they come; how many."""
        written = 0
        with Progress(todo.left, quiet=self.quiet) as progress:
            for event in events:
                if event.record is not None:
                    results.add(event.record)
                    summary.add(event.record)
                    written += 1
                progress.update(written, event.tokens)
        if written:
            logger.info("%s", progress.average())
        return written

    def _tell_what_is_to_do(self, todo: Survey) -> None:
        name = "standard input" if self.input == "-" else self.input
        if self.shard.count > 1:
            name = f"shard {self.shard.index} of {self.shard.count} of {name}"
        if not todo.total:
            logger.warning("%s holds no line", name)
            return
        done = f", {todo.done:,} of them with a record in {self.output}" if todo.done else ""
        wrong = f"; {todo.wrong:,} cannot be run, which their records say why" if todo.wrong else ""
        logger.info("%s: %s lines%s%s", name, f"{todo.total:,}", done, wrong)

    def _tell_what_was_done(self, summary: Summary) -> None:
        if summary.lines:
            logger.info("%s: %s records", self.output, f"{summary.lines:,}")
        for line in summary.report() if summary.lines else ():
            logger.info("  %s", line)
