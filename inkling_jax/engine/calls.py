"""One engine for several callers at once, such as a completion asked for within the loop over a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from inkling_jax.engine.engine import Engine
from inkling_jax.engine.output import Output
from inkling_jax.engine.request import Request
from inkling_jax.errors import InputError
from inkling_jax.interrupts import hold_interrupts


class EngineCalls:
    """Steps the engine, and keeps what it makes for the call that asked for it."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.mail: dict[int, deque[Output]] = {}  # by request

    def open(self) -> Call:
        """A call without requests."""
        return Call(self)

    def step(self) -> None:
        """Step the engine, and put its outputs where each call finds its own."""
        self.uninterrupted(self._step)

    def uninterrupted[T](self, step: Callable[[], T]) -> T:
        """What `step` returns. Ctrl-C waits for its end, or the state would be lost; a second one does not, and closes all."""
        with hold_interrupts():
            try:
                return step()
            except KeyboardInterrupt:
                self.engine.close()
                raise

    def _step(self) -> None:
        for output in self.engine.step():
            if output.request_id in self.mail:
                self.mail[output.request_id].append(output)


class Call:
    """Requests of one caller, who may add to them at any time. `close` (or `with`) cancels those that are left."""

    def __init__(self, calls: EngineCalls):
        self._calls = calls
        self._open: list[int] = []

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        for request_id in self._open[:]:
            self.drop(request_id)

    def __len__(self) -> int:
        """How many requests there are that were not dropped."""
        return len(self._open)

    def add(self, request: Request) -> int:
        """Queue a request; its id. Raises what `Engine.add` does."""
        request_id = self._calls.engine.add(request)
        self._calls.mail[request_id] = deque()
        self._open.append(request_id)
        return request_id

    def step(self) -> list[tuple[int, Output]]:
        """What came for this call's requests, the engine being stepped where nothing lies there. Drop those that have ended."""
        mail = self._calls.mail
        if not any(mail[request_id] for request_id in self._open):
            if self._calls.engine.closed:
                raise InputError("this model was closed while a prompt ran")
            self._calls.step()
        found = [(request_id, output) for request_id in self._open for output in mail[request_id]]
        for request_id in self._open:
            mail[request_id].clear()
        return found

    def drop(self, request_id: int) -> None:
        """Forget a request, ended or not."""
        self._calls.engine.cancel(request_id)
        del self._calls.mail[request_id]
        self._open.remove(request_id)
