"""Requests through the engine without a pause: a thread prepares the next ones while those before run."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from inkling_jax.batch.records import error_record, record
from inkling_jax.batch.request import Job, Refused, plain
from inkling_jax.completion import Writer
from inkling_jax.conversation import next_call, told_apart
from inkling_jax.engine.calls import Call
from inkling_jax.engine.request import Request
from inkling_jax.errors import InklingError
from inkling_jax.llm import LLM

logger = logging.getLogger(__name__)

AHEAD = 8  # requests that are prepared before there is room for them: each may hold images of 100 MB


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A job as the engine takes it: its n samples."""

    job: Job
    requests: list[Request]


@dataclasses.dataclass
class _Running:
    """A job in the engine."""

    job: Job
    prompt_ids: tuple[int, ...]
    writers: list[Writer]
    left: int  # samples that have not ended


@dataclasses.dataclass(frozen=True)
class Event:
    """A line that has ended, with its record, or none; and the tokens made until now."""

    record: dict[str, Any] | None
    tokens: int


class Runner:
    """Turns tasks into records, in the order that they end. At most `slots` requests run, and few more are in memory."""

    def __init__(self, llm: LLM, tasks: Iterator[Job | Refused], slots: int, model: str, in_step: bool = False):
        """`model` is what responses call the model. `in_step`: with other processes, so no clock may decide what is next."""
        self._in_step = in_step
        self._llm, self._tasks, self._slots, self._model = llm, tasks, slots, model
        self._coming: deque[Future[_Ready | Refused | None]] = deque()
        self._ended = False  # no task is left to prepare
        self._running: dict[int, tuple[_Running, Writer]] = {}
        self._tokens = 0

    def events(self, stopped: Callable[[], object]) -> Generator[Event, None, None]:
        """Run all, or until `stopped()` is true: what has not ended then is dropped. An event comes at least every step."""
        with self._llm.calls.open() as call, ThreadPoolExecutor(1) as pool:
            try:
                while not stopped():
                    yield from self._fill(call, pool)
                    if not self._running:
                        return
                    yield from self._step(call)
            finally:
                for future in self._coming:
                    future.cancel()

    def _fill(self, call: Call, pool: ThreadPoolExecutor) -> Iterator[Event]:
        """Give the engine as many requests as it has room for, waiting for them only where nothing runs, or others do."""
        while True:
            while not self._ended and len(self._coming) < AHEAD:
                self._coming.append(pool.submit(self._prepare))
            if not self._coming or (self._running and (len(call) >= self._slots or not self._is_ready(self._coming[0]))):
                return
            ready = self._coming.popleft().result()
            if ready is None:
                self._ended = True
            else:
                refused = ready if isinstance(ready, Refused) else self._add(call, ready)
                if refused is not None:
                    yield Event(error_record(refused), self._tokens)

    def _is_ready(self, coming: Future[_Ready | Refused | None]) -> bool:
        return self._in_step or coming.done()

    def _prepare(self) -> _Ready | Refused | None:
        """The next task, its text encoded and its media read; None after the last. The thread alone takes tasks."""
        task = next(self._tasks, None)
        if task is None or isinstance(task, Refused):
            return task
        try:
            if task.messages is None:
                assert task.prompt is not None
                prompt = task.prompt
            else:
                prompt = self._llm.chat_prompt(task.messages, tools=task.tools, effort=task.effort)
            requests = self._llm.requests(prompt, task.params)
            when = {"priority": task.priority, "deadline": task.deadline}
            return _Ready(task, [dataclasses.replace(request, **when) for request in requests])
        except (InklingError, OSError) as error:
            return Refused(task.head, str(error))
        except Exception as error:  # one line must not end the job, but this is a fault of ours
            logger.warning("line %d: %s: %s", task.head.number, type(error).__name__, error)
            logger.debug("its traceback", exc_info=True)
            return Refused(task.head, f"{type(error).__name__}: {error}")

    def _add(self, call: Call, ready: _Ready) -> Refused | None:
        """Queue a job's requests; what the engine says against one of them."""
        writers = [Writer(self._llm.tokenizer, request) for request in ready.requests]
        job, added = _Running(ready.job, ready.requests[0].prompt_ids, writers, len(writers)), []
        try:
            for request in ready.requests:
                added.append(call.add(request))
        except InklingError as error:
            for request_id in added:
                call.drop(request_id)
            return Refused(ready.job.head, plain(str(error)))
        self._running |= {request_id: (job, writer) for request_id, writer in zip(added, writers, strict=True)}
        return None

    def _step(self, call: Call) -> Iterator[Event]:
        for request_id, output in call.step():
            if request_id not in self._running:
                continue  # ended at a stop string
            job, writer = self._running[request_id]
            delta = writer.push(output)
            self._tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                call.drop(request_id)
                del self._running[request_id]
                job.left -= 1
                if not job.left:
                    yield Event(self._record(job), self._tokens)
        yield Event(None, self._tokens)

    def _record(self, job: _Running) -> dict[str, Any]:
        made = [writer.completion() for writer in job.writers]
        messages = job.job.messages
        if messages is None:
            return record(job.job, made, self._model)
        tokenizer = self._llm.tokenizer
        assert tokenizer is not None, "there is no chat prompt without one"
        answers = [told_apart(tokenizer, one, job.prompt_ids, next_call(messages)) for one in made]
        return record(job.job, answers, self._model)
